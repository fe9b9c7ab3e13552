"""User functions that hang, crash, flood and lie: each row gets its outcome, the others are unharmed, nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes_of import wait_until

from grpoctl.errors import PluginFailed
from grpoctl.rewards.calling import scheduler
from grpoctl.rewards.calling.pool import RewardPool
from grpoctl.rewards.resolve.reference import resolve_reward
from grpoctl.rewards.sample import RewardOutcome, RewardSample

FIXTURES = Path(__file__).parent / "reward_fixtures"
TORTURE = FIXTURES / "torture.py"
COMPLETIONS = ["fine", "also fine", "bad", "fine again", "last"]


def samples(completions, *, group_size=8, source=None, prompt="q"):
    return [
        RewardSample(
            sample_id=f"p{i // group_size}@0#{i % group_size}",
            prompt=prompt,
            completion=completion,
            prompt_ids=[1],
            completion_ids=[2, 3],
            finish_reason="stop",
            source={"answer": "42"} if source is None else source,
        )
        for i, completion in enumerate(completions)
    ]


def scored(function, completions=COMPLETIONS, *, timeout_seconds=60.0, log_path=None, num_workers=1, **given):
    reference = resolve_reward(f"{TORTURE}:{function}")
    with RewardPool([reference], num_workers=num_workers, timeout_seconds=timeout_seconds, log_path=log_path) as pool:
        return pool.score(function, samples(completions, **given))


def the_bad_one(outcomes: list[RewardOutcome]) -> RewardOutcome:
    assert [o.status for i, o in enumerate(outcomes) if i != 2] == ["ok"] * 4
    assert all(o.reward is not None for i, o in enumerate(outcomes) if i != 2)
    assert outcomes[2].reward is None
    return outcomes[2]


@pytest.mark.parametrize("function", ["hang", "catastrophic_regex", "ignores_signals"])
def test_a_hanging_row_costs_its_deadline_and_no_other_row(function):
    bad = the_bad_one(scored(function, timeout_seconds=4.0))
    assert bad.status == "timeout"
    assert bad.error == "no answer within 4 s; its process was killed"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("os_exit", "its process exited with code 0"),
        ("system_exit", "SystemExit: giving up"),
        ("segfault", "its process was killed by SIGSEGV"),
    ],
)
def test_a_row_that_ends_the_process_is_a_crash(function, said):
    bad = the_bad_one(scored(function))
    assert bad.status == "crash"
    assert bad.error is not None and bad.error.startswith(said)


def test_a_segfault_shows_the_python_stack():
    error = the_bad_one(scored("segfault")).error
    assert error is not None and "in segfault" in error


def test_a_fork_bomb_is_killed_by_the_number_of_its_processes():
    reference = resolve_reward(f"{TORTURE}:fork_bomb")
    with RewardPool([reference], num_workers=1, timeout_seconds=25.0, max_processes=15) as pool:
        bad = the_bad_one(pool.score("fork_bomb", samples(COMPLETIONS)))
    assert bad.status == "crash"
    assert bad.error == "it started too many processes and was killed"


def test_a_fork_bomb_below_the_limit_is_killed_at_the_deadline():
    before = _num_processes()
    assert the_bad_one(scored("fork_bomb", timeout_seconds=4.0)).status == "timeout"
    assert _num_processes() < before + 15


def _num_processes():
    return sum(name.isdigit() for name in os.listdir("/proc"))


def test_a_copy_of_the_worker_that_returns_is_ended():
    assert [o.status for o in scored("forks_and_returns")] == ["ok"] * 5


def test_a_daemonised_grandchild_neither_blocks_nor_survives(tmp_path):
    pid_file = tmp_path / "pid"
    bad = the_bad_one(scored("daemonises", source={"pid_file": str(pid_file)}, timeout_seconds=20.0))
    assert bad.status == "crash"
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_large_output_fills_neither_memory_nor_the_log(tmp_path):
    log = tmp_path / "rewards.log"
    assert [o.status for o in scored("large_output", log_path=log)] == ["ok"] * 5
    assert log.stat().st_size < 1024 * 1024 + 200
    assert log.read_bytes().endswith(b"beyond 1 MiB is dropped]\n")


def test_prints_go_to_the_log_and_json_on_stdout_stays_whole(tmp_path):
    log = tmp_path / "rewards.log"
    script = f"""
