"""What an update does to a policy doesn't depend on how the work is cut, and its state continues exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from grpoctl.artifacts.artifact import Artifact, read_manifest
from grpoctl.engines.base import OptimizerSettings
from grpoctl.errors import Conflict, GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import BUILTIN
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.jobs import UpdateJob
from grpoctl.settings.load import load_job
from grpoctl.stages.context import Context
from grpoctl.stages.stage import run
from grpoctl.stages.update import stage as update
from grpoctl.stages.update.step import learning_rate

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.fixture
def inputs(small_run: Path) -> dict[str, str]:
    folder = small_run / "iter-000000"
    return {f"--{name}": str(folder / name) for name in ("rollouts", "scores", "logprobs")}


def run_update(inputs: dict[str, str], out: Path, *sets: str) -> Artifact:
    base = ["update.lr=1e-3", "update.mini_batch_size=16", "runtime.num_threads=1"]
    job = load_job(UpdateJob, flags={**inputs, "--out": str(out)}, sets=[*base, *sets], environment={})
    artifact = run(update.STAGE, job, Context(quiet=True)).artifact
    assert artifact is not None
    return artifact


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    return load_file(f"{artifact.url}/policy/model.safetensors")


def steps(artifact: Artifact) -> list[dict[str, Any]]:
    return artifact.read().to_pylist()


def relative(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """Return the difference of two updates relative to the update's size."""
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    size = sum(float((one[name] - start[name]).double().square().sum()) for name in one)
    return (difference / size) ** 0.5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_micro_batches_change_neither_loss_nor_gradient_nor_metrics(
    inputs: dict[str, str], tmp_path: Path, aggregation: str, loss: str
) -> None:
    sets = [f"update.aggregation={aggregation}", f"update.loss={loss}", "update.kl_coef=0.05", "update.lr=0"]
    whole, *others = (
        steps(run_update(inputs, tmp_path / str(budget), *sets, f"runtime.micro_batch_tokens={budget}"))
        for budget in (1 << 20, 512, 64)
    )
    assert others[-1][0]["num_micro_batches"] > others[0][0]["num_micro_batches"] >= whole[0]["num_micro_batches"]
    for other in others:
        for one, two in zip(whole, other, strict=True):
            for name in (
                "loss",
                "policy_loss_numerator",
                "kl_loss_numerator",
                "kl",
                "grad_norm",
                "ratio_mean",
                "entropy",
            ):
                assert two[name] == pytest.approx(one[name], rel=1e-6, abs=1e-6), name
            assert one["loss_denominator"] == two["loss_denominator"]


def test_weights_after_the_update_do_not_depend_on_micro_batches(inputs: dict[str, str], tmp_path: Path) -> None:
    start = load_file(str(BUILTIN / "tiny/model.safetensors"))
    one = run_update(inputs, tmp_path / "a", "runtime.micro_batch_tokens=512", "update.adam_eps=1e-4")
    two = run_update(inputs, tmp_path / "b", "runtime.micro_batch_tokens=16384", "update.adam_eps=1e-4")
    assert relative(weights(one), weights(two), start) < 1e-4


def test_the_first_ratio_is_exactly_one(inputs: dict[str, str], tmp_path: Path) -> None:
    first = steps(run_update(inputs, tmp_path / "a"))[0]
    assert (first["ratio_min"], first["ratio_mean"], first["ratio_max"]) == (1.0, 1.0, 1.0)
    assert first["clip_fraction_low"] == first["clip_fraction_high"] == 0.0


def test_later_ratios_move_and_both_terms_of_the_loss_are_recorded(inputs: dict[str, str], tmp_path: Path) -> None:
    rows = steps(run_update(inputs, tmp_path / "a", "update.kl_coef=0.1", "update.epochs=2"))
    assert len(rows) == 4
    assert [row["epoch"] for row in rows] == [0, 0, 1, 1]
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["ratio_max"] > 1 > rows[1]["ratio_min"]
    for row in rows:
        total = row["policy_loss_numerator"] + 0.1 * row["kl_loss_numerator"]
        assert row["loss"] == pytest.approx(total / row["loss_denominator"], rel=1e-12)
    assert rows[0]["kl"] == 0.0
    assert rows[3]["kl"] > 0.0


def test_a_rerun_is_bit_identical(inputs: dict[str, str], tmp_path: Path) -> None:
    one, two = run_update(inputs, tmp_path / "a"), run_update(inputs, tmp_path / "b")
    assert one.manifest.content_digest == two.manifest.content_digest
    assert one.manifest.policy is not None and two.manifest.policy is not None
    assert one.manifest.policy.weights_digest == two.manifest.policy.weights_digest


