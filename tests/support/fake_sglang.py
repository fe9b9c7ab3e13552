"""A real HTTP server that talks like SGLang 0.5.23 about a language model of one line, and misbehaves where it is told to.

Its model: every id has one log-probability whatever stands before it. So a probe is written by hand, and other weights are
another `shift`.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 1
VOCAB_SIZE = 100
BEST, SECOND = 5, 6
Answer = dict[str, Any]
Fault = Callable[["FakeSglang", BaseHTTPRequestHandler, Answer], Answer | None]
"""Called with the right answer; returns what to send instead, or None where it has dealt with the connection itself."""


def logprob(token: int, shift: float = 0.0) -> float:
    """Return the model's log-probability of an id at temperature 1."""
    return -0.05 - 0.1 * ((token - BEST) % 7) + shift


def status(code: int) -> Fault:
    """Answer with an error code."""

    def fault(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
        handler.send_response(code)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        handler.wfile.write(b"busy")
        return None

    return fault


def reset(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Break the connection off."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    return None


def half(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Send half an answer."""
    body = json.dumps(answer).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True
    return None


def hang(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Never answer anything again, health checks included."""
    server.hung.set()
    server.stopped.wait(30)
    return answer


def slow(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Take a while."""
    time.sleep(0.05)
    return answer


def aborted(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """End the request as an abort."""
    return answer | {"meta_info": answer["meta_info"] | {"finish_reason": {"type": "abort", "message": "Aborted"}}}


def without_a_logprob(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Leave one log-probability null."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    return answer | {"meta_info": answer["meta_info"] | {"output_token_logprobs": [[None, *pairs[0][1:]], *pairs[1:]]}}


def one_id_short(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Lose an id but not its log-probability."""
    return answer | {"output_ids": answer["output_ids"][:-1]}


def fewer_than_sampled(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Lose an id and its log-probability."""
    meta = answer["meta_info"]
    cut = {"output_token_logprobs": meta["output_token_logprobs"][:-1]}
    return answer | {"output_ids": answer["output_ids"][:-1], "meta_info": meta | cut}


def other_weights(server: FakeSglang, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    """Die and be restarted at once with the weights it had in the beginning."""
    server.shift = 0.5
    return reset(server, handler, answer)


class FakeSglang:
    """One server: its weights, what it was asked, and which samples go wrong how."""

    def __init__(self, *, shift: float = 0.0, raw: bool = False, cached: float = 0.0, loads: bool = True) -> None:
        self.shift = shift
        self.raw = raw
        self.cached = cached
        self.loads = loads
        self.version = "v1"
        self.dtype = "float32"
        self.faults: dict[int, Fault] = {}
        self.poison: dict[int, Fault] = {}
        self.default: Fault | None = None
        self.sampled: list[list[int]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.hung = threading.Event()
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.url = ""

    def fault(self, prompt: list[int]) -> Fault | None:
        """Return what goes wrong with the next sample; faults count samples from 0, poison goes by the first id."""
        with self.lock:
            self.sampled.append(prompt)
            number = len(self.sampled) - 1
        return self.poison.get(prompt[0]) or self.faults.get(number) or self.default

    def value(self, token: int) -> float:
        """Return the server's log-probability of an id."""
        return logprob(token, self.shift)

    def generated(self, body: Answer) -> tuple[Answer, bool]:
        """Return the answer to /generate and whether it is a sample."""
        params, ids = body["sampling_params"], body["input_ids"]
        meta: Answer = {"weight_version": self.version, "prompt_tokens": len(ids)}
        if body.get("logprob_start_len") == 0:
            inputs = [[None, ids[0], None], *([self.value(token), token, None] for token in ids[1:])]
            return {"output_ids": [], "meta_info": meta | {"input_token_logprobs": inputs}}, False
        if body.get("top_logprobs_num"):
            best, lead = self.value(BEST) + self.cached, self.value(BEST) - self.value(SECOND)
            second = best - lead / (1.0 if self.raw else params["temperature"])
            top = [[[best, BEST, None], [second, SECOND, None]]]
            return {"output_ids": [BEST], "meta_info": meta | {"output_top_logprobs": top}}, False
        drawn = [ids[0], ids[-1], EOS][: params["max_new_tokens"]]
        stopped = drawn[-1] == EOS
        meta |= {
            "finish_reason": {"type": "stop", "matched": EOS} if stopped else {"type": "length", "length": len(drawn)},
            "output_token_logprobs": [[self.value(token) / params["temperature"], token, None] for token in drawn],
            "completion_tokens": len(drawn),
            "weight_versions": [{"version": self.version, "start": 0, "end": len(drawn)}],
        }
        return {"output_ids": drawn, "meta_info": meta}, True

    def answer(self, path: str, body: Answer | None) -> Answer | None:
        """Return the answer to anything else."""
        if path == "/model_info":
            return {"model_path": "models/fake", "weight_version": self.version}
        if path == "/server_info":
            return {"version": "0.5.23", "dtype": self.dtype, "context_length": 64, "max_req_input_len": 58}
        if path == "/update_weights_from_disk" and body is not None:
            self.version = body["weight_version"] if self.loads is True else self.version
            self.shift = 0.0 if self.loads is True else self.shift
            return {"success": True, "message": "Succeeded"}
        return {} if path == "/health" else None


def _handler(fake: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            self._answered(None)

        def do_POST(self) -> None:
            self._answered(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _answered(self, body: Answer | None) -> None:
            if fake.hung.is_set():
                fake.stopped.wait(30)
                return
            fake.headers.append(dict(self.headers))
            fake.paths.append(self.path)
            answer: Answer | None
            if self.path == "/generate" and body is not None:
                answer, is_sample = fake.generated(body)
                fault = fake.fault(body["input_ids"]) if is_sample else None
                answer = fault(fake, self, answer) if fault else answer
                if answer is None:
                    return
            else:
                answer = fake.answer(self.path, body)
            content = json.dumps(answer if answer is not None else {"detail": "Not Found"}).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that a fault broke isn't worth a traceback."""


@contextmanager
def serving(*fakes: FakeSglang) -> Iterator[list[str]]:
    """Serve each fake on a port of its own; yield their addresses."""
    servers = [_Quiet(("127.0.0.1", 0), _handler(fake)) for fake in fakes]
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for fake, server, thread in zip(fakes, servers, threads, strict=True):
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread.start()
    try:
        yield [fake.url for fake in fakes]
    finally:
        for fake, server in zip(fakes, servers, strict=True):
            fake.stopped.set()
            server.shutdown()
            server.server_close()
