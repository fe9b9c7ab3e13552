"""What a reward is given of a row and of the run, by the command."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from command_line import assert_refused, done, ended, grpoctl, rows, start
from pipeline_file import edited
from processes_of import wait_until

from grpoctl.processes.tree import descendants

OPENRLHF = """
def by_openrlhf(queries, prompts, labels):
    whole, prompt = queries[0], prompts[0]
    assert isinstance(prompt, str) and whole.startswith(prompt), (whole, prompt)
    assert prompt.startswith("<|im_start|>user\\n") and prompt.endswith("<|im_start|>assistant\\n"), prompt
    assert labels[0] is not None
    return {"rewards": [float(len(whole) - len(prompt))], "extra_logs": {}}
"""
TRL = """
def by_trl(completions, trainer_state, **kwargs):
    return [1.0 + trainer_state.max_steps + i % 2 for i, _ in enumerate(completions)]
"""


def test_an_openrlhf_reward_sees_the_prompt_as_the_model_saw_it(work: Path) -> None:
    Path("r.py").write_text(OPENRLHF)
    done("score", "--reward", "r.py:by_openrlhf", "--out", "new")
    for score, sampled in zip(rows("new"), rows("rollouts"), strict=True):
        assert score["reward"] == len(sampled["completion"])
    shown = done("reward", "test", "r.py:by_openrlhf", "--data", "rollouts", "-n", 3, "--json").record
    assert [row["reward_status"] for row in shown["rows"]] == ["ok"] * 3


def test_an_openrlhf_reward_whose_policy_is_another_one_now_is_refused(work: Path) -> None:
    """The prompt's text needs the tokenizer that made the ids."""
    Path("r.py").write_text(OPENRLHF)
    import shutil

    from damage import TINY

    shutil.copytree(TINY, "model")
    done("rollout", "--policy", "model", "--limit", 2, "--group-size", 2, "--max-new-tokens", 8, "--out", "mine")
    Path("model/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert_refused(
        grpoctl("score", "--rollouts", "mine", "--reward", "r.py:by_openrlhf", "--out", "new"), 3, found="tokenizer"
    )


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_trl_reward_knows_how_many_iterations_the_run_has(small_pipeline: Path, iterations: int) -> None:
    (small_pipeline.parent / "reward.py").write_text(TRL)
    edited(small_pipeline, "reward.py:by_length", "reward.py:by_trl")
    done("run", small_pipeline, "--iterations", iterations)
    assert rows("run/iter-000000/scores")[0]["reward"] == 1.0 + iterations


def test_more_iterations_later_change_no_scores(small_pipeline: Path) -> None:
    (small_pipeline.parent / "reward.py").write_text(TRL)
    edited(small_pipeline, "reward.py:by_length", "reward.py:by_trl")
    done("run", small_pipeline, "--iterations", 1)
    done("run", small_pipeline, "--iterations", 2)
    assert rows("run/iter-000000/scores")[0]["reward"] == 2.0


KEY = "import os\ndef with_key(completion):\n    return float(len(os.environ['JUDGE_API_KEY']) + len(completion) % 3)\n"


def test_a_key_reaches_the_reward_that_it_is_named_for(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "12345")
    Path("r.py").write_text(KEY)
    assert grpoctl("score", "--reward", "r.py:with_key", "--out", "without").code == 6
    done("score", "--reward", "r.py:with_key", "--out", "with", "--set", "runtime.reward_environment=[JUDGE_API_KEY]")
    assert rows("with")[0]["reward"] >= 5.0


AT_IMPORT = """
import functools, os
KEY = os.environ["JUDGE_API_KEY"]
def judge(key, completion):
    return float(len(key) + len(completion) % 3)
judged = functools.partial(judge, KEY)
"""


def test_a_key_that_is_read_at_import_reaches_it_too(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "12345")
    Path("r.py").write_text(AT_IMPORT)
    assert grpoctl("score", "--reward", "r.py:judged", "--out", "without").code == 6
    done("score", "--reward", "r.py:judged", "--out", "with", "--set", "runtime.reward_environment=[JUDGE_API_KEY]")
    tried = done(
        "reward", "test", "r.py:judged", "--data", "rollouts", "--environment", "JUDGE_API_KEY", "--json"
    ).record
    assert all(row["reward"] >= 5.0 for row in tried["rows"])


def test_a_signal_to_the_whole_job_is_no_rows_crash(work: Path) -> None:
    Path("r.py").write_text(
        "import pathlib, time\ndef slow(completion):\n    pathlib.Path('called').touch()\n"
        "    time.sleep(0.3)\n    return float(len(completion) % 3)\n"
    )
    process = start("score", "--reward", "r.py:slow", "--out", "new")
    wait_until(Path("called").exists, "the first call")
    for pid in (*descendants(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    outcome = ended(process)
    assert outcome.code in (0, 143), outcome.err  # its only shard may be what it waited for
    assert "crash" not in outcome.err


NOISY = """
import os, sys, warnings
print("imported")
sys.stderr.write("to stderr\\n")
def noisy(completion):
    print("scoring", completion[:5])
    warnings.warn("careful")
    os.system("echo from a shell; echo and its stderr >&2")
    return float(len(completion) % 3)
"""


def test_what_a_reward_prints_is_kept_beside_its_scores(work: Path) -> None:
    Path("r.py").write_text(NOISY)
    outcome = done("score", "--reward", "r.py:noisy", "--out", "deep/new", "--json")
    assert outcome.record["state"] == "done"
    said = Path("deep/new/_logs/rewards.log").read_text()
    assert all(
        words in said for words in ("imported", "to stderr", "scoring ", "careful", "from a shell", "and its stderr")
    )
    assert "scoring" not in outcome.err
