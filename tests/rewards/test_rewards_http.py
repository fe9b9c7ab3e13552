"""A reward endpoint on a real local server: answers, retries, refusals, hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_fixtures.reward_samples import sample

from grpoctl.errors import PluginFailed, UsageError
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import check_columns, resolve_reward


@contextmanager
def endpoint(answers) -> Iterator[tuple[str, list]]:
    """Serve each answer `(status, body)` in turn, the last one forever; a body may be a function of the samples."""
    asked: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = answers[min(len(asked), len(answers) - 1)]
            asked.append(body["samples"])
            reply = answer(body["samples"]) if callable(answer) else answer
            if reply is None:  # drop the connection without a word
                return
            reply = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            if status in (301, 302, 307):
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        server.server_close()


def scored(url, rows, *, timeout_seconds=5.0):
    reference = resolve_reward(url)
    check_columns(reference, [])
    with RewardPool([reference], num_workers=1, timeout_seconds=timeout_seconds) as pool:
        return pool.score("http", rows)


def rows(*completions):
    return [sample(c, index=i, source={"answer": "4"}) for i, c in enumerate(completions)]


def right(samples):
    return {"rewards": [float(s["completion"] == s["source"]["answer"]) for s in samples]}


def test_an_endpoint_gets_the_samples_and_gives_rewards():
    with endpoint([(200, right)]) as (url, asked):
        outcomes = scored(url, rows("4", "5"))
    assert [(o.status, o.reward) for o in outcomes] == [("ok", 1.0), ("ok", 0.0)]
    assert len(asked) == 1
    assert set(asked[0][0]) >= {"sample_id", "prompt", "completion", "completion_ids", "finish_reason", "source"}


def test_null_is_unscorable_nan_is_an_error_and_a_dict_has_extras():
    with endpoint([(200, b'{"rewards": [null, NaN, {"score": 0.5, "why": "close"}]}')]) as (url, _):
        outcomes = scored(url, rows("a", "b", "c"))
    assert [o.status for o in outcomes] == ["unscorable", "error", "ok"]
    assert outcomes[2].extras == {"why": "close"}


@pytest.mark.parametrize("status", [408, 503])
def test_a_passing_fault_is_retried(status):
    with endpoint([(status, {}), (200, right)]) as (url, asked):
        assert [o.reward for o in scored(url, rows("4"))] == [1.0]
    assert len(asked) == 2


def test_a_dropped_connection_is_retried():
    with endpoint([(200, lambda _: None), (200, right)]) as (url, asked):
        assert [o.reward for o in scored(url, rows("4"))] == [1.0]
    assert len(asked) == 2


def test_after_the_last_retry_the_rows_fail_and_are_not_zero():
    with endpoint([(503, {})]) as (url, asked):
        outcomes = scored(url, rows("4", "5"))
    assert [(o.status, o.reward) for o in outcomes] == [("error", None)] * 2
    assert "503" in str(outcomes[0].error) and "after 4 attempts" in str(outcomes[0].error)
    assert len(asked) == 4


def test_nobody_listening_is_an_error_per_row():
    with endpoint([(200, right)]) as (url, _):
        pass
    [outcome] = scored(url, rows("4"))
    assert (outcome.status, outcome.reward) == ("error", None)
    assert "Connection refused" in str(outcome.error)


def test_an_endpoint_that_hangs_is_a_timeout():
    def slow(_):
        time.sleep(3)

    with endpoint([(200, slow)]) as (url, asked):
        [outcome] = scored(url, rows("4"), timeout_seconds=0.2)
    assert outcome.status == "timeout"
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"detail": "no such field"}), 'answered 400 Bad Request: {"detail": "no such field"}; .*not retried'),
        ((404, b""), "answered 404 Not Found: no body"),
        ((302, b""), "answered 302 Found"),
        ((200, b"<html>"), r"answered no JSON \(b'<html>'\); expected"),
        ((200, {"scores": [1.0]}), r'answered b.*scores.*; expected {"rewards": \[...\]}'),
        ((200, {"rewards": [1.0]}), "returned 1 for 2 completions"),
        ((200, {"rewards": ["1.0", "0.0"]}), "returned str '1.0'; expected a number"),
    ],
)
def test_a_refusal_or_a_wrong_answer_ends_the_stage_at_once(answer, message):
    with endpoint([answer]) as (url, asked), pytest.raises(PluginFailed, match=message):
        scored(url, rows("4", "5"))
    assert len(asked) == 1


def test_an_endpoint_takes_no_options_and_may_have_a_name():
    with pytest.raises(UsageError, match="an endpoint takes no options; found n"):
        resolve_reward("https://judge.example/score", kwargs={"n": 1})
    reference = resolve_reward("https://judge.example/score", name="judge")
    assert (reference.kind, reference.signature, reference.name) == ("http", "http", "judge")