def test_optimizer_state_continues_exactly(tmp_path: Path) -> None:
    from grpoctl.engines.torch.model import load_policy
    from grpoctl.engines.torch.trainer import TorchTrainer
    from grpoctl.inputs.policies import BUILTIN

    settings = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip=1.0)

    def trainer(folder: Path) -> TorchTrainer:
        policy = load_policy(folder, ref="tiny", vocab_size=320, device="cpu", dtype="float32")
        return TorchTrainer(policy, settings)

    def step(which: TorchTrainer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in which.policy.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        assert which.step(1e-3) is not None

    straight = trainer(BUILTIN / "tiny")
    for seed in range(4):
        step(straight, seed)
    first = trainer(BUILTIN / "tiny")
    step(first, 0)
    step(first, 1)
    shutil.copytree(BUILTIN / "tiny", tmp_path / "policy")
    first.export(tmp_path / "weights")
    shutil.copy(tmp_path / "weights/model.safetensors", tmp_path / "policy")
    first.save_state(tmp_path / "state")
    second = trainer(tmp_path / "policy")
    second.load_state(tmp_path / "state")
    step(second, 2)
    step(second, 3)
    for one, two in zip(straight.policy.module.parameters(), second.policy.module.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_new_policy_is_a_whole_folder_that_transformers_loads(small_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = small_run / "iter-000000/update/policy"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    record = json.loads((folder / "grpoctl_policy.json").read_text())
    assert record["version"] == 1
    assert len(record["consumed"]) == 1


def test_the_same_batch_is_never_applied_twice(inputs: dict[str, str], small_run: Path, tmp_path: Path) -> None:
    trained = str(small_run / "iter-000000/update/policy")
    with pytest.raises(Conflict, match=r"was trained on .* already"):
        run_update({**inputs, "--policy": trained}, tmp_path / "a", "update.max_staleness=1")


def test_token_stats_hold_a_value_for_every_token(small_run: Path) -> None:
    folder = small_run / "iter-000000"
    table = pq.read_table(folder / "update/token_stats.parquet").to_pylist()
    artifact = read_manifest(str(folder / "rollouts"))
    assert artifact is not None
    lengths = {row["sample_id"]: len(row["completion_ids"]) for row in artifact.read().to_pylist()}
    assert len(table) == 32
    for row in table:
        for name in ("logprobs", "ratio", "clipped", "kl", "token_loss"):
            assert len(row[name]) == lengths[row["sample_id"]], name


def test_dropping_flat_groups_shrinks_the_denominator(inputs: dict[str, str], tmp_path: Path) -> None:
    keep = steps(run_update(inputs, tmp_path / "a", "update.mini_batch_size=null"))[0]
    drop = steps(
        run_update(inputs, tmp_path / "b", "update.mini_batch_size=null", "update.groups_without_signal=drop")
    )[0]
    assert drop["loss_denominator"] < keep["loss_denominator"]
    assert drop["policy_loss_numerator"] == pytest.approx(keep["policy_loss_numerator"], rel=1e-6, abs=1e-6)


def test_mini_batch_size_must_hold_whole_groups(inputs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="6 is not a multiple of the group size 4"):
        run_update(inputs, tmp_path / "a", "update.mini_batch_size=6")
    rows = steps(run_update(inputs, tmp_path / "b", "update.mini_batch_size=6", "update.shuffle=completions"))
    assert len(rows) == 6


@pytest.mark.parametrize("limit", ["max_grad_norm=1e-6", "max_ratio=1.0001"])
def test_a_crossed_limit_commits_nothing(inputs: dict[str, str], tmp_path: Path, limit: str) -> None:
    with pytest.raises(GateFailed, match="nothing committed"):
        run_update(inputs, tmp_path / "a", f"update.{limit}", "update.lr=1e-2")
    assert read_manifest(str(tmp_path / "a")) is None


def test_missing_logprobs_are_refused_by_name(inputs: dict[str, str], tmp_path: Path) -> None:
    without = {flag: url for flag, url in inputs.items() if flag != "--logprobs"}
    with pytest.raises(InputRefused, match=r"update.old: old_logprobs needs log-probabilities"):
        run_update(without, tmp_path / "a")
    assert steps(run_update(without, tmp_path / "b", "update.old=rollout_logprobs"))[0]["status"] == "ok"


def test_off_policy_correction_is_recorded(inputs: dict[str, str], tmp_path: Path) -> None:
    row = steps(run_update(inputs, tmp_path / "a", "update.correction=tis"))[0]
    assert row["correction_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_is_a_function_of_the_global_step(schedule: str, expected: list[float]) -> None:
    config = UpdateConfig(
        lr=1.0, lr_schedule=schedule, warmup_steps=2, total_steps=12, lr_end_fraction=0.1,  # type: ignore[arg-type]
    )  # fmt: skip
    assert [learning_rate(config, step) for step in (0, 1, 2, 7, 40)] == pytest.approx(expected)


def test_unscored_rows_carry_no_gradient(small_run: Path, tmp_path: Path) -> None:
    """A completion with a null advantage must not move the denominator either."""
    from grpoctl.artifacts.artifact import open_artifact
    from grpoctl.stages.update.batches import load_training_rows

    folder = small_run / "iter-000000"
    artifacts = [open_artifact(str(folder / name), table=name) for name in ("rollouts", "scores", "logprobs")]
    data = load_training_rows(UpdateJob(), *artifacts, vocab_size=320)
    assert len(data.trainable) == len(data.rows.sample_ids) == 32
    assert all(np.isfinite(values).all() for values in data.advantages if values is not None)