import json, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]!r}
from pathlib import Path
from test_rewards_torture import scored
print(json.dumps([o.reward for o in scored("prints", log_path=Path({str(log)!r}))]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [1.0] * 5
    assert done.stderr == ""
    assert "print from bad\n" in log.read_text()
    assert "subprocess from last\n" in log.read_text()


def test_an_exception_is_kept_with_its_traceback():
    bad = the_bad_one(scored("raises"))
    assert bad.status == "error"
    assert bad.error is not None
    first, *rest = bad.error.splitlines()
    assert first == r"ZeroDivisionError: no \ud800 luck"
    assert any("torture.py" in line and "in raises" in line for line in rest)
    assert "calls.py" not in bad.error
    bad.error.encode()


@pytest.mark.parametrize(
    ("function", "value"), [("returns_nan", "nan"), ("returns_infinity", "-inf"), ("returns_huge_integer", "inf")]
)
def test_nan_and_infinity_are_refused_as_bugs(function, value):
    bad = the_bad_one(scored(function))
    assert bad.status == "error"
    assert bad.error is not None and bad.error.startswith(f"returned {value}: refused as a bug")


def test_none_is_unscorable_and_no_error():
    bad = the_bad_one(scored("returns_none"))
    assert (bad.status, bad.error) == ("unscorable", None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returns_text", "reward returns_text: returned str '1.0'; expected a number"),
        ("returns_dict_without_score", r"returned a dict with \['reward'\]; expected a key 'score'"),
        ("returns_list", r"returned list \[1.0, 2.0\]; expected a number"),
        ("batch_wrong_length", "reward batch_wrong_length: returned 4 for 5 completions"),
    ],
)
def test_a_result_that_no_row_can_make_right_ends_the_stage(function, message):
    with pytest.raises(PluginFailed, match=message):
        scored(function)


def test_scalars_of_any_library_are_cast():
    outcomes = scored("returns_scalar", ["bool", "int", "float32", "int64", "array", "np_bool", "tensor"])
    assert [o.reward for o in outcomes] == [1.0, 2.0, 0.5, 3.0, 4.0, 1.0, 0.25]
    assert all(type(o.reward) is float for o in outcomes)


def test_a_dict_gives_its_score_and_the_rest_as_extras():
    [outcome] = scored("returns_dict", ["x"])
    assert outcome.reward == 0.5
    assert outcome.extras == {"acc": 1.0, "pred": "7", "steps": "[1, 2]"}


def test_an_async_function_is_awaited():
    assert [o.reward for o in scored("asynchronous")] == [2.0] * 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_package",
            r"importing it failed: ModuleNotFoundError: No module named 'no_such_package' \(.*broken.py:1\)",
        ),
        ("import os; os._exit(4)", "importing it failed: its process exited with code 4"),
    ],
)
def test_a_module_that_cannot_be_imported_fails_before_any_row(source, message, tmp_path):
    (tmp_path / "broken.py").write_text(f"{source}\ndef reward(completion): return 1.0\n")
    reference = resolve_reward(f"{tmp_path / 'broken.py'}:reward")
    with pytest.raises(PluginFailed, match=message):
        RewardPool([reference], num_workers=1, timeout_seconds=5)


def test_a_module_with_a_syntax_error_names_the_line(tmp_path):
    (tmp_path / "broken.py").write_text("\ndef reward(completion)\n    return 1.0\n")
    with pytest.raises(PluginFailed, match=r"importing it failed: .*broken.py:2: expected ':'"):
        resolve_reward(f"{tmp_path / 'broken.py'}:reward")


def test_a_function_that_changes_its_inputs_harms_neither_other_rows_nor_other_rewards():
    references = [resolve_reward(f"{TORTURE}:{name}") for name in ("mutates", "counts")]
    shared_prompt = [{"role": "user", "content": "q"}]
    given = samples(COMPLETIONS, prompt=shared_prompt, source={"answer": "1", "level": 2})
    with RewardPool(references, num_workers=1, timeout_seconds=5) as pool:
        assert [o.reward for o in pool.score("mutates", given)] == [1.0] * 5
        assert [o.reward for o in pool.score("counts", given)] == [122.0] * 5
    assert shared_prompt == [{"role": "user", "content": "q"}]


