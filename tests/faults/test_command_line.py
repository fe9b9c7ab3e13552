"""Extras, already done, conflicts, --json, --help, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, tree
from pipeline_file import PIPELINE, edited, run
from small_set import SAMPLING

HIDE = """
import importlib.util, sys
hidden = sys.argv[1].split(",")
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find_spec(name, *rest)
sys.argv[1:] = sys.argv[2:]
from grpoctl.cli.main import main
main()
"""


def without(packages: str, *words: str) -> Outcome:
    """Run a command in an environment that lacks some packages."""
    ran = subprocess.run([sys.executable, "-c", HIDE, packages, *words], capture_output=True, text=True, check=False)
    return Outcome(code=ran.returncode, out=ran.stdout, err=ran.stderr)


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize(
    "command", [("rollout", "--limit", "1"), ("update", "--logprobs", "logprobs"), ("run", "p.yaml")]
)
def test_a_missing_extra_names_the_command_that_installs_it(work: Path, package: str, command: tuple[str, ...]) -> None:
    Path("p.yaml").write_text(PIPELINE)
    outcome = without(package, *command, *(() if command[0] == "run" else ("--out", "new")))
    assert_refused(outcome, 2, found=f"{package}.*not installed", todo=r'pip install "grpoctl\[torch\]"')
    assert not is_committed("new")


def test_scoring_needs_no_torch(work: Path) -> None:
    outcome = without("torch,transformers,safetensors", "score", "--reward", "accuracy", "--out", "new")
    assert outcome.code == 0, outcome.err
    assert manifest("new")["content_digest"] == manifest("scores")["content_digest"]


def test_a_url_without_its_package_names_the_command_that_installs_it(work: Path) -> None:
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
    "rollouts": (("--set", "rollout.temperature=0.7"), r"rollout\.temperature: 1 → 0\.7"),
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


def test_json_of_a_run_and_of_its_errors_is_one_line(small_pipeline: Path) -> None:
    record = done("run", "p.yaml", "--iterations", 1, "--json").record
    assert (record["state"], record["iterations"]) == ("done", 1)
    assert done("plan", "p.yaml", "--json").record["state"] == "planned"
    assert done("status", "run", "--json").record["state"] == "done"
    edited(small_pipeline, "lr: 1e-4", "lr: -1")
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
from grpoctl.cli.main import main
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
