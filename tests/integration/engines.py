"""Real vLLM and SGLang servers on this machine's CPU, from environments of their own; killed with all they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
START_SECONDS = 300
CONTEXT = 1024
COMMON = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip
SGLANG_ENVIRONMENT = {
    "PYTHONPATH": str(HERE / "sglang_cpu/shim"), "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Engine:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it and all its children at once, as a lost machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to it and its children, as SIGSTOP for a hang."""
        os.killpg(self.process.pid, number)

    def busy(self) -> bool:
        """Return whether it is sampling something now (vLLM)."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines)


def interpreter(variable: str, target: str) -> str:
    """Return the interpreter that an environment variable names, or fail saying how to get one."""
    python = os.environ.get(variable, "")
    assert Path(python).is_file(), (
        f"{variable} names no interpreter: run `make {target}` and set {variable} to the path it prints, or `make "
        "test-integration`, which does both"
    )
    return python


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def vllm_command(
    model: str | Path, *options: str, dtype: str = "float32", raw: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command of vLLM's OpenAI server on a policy folder, without its address, and its variables."""
    mode = [] if raw else ["--logprobs-mode", "processed_logprobs"]
    command = [
        interpreter("GRPOCTL_VLLM_PYTHON", "env-vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--dtype", dtype, "--enforce-eager", "--no-enable-chunked-prefill", "--max-model-len", str(CONTEXT),
        *mode, *options,
    ]  # fmt: skip
    return command, {**COMMON, **VLLM_ENVIRONMENT}


def sglang_command(model: str | Path, *, dtype: str = "float32") -> tuple[list[str], dict[str, str]]:
    """Return SGLang's command; its context is a little longer, since it keeps some of it back."""
    command = [
        interpreter("GRPOCTL_SGLANG_PYTHON", "env-sglang"), str(HERE / "sglang_cpu/launch.py"), "--model-path", str(model),
        "--device", "cpu", "--dtype", dtype, "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--mem-fraction-static", "0.2", "--max-total-tokens", "8192", "--max-running-requests", "16",
        "--context-length", str(CONTEXT + 8), "--cuda-graph-backend-decode", "disabled",
        "--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup",
    ]  # fmt: skip
    return command, {**COMMON, **SGLANG_ENVIRONMENT}


@contextmanager
def vllm_server(
    model: str | Path, log: Path, *options: str, dtype: str = "float32", raw: bool = False
) -> Iterator[Engine]:
    """Start vLLM's OpenAI server on a policy folder."""
    with _running(*vllm_command(model, *options, dtype=dtype, raw=raw), log) as engine:
        yield engine


@contextmanager
def sglang_server(model: str | Path, log: Path, *, dtype: str = "float32") -> Iterator[Engine]:
    """Start SGLang's server on a policy folder."""
    with _running(*sglang_command(model, dtype=dtype), log) as engine:
        yield engine


@contextmanager
def _running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Engine]:
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = Engine(url=f"http://127.0.0.1:{port}", process=process)
    try:
        _wait(engine, log)
        yield engine
    finally:
        if process.poll() is None:
            engine.signal(signal.SIGCONT)
            engine.kill()


def _wait(engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert engine.process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"the server didn't start in {START_SECONDS} s: {log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"{engine.url}/v1/models", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
