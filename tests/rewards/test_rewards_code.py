"""Programs from completions run in a bubblewrap sandbox: right and wrong ones, and those that try to get out.

Needs bubblewrap: `apt-get install bubblewrap`.
"""

from __future__ import annotations

import pytest
from reward_fixtures.reward_samples import sample

from grpoctl.errors import UsageError
from grpoctl.processes import sandbox
from grpoctl.rewards.builtin.programs import last_program
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import resolve_reward

ADD = "def add(a, b):\n    return a + b"


def outcome(program, tests, **options):
    [found] = outcomes([program], tests, **options)
    assert found.status == "ok", found.error
    return found


def outcomes(programs, tests, **options):
    reference = resolve_reward("code", kwargs=options)
    rows = [
        sample(f"Here:\n```python\n{p}\n```\nDone.", index=i, source={"tests": tests}) for i, p in enumerate(programs)
    ]
    with RewardPool([reference], num_workers=1, timeout_seconds=60) as pool:
        return pool.score("code", rows)


@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3",
        ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
        '["assert add(1, 2) == 3"]',
    ],
)
def test_statements_are_run_after_the_program(tests):
    assert outcome(ADD, tests).reward == 1.0
    assert outcome(ADD.replace("+", "-"), tests).reward == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}],
        {"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]},
        '{"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]}',
    ],
)
def test_input_and_output_pairs_are_compared(tests):
    assert outcome("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", tests).reward == 1.0
    assert outcome("print(sum(map(int, input().split())) % 10)", tests).reward == 0.0


def test_partial_credit_is_the_share_of_tests_passed():
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0", "assert False, 'never'"]
    found = outcome(ADD, tests, partial=True)
    assert found.reward == 0.5
    assert found.extras["num_passed"] == 2.0
    assert "AssertionError" in str(found.extras["failure"])


def test_tests_share_the_time_limit():
    slow = "import time\ndef f(n): time.sleep(n)"
    found = outcome(slow, ["f(0)", "f(60)", "f(0)"], partial=True, timeout_seconds=4.0)
    assert found.reward == pytest.approx(1 / 3)
    assert found.extras["failure"] == "no end within its time"


def test_the_last_python_block_counts_and_none_is_zero():
    assert last_program("```python\na\n```\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert last_program("no code") is None
    reference = resolve_reward("code")
    with RewardPool([reference], num_workers=1, timeout_seconds=60) as pool:
        [found] = pool.score("code", [sample("no code", source={"tests": "assert True"})])
    assert (found.reward, found.extras["failure"]) == (0.0, "no ```python block")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("while True: pass", "no end within its time"),
        ("import os; os._exit(0)", "ended early"),
        ("raise SystemExit", "ended early"),
        ("x = ' ' * (2 * 1024**3)", "MemoryError"),
        ("1 +", "SyntaxError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), timeout=5)", "Network is unreachable"),
        ("open('/usr/escaped', 'w')", "Read-only file system"),
        ("open('/etc/passwd')", "No such file or directory"),
        (
            "import os; assert len([p for p in os.listdir('/proc') if p.isdigit()]) < 5; os.kill(1, 9); assert 0",
            "AssertionError",
        ),
        ("import os; assert 'HOME' in os.environ", "AssertionError"),
        (
            "import os\nfor _ in range(200):\n  if os.fork() == 0:\n    import time; time.sleep(30)",
            "more than 64 processes",
        ),
        ("while True: print('x' * 10000)", "File too large"),
    ],
)
def test_a_program_cannot_cheat_hang_or_get_out(program, said):
    found = outcome(program, "assert True", timeout_seconds=3.0)
    assert found.reward == 0.0
    assert said in str(found.extras["failure"])


def test_a_row_without_usable_tests_is_an_error_of_that_row():
    [found] = outcomes([ADD], [])
    assert found.status == "error"
    assert found.error is not None and found.error.startswith("ValueError: the row has no tests")


def test_without_bubblewrap_nothing_runs(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UsageError, match=r"bubblewrap .bwrap. is not installed.*never run on the bare host.*apt-get install bubblewrap"
    ):
        resolve_reward("code")


def test_a_bubblewrap_that_cannot_work_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sandbox._probe_failure.cache_clear()
    with pytest.raises(UsageError, match="cannot make a sandbox here: bwrap: No permissions to create new namespace"):
        resolve_reward("code")
    sandbox._probe_failure.cache_clear()
