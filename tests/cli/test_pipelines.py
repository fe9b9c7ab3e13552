"""The pipeline files that the repository ships: each is valid, and keeps the numbers that the documentation promises."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpoctl.builtin.fetch_smollm2 import write_prompts
from grpoctl.settings.fields import RewardConfig
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job

REPOSITORY = Path(__file__).parents[2]
PIPELINES = sorted((REPOSITORY / "pipelines").glob("*.yaml"))


def pipeline(name: str) -> PipelineConfig:
    return load_job(PipelineConfig, flags={}, file=str(REPOSITORY / "pipelines" / f"{name}.yaml"), environment={})


def test_there_are_pipeline_files() -> None:
    assert {path.stem for path in PIPELINES} >= {"quickstart", "smollm2-addition", "gsm8k"}


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_file_holds_valid_settings_and_is_named_after_its_run(path: Path) -> None:
    config = pipeline(path.stem)
    assert config.name == path.stem
    assert config.run_dir == f"runs/{path.stem}"


def test_quickstart_is_the_recipe_that_was_measured() -> None:
    config = pipeline("quickstart")
    assert (config.policy, config.iterations) == ("builtin:tiny", 20)
    assert (config.rollout.prompts_per_iteration, config.rollout.group_size) == (32, 8)
    assert (config.rollout.max_new_tokens, config.rollout.temperature) == (28, 1.0)
    assert (config.update.mini_batch_size, config.update.lr, config.update.warmup_steps) == (64, 1e-4, 8)
    assert (config.update.kl_coef, config.update.weight_decay, config.update.clip_high) == (0.0, 0.0, 0.2)
    assert (config.update.beta1, config.update.beta2, config.update.grad_clip) == (0.9, 0.95, 1.0)


def test_smollm2_steps_on_every_group_with_signal_and_pays_half_for_the_tag() -> None:
    config = pipeline("smollm2-addition")
    assert (config.rollout.prompts_per_iteration, config.rollout.group_size) == (16, 8)
    assert (config.rollout.max_new_tokens, config.rollout.stop) == (10, ("\n",))
    assert config.score.rewards == (RewardConfig(ref="format", weight=0.5), RewardConfig(ref="accuracy", weight=0.5))
    assert (config.update.mini_batch_size, config.update.groups_without_signal) == (16, "drop")
    assert (config.update.lr, config.update.beta1, config.update.beta2) == (3e-5, 0.9, 0.95)


def test_smollm2_prompts_are_the_hundred_sums_of_two_digits(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    write_prompts(path)
    rows = pq.read_table(path).to_pylist()
    assert len({row["prompt_id"] for row in rows}) == len(rows) == 100
    assert rows[47] == {
        "prompt_id": "add-4-7",
        "prompt": "2+1=<answer>3</answer>\n6+7=<answer>13</answer>\n4+7=",
        "answer": "11",
    }


def test_gsm8k_starts_from_the_hub_with_a_small_penalty_against_its_first_policy() -> None:
    config = pipeline("gsm8k")
    assert (config.policy, config.reference) == ("Qwen/Qwen2.5-1.5B-Instruct", "initial")
    assert (config.update.kl_coef, config.update.kl_estimator, config.update.lr) == (0.001, "k3", 1e-6)
    assert (config.rollout.group_size, config.rollout.max_new_tokens) == (8, 1024)
    assert {config.rollout.dtype, config.logprob.dtype, config.update.dtype} == {"bfloat16"}


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_smollm2_learns_within_three_iterations(tmp_path: Path) -> None:
    policy, run_dir = tmp_path / "models" / "smollm2", tmp_path / "run"
    command = [sys.executable, "-m"]
    subprocess.run([*command, "grpoctl.builtin.fetch_smollm2", "--out", str(policy)], check=True, cwd=REPOSITORY)
    places = ["--policy", str(policy), "--prompts", str(tmp_path / "models" / "smollm2-addition.parquet")]
    run = ["grpoctl", "run", "pipelines/smollm2-addition.yaml", "--run-dir", str(run_dir), "--iterations", "3"]
    subprocess.run([*command, *run, *places], check=True, cwd=REPOSITORY)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in metrics] == [0, 1, 2]
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"]
    assert max(row["rollout_gap_max"] for row in metrics) <= 1e-3