def test_a_batch_function_that_changes_its_lists_harms_nobody():
    assert [o.reward for o in scored("batch_shuffles")] == [1.0] * 5


@pytest.mark.parametrize(
    ("function", "status"), [("batch_raises", "error"), ("batch_hangs", "timeout"), ("batch_dies", "crash")]
)
def test_a_failing_batch_is_split_into_groups_and_then_rows(monkeypatch, function, status):
    monkeypatch.setattr(scheduler, "WARM_UP_SECONDS", 1.0)
    outcomes = scored(function, ["a", "b", "c", "bad", *"efgh"], group_size=2, timeout_seconds=4.0)
    assert [o.status for o in outcomes] == ["ok", "ok", "ok", status, "ok", "ok", "ok", "ok"]
    assert [o.reward for o in outcomes] == [2.0, 2.0, 1.0, None, 2.0, 2.0, 2.0, 2.0]


def test_order_is_kept_over_several_workers_and_tasks():
    lengths = [1 + i % 37 for i in range(1000)]
    outcomes = scored("well", ["x" * n for n in lengths], num_workers=2)
    assert [o.reward for o in outcomes] == [float(n) for n in lengths]


def test_a_first_call_that_imports_has_a_deadline_of_its_own(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\nstate = []\ndef slow(completion):\n"
        "    if not state:\n        time.sleep(3)  # as importing sympy takes on a busy machine\n        state.append(1)\n"
        "    if completion == 'bad':\n        time.sleep(3600)\n    return 1.0\n"
    )
    reference = resolve_reward(f"{slow}:slow")
    with RewardPool([reference], num_workers=1, timeout_seconds=2.0) as pool:
        outcomes = pool.score("slow", samples(["a", "b", "bad", "c", "d"]))  # after the bad one a child warms up anew
    assert [o.status for o in outcomes] == ["ok", "ok", "timeout", "ok", "ok"]
    assert outcomes[2].error == "no answer within 2 s; its process was killed"


def test_too_many_failures_end_the_stage_early(monkeypatch):
    monkeypatch.setattr(scheduler, "WARM_UP_SECONDS", 0.5)
    reference = resolve_reward(f"{TORTURE}:hang")
    with (
        RewardPool([reference], num_workers=1, timeout_seconds=0.5) as pool,
        pytest.raises(
            PluginFailed, match="3 rows failed, more than the 2 allowed; the first, p0@0#0: timeout: no answer within"
        ),
    ):
        pool.score("hang", samples(["bad"] * 100), max_failures=2)


def test_secrets_do_not_reach_user_code(monkeypatch):
    for name in ("HF_TOKEN", "AWS_PROFILE", "OPENAI_API_KEY", "DB_PASSWORD", "KEPT_API_KEY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("DATABASE", "postgres://me:pw@host/db")
    reference = resolve_reward(f"{TORTURE}:environment")
    with RewardPool([reference], num_workers=1, timeout_seconds=5, keep_environment=["KEPT_API_KEY"]) as pool:
        [outcome] = pool.score("environment", samples(["x"]))
    names = set(str(outcome.extras["names"]).split())
    assert {"KEPT_API_KEY", "TOKENIZERS_PARALLELISM", "PATH"} <= names
    assert not names & {"HF_TOKEN", "AWS_PROFILE", "OPENAI_API_KEY", "DB_PASSWORD", "DATABASE"}


def test_user_code_runs_on_the_main_thread_without_the_caller_s_main_module():
    [outcome] = scored("main_module", ["x"])
    assert (outcome.reward, outcome.extras) == (1.0, {"has_file": False})


def test_children_die_with_a_parent_that_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    function = tmp_path / "forever.py"
    function.write_text(
        "import os\ndef forever(completion):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n    while True:\n        pass\n"
    )
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]!r}
from test_rewards_torture import *
with RewardPool([resolve_reward({str(function)!r} + ":forever")], num_workers=1, timeout_seconds=60) as pool:
    pool.score("forever", samples(["x"]))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the first call")
    child = Path(f"/proc/{int(pid_file.read_text())}")
    assert child.exists()
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.exists(), "the end of the child")
