"""Servers that `run` starts: they answer, end with it, and tell why where they don't. Real engines are in integration/."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from addition import QUICKSTART
from processes_of import PATIENCE_SECONDS, is_running

from grpoctl.errors import InputRefused, TryAgain, UsageError
from grpoctl.pipeline import servers as managed_servers
from grpoctl.pipeline.servers import ManagedServers
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job
from grpoctl.settings.runtime import RuntimeConfig, ServeConfig
from grpoctl.stages.context import Context

ANSWERING = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{sys.argv[2]} {os.environ.get('NUMBER')} {os.getpid()}".encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def servers(*command: str, **settings: object) -> Iterator[ManagedServers]:
    serve = ServeConfig(command=command, environment={"NUMBER": "{index}"}, **settings)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as logs:
        managed = ManagedServers(RuntimeConfig(serve=serve), Context(quiet=True), Path(logs))
        try:
            yield managed
        finally:
            managed.close()


def words(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return answer.read().decode().split()


def test_each_replica_is_started_on_the_policys_folder_and_kept(tmp_path: Path) -> None:
    with servers(sys.executable, "-c", ANSWERING, "{port}", "{policy}", replicas=2) as managed:
        urls = managed.serving("builtin:tiny")
        first = [words(url) for url in urls]
        assert [Path(folder).name for folder, _, _ in first] == ["tiny", "tiny"]
        assert [number for _, number, _ in first] == ["0", "1"]
        assert managed.serving("builtin:tiny") == urls
        assert [words(url) for url in urls] == first
        pids = [int(pid) for _, _, pid in first]
        os.kill(pids[0], signal.SIGKILL)
        while is_running(pids[0]):
            time.sleep(0.01)
        again = managed.serving("builtin:tiny")  # the dead one is started anew, the other is kept
        assert again[1] == urls[1] and int(words(again[0])[2]) != pids[0]
        pids.append(int(words(again[0])[2]))
    assert not any(is_running(pid) for pid in pids)


def test_a_command_that_ends_is_told_with_its_last_words() -> None:
    with (
        servers(sys.executable, "-c", "raise SystemExit('no such model')", "{port}") as managed,
        pytest.raises(
            InputRefused,
            match=r"(?s)server 0 ended with status 1 before .*0.log ends with:.*no such model",
        ),
    ):
        managed.serving("builtin:tiny")


def test_a_program_that_is_not_there_is_named() -> None:
    with (
        servers("no-such-program", "{port}") as managed,
        pytest.raises(InputRefused, match=r"(?s)server 0 ended.*no-such-program can't be started: No such file"),
    ):
        managed.serving("builtin:tiny")


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    silent = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); print('loading', flush=True)"
    silent += "; time.sleep(99)"
    with (
        servers(sys.executable, "-c", silent, start_seconds=2.0) as managed,
        pytest.raises(TryAgain, match=r"(?s)server 0 doesn't answer after 2 s.*loading"),
    ):
        managed.serving("builtin:tiny")
    assert not is_running(int(note.read_text()))


def test_servers_end_with_the_process_that_started_them_even_when_it_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"  # as engines do
    starter = (
        "from grpoctl.settings.runtime import RuntimeConfig, ServeConfig; from grpoctl.stages.context import Context\n"
        "from grpoctl.pipeline.servers import ManagedServers; import sys\n"
        f"serve = ServeConfig(command=(sys.executable, '-c', {server!r}))\n"
        "from pathlib import Path\n"
        f"ManagedServers(RuntimeConfig(serve=serve), Context(quiet=True), Path({str(tmp_path)!r})).serving('builtin:tiny')"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not (note.exists() and note.read_text()):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    pid = int(note.read_text())
    process.kill()
    process.wait()
    while is_running(pid):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_hanging_engine_ends_the_process_with_try_again() -> None:
    hang = (
        "import logging, time; logging.basicConfig(); from grpoctl.processes.watchdog import watched\n"
        "with watched('vllm 0', lambda: 5, patience_seconds=0.3): time.sleep(60)"
    )
    result = subprocess.run([sys.executable, "-c", hang], capture_output=True, text=True, check=False)
    assert result.returncode == 75
    assert "error: vllm 0 did nothing for 0.3 s (runtime.engine_timeout_seconds): it hangs" in result.stderr


def test_an_engine_that_works_is_left_alone() -> None:
    work = (
        "import itertools, time; from grpoctl.processes.watchdog import watched\n"
        "with watched('vllm 0', itertools.count().__next__, patience_seconds=0.3): time.sleep(1)"
    )
    assert subprocess.run([sys.executable, "-c", work], check=False).returncode == 0


def test_what_a_dead_server_started_is_ended_before_the_next_one(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(99)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])\n{ANSWERING}"
    with servers(sys.executable, "-c", parent, "{port}", "{policy}") as managed:
        leader = int(words(managed.serving("builtin:tiny")[0])[2])
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        first = int(note.read_text().split()[0])
        os.kill(leader, signal.SIGKILL)
        while is_running(leader):
            time.sleep(0.01)
        managed.serving("builtin:tiny")
        assert not is_running(first)
    assert not any(is_running(int(pid)) for pid in note.read_text().split())


def test_servers_that_ignore_the_request_to_stop_are_killed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_servers, "STOP_SECONDS", 0.5)
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{ANSWERING}"
    with servers(sys.executable, "-c", stubborn, "{port}", "{policy}", replicas=3) as managed:
        pids = [int(words(url)[2]) for url in managed.serving("builtin:tiny")]
    assert not any(is_running(pid) for pid in pids)


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with servers(sys.executable, "-c", ANSWERING, "{port}", "{policy}", start_seconds=30.0) as managed:
        assert len(managed.serving("builtin:tiny")) == 1


def test_a_server_that_wants_a_key_says_where_it_goes() -> None:
    locked = ANSWERING.replace("send_response(200)", "send_response(401)")
    with (
        servers(sys.executable, "-c", locked, "{port}", "{policy}") as managed,
        pytest.raises(InputRefused, match=r"refuses access \(401\); its key goes into GRPOCTL_SERVER_API_KEY"),
    ):
        managed.serving("builtin:tiny")


def test_servers_that_no_stage_would_ask_are_refused() -> None:
    settings = ["runtime.serve={command: [server]}", "run_dir=nowhere"]
    with pytest.raises(UsageError, match=r"runtime\.serve starts servers for rollout.engine: server"):
        load_job(PipelineConfig, flags={}, sets=settings, file=QUICKSTART, environment={})


def test_the_last_words_of_a_hanging_engine_reach_json_and_the_result_file(tmp_path: Path) -> None:
    record = tmp_path / "result.json"
    hang = (
        "import time; from grpoctl.processes import watchdog; from grpoctl.engines.hf import engine\n"
        "from grpoctl.engines.registry import SamplingEngine\n"
        "def hang(*_):\n    with watchdog.watched('vllm 0', lambda: 5, patience_seconds=0.3): time.sleep(60)\n"
        "engine.ENGINE = SamplingEngine(sampler=hang)\n"
        "from grpoctl.cli.main import main; main()"
    )
    words = ["rollout", "--limit", "1", "--out", str(tmp_path / "r"), "--json", "--result-file", str(record)]
    result = subprocess.run([sys.executable, "-c", hang, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 75, result.stderr
    assert json.loads(result.stdout) == json.loads(record.read_text())
    assert json.loads(result.stdout)["kind"] == "TryAgain"
