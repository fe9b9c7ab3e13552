"""FAULTS.md 48, 62–67 and the command line's own promises: settings refused where they were written, runs that were edited."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, tree
from small_set import SAMPLING

PIPELINE = """\
name: test
run_dir: run
iterations: 2
seed: 17
prompts: {path: "builtin:addition", id_column: prompt_id}
rollout: {group_size: 4, prompts_per_iteration: 4, max_new_tokens: 28}
score: {rewards: [{ref: reward.py:by_length}]}
update:
  lr: 1e-4
runtime: {num_threads: 1}
"""
REWARD = "def by_length(completion):\n    return float(len(completion) % 5)\n"


@pytest.fixture
def pipeline(empty: Path) -> Path:
    """A pipeline file of two small iterations."""
    (empty / "reward.py").write_text(REWARD)
    (empty / "p.yaml").write_text(PIPELINE)
    return empty / "p.yaml"


def edited(pipeline: Path, old: str, new: str) -> None:
    text = pipeline.read_text()
    assert old in text
    pipeline.write_text(text.replace(old, new))


def run(*more: object) -> Outcome:
    return grpoctl("run", "p.yaml", *more)


BAD_VALUES = [
    ("  lr: 1e-4", '  lr: "1e-6"', r"p\.yaml:9:3.*update\.lr", "1e-6", "number"),
    ("  lr: 1e-4", "  lr: -1e-6", r"p\.yaml:9:3.*update\.lr", "-1e-06", "greater than or equal to 0"),
    ("  lr: 1e-4", "  lr: .nan", r"p\.yaml:9:3.*update\.lr", "nan", "finite|greater"),
    ("  lr: 1e-4", "  lr: .inf", r"p\.yaml:9:3.*update\.lr", "inf", "finite"),
    ("  lr: 1e-4", "  lr:", r"p\.yaml:9:3.*update\.lr", "None", "number"),
    ("group_size: 4", "group_size: true", r"p\.yaml:6:11.*rollout\.group_size", "True", "integer"),
    ("group_size: 4", "group_size: 0", r"p\.yaml:6:11.*rollout\.group_size", "0", "greater than or equal to 1"),
    ("group_size: 4", "group_size: 4.5", r"p\.yaml:6:11.*rollout\.group_size", "4.5", "integer"),
    ("seed: 17", "seed: yes", r"p\.yaml:4:1.*seed", "'yes'", "integer"),
    ("  lr: 1e-4", "  loss: pro_clip", r"p\.yaml:9:3.*update\.loss", "pro_clip", "ppo_clip"),
    ("name: test\n", "", r"p\.yaml.*name", "missing", "add it"),
    ("  lr: 1e-4", "  lr_schedule: cosine", r"p\.yaml:8:1.*update", "cosine", "total_steps"),
]


@pytest.mark.parametrize(("old", "new", "where", "found", "expected"), BAD_VALUES)
def test_a_bad_value_is_refused_by_file_line_and_column(
    pipeline: Path, old: str, new: str, where: str, found: str, expected: str
) -> None:
    edited(pipeline, old, new)
    assert_refused(run(), 2, where=where, found=found, expected=expected)
    assert not Path("run").exists()


@pytest.mark.parametrize("value", ["abc", "-1", "nan", "true", ""])
def test_a_bad_value_of_a_flag_names_the_flag(empty: Path, value: str) -> None:
    assert_refused(
        grpoctl("update", "--lr", value), 2, where=r"--lr.*update\.lr", found="found", expected="expected|number"
    )
    outcome = grpoctl("update", "--set", f"update.lr={value}")
    assert_refused(outcome, 2, where=r"--set update\.lr=.*update\.lr", found="found", expected="expected|number")


def test_a_bad_value_of_an_environment_variable_names_the_variable(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPOCTL_UPDATE__LR", "fast")
    assert_refused(grpoctl("update"), 2, where="GRPOCTL_UPDATE__LR", found="'fast'", expected="number")
    monkeypatch.setenv("GRPOCTL_UPDATE__LR", "1e-6")
    monkeypatch.setenv("GRPOCTL_UPDATE__LRR", "1")
    assert_refused(grpoctl("update"), 2, where="GRPOCTL_UPDATE__LRR", found="unknown key", todo="did you mean 'lr'")


BAD_FILES: list[tuple[bytes, str, str, str]] = [
    (b"", r"p\.yaml", "nothing", "mapping"),
    (b"null\n", r"p\.yaml", "nothing", "mapping"),
    (b"# only a comment\n", r"p\.yaml", "nothing", "mapping"),
    (b"- a\n- b\n", r"p\.yaml", "list", "mapping"),
    (b"just words\n", r"p\.yaml", "just words", "mapping"),
    (b"name: a\n---\nname: b\n", r"p\.yaml:2", "second document", "one"),
    (b"name: a\nupdate:\n\tlr: 1\n", r"p\.yaml:3", "tab", "spaces"),
    (b"name: \xff\xfe\x00", r"p\.yaml", "not UTF-8", "YAML"),
    (b"\x00\x01\x02\x03", r"p\.yaml", "", "YAML|character"),
    (b"name: [a\n", r"p\.yaml:\d", "expected|found", ""),
    (b"name: *nowhere\n", r"p\.yaml:1", "alias", ""),
    (b"name: !!python/object:os.system x\n", r"p\.yaml", "", ""),
]


@pytest.mark.parametrize(("content", "where", "found", "expected"), BAD_FILES)
@pytest.mark.parametrize("command", [("run", "p.yaml"), ("rollout", "--config", "p.yaml")])
def test_a_file_that_is_no_mapping_is_refused(
    empty: Path, command: tuple[str, ...], content: bytes, where: str, found: str, expected: str
) -> None:
    (empty / "p.yaml").write_bytes(content)
    assert_refused(grpoctl(*command), 2, where=where, found=found, expected=expected)
    assert [place.name for place in empty.iterdir()] == ["p.yaml"]


def test_a_missing_file_is_refused(empty: Path) -> None:
    assert_refused(run(), 2, where=r"p\.yaml", found="can't be read", todo="check the path")


UNKNOWN = [
    ("seed: 17", "seeds: 17", r"p\.yaml:4:1", "'seeds'", "'seed'"),
    ("  lr: 1e-4", "  learning_rate: 1e-4", r"p\.yaml:9:3", "learning_rate", "known|mean"),
    ("  lr: 1e-4", "  clip_lo: 0.1", r"p\.yaml:9:3", "clip_lo", "'clip_low'"),
    ("group_size: 4", "group_sizes: 4", r"p\.yaml:6:11", "group_sizes", "'group_size'"),
    ("{ref: reward.py:by_length}", "{ref: reward.py:by_length, weigth: 2}", r"p\.yaml:7:\d+", "weigth", "weight"),
    ("update:", "stages: [a, b]\nupdate:", r"p\.yaml:8:1", "'stages'", "known|mean"),
]


@pytest.mark.parametrize(("old", "new", "where", "found", "closest"), UNKNOWN)
def test_an_unknown_key_is_refused_with_the_closest(
    pipeline: Path, old: str, new: str, where: str, found: str, closest: str
) -> None:
    edited(pipeline, old, new)
    assert_refused(run(), 2, where=where, found=f"unknown key.*{found}", todo=closest)


def test_a_duplicate_key_is_refused_with_both_lines(pipeline: Path) -> None:
    edited(pipeline, "  lr: 1e-4", "  lr: 1e-4\n  lr: 1e-5")
    assert_refused(run(), 2, where=r"p\.yaml:10:3", found="duplicate key.*lr", expected="line 9", todo="keep one")
    edited(pipeline, "  lr: 1e-4\n  lr: 1e-5", "  lr: 1e-4\nseed: 4")
    assert_refused(run(), 2, where=r"p\.yaml:10:1", found="duplicate key.*seed", expected="line 4", todo="keep one")


def test_unknown_keys_of_set_and_environment_are_refused(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        grpoctl("rollout", "--set", "rollout.group_sise=2"), 2, where="--set", found="group_sise", todo="group_size"
    )
    assert_refused(grpoctl("rollout", "--set", "rolout.group_size=2"), 2, where="--set", found="rolout", todo="rollout")
    assert_refused(grpoctl("rollout", "--set", "group_size"), 2, where="--set group_size", expected="key=value")
    monkeypatch.setenv("GRPOCTL_ROLOUT__GROUP_SIZE", "2")
    assert_refused(grpoctl("rollout"), 2, where="GRPOCTL_ROLOUT__GROUP_SIZE", found="rolout", todo="rollout")


def test_a_missing_environment_variable_is_refused(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(pipeline, "run_dir: run", "run_dir: ${NOWHERE_SET}/run")
    assert_refused(run(), 2, where=r"p\.yaml:2:1", found="NOWHERE_SET isn't set", todo="set it")
    monkeypatch.setenv("NOWHERE_SET", "here")
    done("run", "p.yaml", "--iterations", 1)
    assert is_committed("here/run/iter-000000/update")


def test_an_unknown_stage_or_iteration_to_start_from_is_refused(pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 1)
    before = tree("run")
    outcome = run("--from", "run/iter-000000/scoring", "--run-dir", "new")
    assert_refused(outcome, 2, where="--from", found="scoring", expected="rollout, logprob, score, update")
    outcome = run("--from", "run/iter-000007/score", "--run-dir", "new")
    assert_refused(outcome, 3, where="run/iter-000007", found="nothing|no ", todo=".")
    assert_refused(run("--from", "run/iter-000000/score"), 2, where="--from", todo="--run-dir")
    assert tree("run") == before


def test_a_pipeline_edited_after_it_began_is_a_conflict_that_shows_the_change(pipeline: Path) -> None:
    done("run", "p.yaml")
    before = tree("run")
    edited(pipeline, "lr: 1e-4", "lr: 2e-4")
    outcome = run("--iterations", 3)
    assert_refused(
        outcome,
        5,
        where="iter-000000/lock.json",
        found="update.lr: 0.0001",
        expected="→ 0.0002",
        todo="--run-dir.*--accept-changes",
    )
    assert tree("run") == before
    outcome = done("run", "p.yaml", "--iterations", 3, "--accept-changes")
    assert "iteration 0 keeps the settings it began with" in outcome.err
    kept = {name: digest for name, digest in before.items() if name.startswith("iter-") and "trainer_state" not in name}
    assert kept.items() <= tree("run").items()
    rates = [manifest(f"run/iter-00000{i}/update")["config"]["update"]["lr"] for i in range(3)]
    assert rates == [1e-4, 1e-4, 2e-4]


def test_settings_that_change_no_result_may_change(pipeline: Path) -> None:
    done("run", "p.yaml", "--iterations", 1)
    edited(pipeline, "num_threads: 1", "num_threads: 1, micro_batch_tokens: 512")
    edited(pipeline, "iterations: 2", "iterations: 1")
    assert "already done" in run().out


EXTRAS = {
    "transformers": (("rollout", "--limit", "1"), "torch"),
    "torch": (("rollout", "--limit", "1"), "torch"),
}


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_extra_names_the_command_that_installs_it(empty: Path, package: str) -> None:
    command, extra = EXTRAS[package]
    (empty / "hide.py").write_text(
        f"""
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)
sys.argv = ["grpoctl", *{list(command)!r}]
from grpoctl.cli import main
main()
"""
    )
    ran = subprocess.run([sys.executable, "hide.py"], capture_output=True, text=True, check=False)
    outcome = Outcome(code=ran.returncode, out=ran.stdout, err=ran.stderr)
    assert_refused(outcome, 2, found=f"{package}.*not installed", todo=rf'pip install "grpoctl\[{extra}\]"')


def test_a_url_without_its_package_names_the_command_that_installs_it(work: Path) -> None:
    pytest.importorskip("fsspec")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        outcome = grpoctl("score", "--rollouts", "s3://bucket/rollouts", "--reward", "accuracy", "--out", "new")
        assert_refused(outcome, 2, where="s3://bucket", found="s3fs", todo=r'pip install "grpoctl\[s3\]"')
    assert_refused(grpoctl("score", "--rollouts", "zz://b/r", "--reward", "accuracy"), 2, where="zz://b/r", found="zz")


STAGES: dict[str, tuple[Any, ...]] = {
    "rollouts": ("rollout", "--policy", "builtin:tiny", *SAMPLING),
    "scores": ("score", "--reward", "accuracy"),
    "logprobs": ("logprob", "--policy", "builtin:tiny", "--reference", "builtin:tiny"),
    "update": ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--lr", "1e-4"),
    "policies": ("sync", "--update", "update"),
}


@pytest.mark.parametrize("name", STAGES)
def test_rerunning_a_stage_says_already_done_and_touches_nothing(work: Path, name: str) -> None:
    before = tree(".")
    flag = "--to" if name == "policies" else "--out"
    outcome = done(*STAGES[name], flag, name)
    assert outcome.out.splitlines()[0].startswith(f"{STAGES[name][0]}: already done → {name}")
    record = done(*STAGES[name], flag, name, "--json").record
    assert (record["state"], record["exit_code"], record["stage"]) == ("already_done", 0, STAGES[name][0])
    assert tree(".") == before


CONFLICTS = {
    "rollouts": (("--set", "rollout.temperature=0.7"), r"rollout\.temperature: 1\.0 → 0\.7"),
    "scores": (("--advantages", "rloo"), r'score\.advantages: "grpo" → "rloo"'),
    "logprobs": (("--set", "logprob.entropy=true"), r"logprob\.entropy: false → true"),
    "update": (("--lr", "3e-4"), r"update\.lr: 0\.0001 → 0\.0003"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_other_settings_into_a_finished_artifact_are_a_conflict(work: Path, name: str) -> None:
    more, found = CONFLICTS[name]
    before = tree(".")
    outcome = grpoctl(*STAGES[name], *more, "--out", name)
    assert_refused(outcome, 5, where=name, found=found, expected="committed from other", todo="another --out")
    outcome = grpoctl(*STAGES[name], *more, "--out", name, "--json")
    assert (outcome.code, outcome.record["exit_code"], outcome.record["kind"]) == (5, 5, "Conflict")
    assert outcome.record["error"] in outcome.error
    assert tree(".") == before


def test_a_seed_of_another_run_is_a_conflict(work: Path) -> None:
    outcome = grpoctl(*STAGES["rollouts"], "--seed", 4, "--out", "rollouts")
    assert_refused(outcome, 5, where="rollouts", found=r"seed: 3 → 4", todo="another --out")


@pytest.mark.parametrize("name", STAGES)
def test_json_prints_one_line_and_the_result_file_holds_it(work: Path, name: str) -> None:
    flag = "--to" if name == "policies" else "--out"
    outcome = done(*STAGES[name], flag, "new", "--json", "--result-file", "result.json")
    assert outcome.record["state"] == "done"
    assert json.loads(Path("result.json").read_text()) == outcome.record


def test_json_of_a_run_and_of_its_errors_is_one_line(pipeline: Path) -> None:
    record = done("run", "p.yaml", "--iterations", 1, "--json").record
    assert (record["state"], record["iterations"]) == ("done", 1)
    assert done("plan", "p.yaml", "--json").record["state"] == "planned"
    assert done("status", "run", "--json").record["state"] == "done"
    edited(pipeline, "lr: 1e-4", "lr: -1")
    record = run("--json").record
    assert (record["state"], record["exit_code"]) == ("error", 2)
    assert "p.yaml:9:3" in record["error"]


@pytest.mark.parametrize("arguments", [[], ["--nonsense"], ["dance"], ["rollout", "--nonsense"], ["run"]])
def test_usage_errors_exit_2(empty: Path, arguments: list[str]) -> None:
    words = [sys.executable, "-m", "grpoctl", *arguments]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 2


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["grpoctl", "--help"]
from grpoctl.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None)
heavy = {"torch", "pyarrow", "pydantic", "numpy", "transformers", "fsspec", "ruamel"} & set(sys.modules)
assert not heavy, heavy
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "rollout" in ran.stdout
