"""Megatron-LM's layers as a training engine: the torch engine's numbers, policies that come back bit for bit.

Needs megatron-core and mbridge in this environment; processes talk over gloo, so a CPU is enough.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from grpoctl.inputs.policies import BUILTIN

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}


def grpoctl(*words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    result = subprocess.run(
        [sys.executable, "-m", "grpoctl", *words, "--json"],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr[-3000:]
    return json.loads(result.stdout), result.stderr


def megatron(tensor_parallel: int, processes: int) -> list[str]:
    return [
        "--engine", "megatron", "--set", f"runtime.megatron.tensor_parallel_size={tensor_parallel}",
        "--set", f"runtime.num_processes={processes}",
    ]  # fmt: skip


def random_policy(folder: Path, model_type: str, *, tied: bool) -> Path:
    """Write a tiny policy of an architecture: 4 heads, 2 key-value heads, random weights, the built-in tokenizer."""
    own = json.loads((BUILTIN / "tiny/config.json").read_bytes())
    config = AutoConfig.for_model(
        model_type, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=320, max_position_embeddings=1024, tie_word_embeddings=tied,
        eos_token_id=own["eos_token_id"], pad_token_id=own["pad_token_id"],
    )  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for path in (BUILTIN / "tiny").iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation_config")):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("model_type, tied", [("qwen2", True), ("llama", False), ("llama", True), ("qwen3", False)])
def test_a_policy_goes_through_megatron_bit_for_bit(tmp_path: Path, model_type: str, tied: bool) -> None:
    folder = random_policy(tmp_path / "policy", model_type, tied=tied)
    before = load_file(str(folder / "model.safetensors"))
    for size in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        worker = str(Path(__file__).parent / "megatron_worker.py")
        out = tmp_path / f"out-{size}"
        subprocess.run([*launcher, worker, str(folder), str(size), str(out)], check=True, env=ENVIRONMENT, cwd=ROOT)
        after = load_file(str(out / "model.safetensors"))
        assert set(after) == set(before)
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture(scope="module")
def inputs(small_run: Path) -> list[str]:
    folder = small_run / "iter-000000"
    return [word for name in ("rollouts", "scores", "logprobs") for word in (f"--{name}", str(folder / name))]


@pytest.mark.parametrize("layout", [(1, 1), (3, 3), (1, 2)], ids=["one process", "TP 3", "DP 2"])
def test_logprobs_and_entropies_are_the_torch_engines(small_run: Path, tmp_path: Path, layout: tuple[int, int]) -> None:
    folder = small_run / "iter-000000"
    words = ["--rollouts", str(folder / "rollouts"), "--policy", "builtin:tiny", "--reference", "builtin:tiny"]
    grpoctl("logprob", *words, "--set", "logprob.entropy=true", "--out", str(tmp_path / "l"), *megatron(*layout))
    ours, theirs = (
        pq.read_table(next(place.glob("data/part-00000-*.parquet"))) for place in (tmp_path / "l", folder / "logprobs")
    )
    assert ours["sample_id"].equals(theirs["sample_id"])
    for column in ("old_logprobs", "ref_logprobs", "entropy"):
        for row, other in zip(ours[column].to_pylist(), theirs[column].to_pylist(), strict=True):
            assert row == pytest.approx(other, abs=2e-5)


def difference(one: Path, other: Path) -> float:
    """Return the norm of the difference of two files of tensors over the norm of the second."""
    ours, theirs = load_file(str(one)), load_file(str(other))
    assert set(ours) == set(theirs)
    moved = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    return (moved / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5


def steps(update: Path) -> list[float]:
    """Return the gradient norm of each step.

    The first is of one gradient at equal weights: only sums in another order differ (2e-7 measured, AVX-512). Later ones are
    at weights that have moved apart: AdamW's first update is g / (|g| + ε), so where a gradient is all rounding the weight
    moves by up to lr either way. At lr 1e-3 weights differ by 8e-7 of their norm and the second gradient's norm by 8e-6
    (1.5e-5 on AVX2); at lr 1e-5 by 1e-8 and 3e-7.
    """
    return [row["grad_norm"] for row in pq.read_table(update / "data").to_pylist()]


@pytest.mark.parametrize("layout", [(3, 3), (1, 2)], ids=["TP 3", "DP 2"])
def test_an_update_and_the_next_on_either_engine_are_the_torch_engines(
    inputs: list[str], tmp_path: Path, layout: tuple[int, int]
) -> None:
    options = ["--lr", "1e-3", "--set", "update.mini_batch_size=16", "--set", "update.adam_eps=1e-6"]
    one, _ = grpoctl("update", *inputs, *options, "--out", str(tmp_path / "torch"))
    other, _ = grpoctl("update", *inputs, *options, "--out", str(tmp_path / "megatron"), *megatron(*layout))
    assert other["facts"]["loss"] == pytest.approx(one["facts"]["loss"], rel=1e-5)
    first, second = zip(*(steps(tmp_path / name) for name in ("torch", "megatron")), strict=True)
    assert first[1] == pytest.approx(first[0], rel=5e-6)
    assert second[1] == pytest.approx(second[0], rel=1e-4)
    assert other["facts"]["first_ratio_max_gap"] < 2e-5  # the logprobs are the torch engine's here
    folder = tmp_path / "megatron"
    assert difference(folder / "policy/model.safetensors", tmp_path / "torch/policy/model.safetensors") < 1e-5
    state = "trainer_state/optimizer.safetensors"
    assert difference(folder / state, tmp_path / "torch" / state) < 1e-4  # rewards of a group nearly cancel
    policy = str(folder / "policy")
    new = {name: str(tmp_path / name) for name in ("rollouts", "scores", "logprobs")}
    sampling = ["--limit", "8", "--group-size", "4", "--max-new-tokens", "28", "--policy", policy]
    grpoctl("rollout", *sampling, "--out", new["rollouts"])
    reward = 'score.rewards=[{"ref": "accuracy", "kwargs": {"strict": true}}]'
    grpoctl("score", "--rollouts", new["rollouts"], "--set", reward, "--out", new["scores"])
    grpoctl("logprob", "--rollouts", new["rollouts"], "--policy", policy, "--out", new["logprobs"], *megatron(*layout))
    again = [word for name, place in new.items() for word in (f"--{name}", place)]
    again += ["--policy", policy, "--resume-from", str(folder), *options]
    grpoctl("update", *again, "--out", str(tmp_path / "then-torch"))
    record, _ = grpoctl("update", *again, "--out", str(tmp_path / "then-megatron"), *megatron(*layout))
    assert record["facts"]["global_step"] == 4
    exact = layout[0] == 1  # gloo's sum over tensor-parallel ranks depends on a number's place in the tensor
    assert record["facts"]["first_ratio_max_gap"] <= (0.0 if exact else 1e-5)
    ended = [tmp_path / f"then-{name}/policy/model.safetensors" for name in ("megatron", "torch")]
    assert difference(*ended) < 1e-5


def test_norms_of_single_heads_get_the_gradient_of_all_heads(tmp_path: Path) -> None:
    """Qwen3's q and k norms are whole on both tensor-parallel ranks, each of which sees half of the heads."""
    policy = str(random_policy(tmp_path / "policy", "qwen3", tied=False))
    (tmp_path / "reward.py").write_text("def by_length(completion):\n    return float(len(completion) % 5)\n")
    place = {name: str(tmp_path / name) for name in ("rollouts", "scores", "torch", "megatron")}
    sampling = ["--limit", "4", "--group-size", "4", "--max-new-tokens", "16", "--policy", policy]
    grpoctl("rollout", *sampling, "--out", place["rollouts"], "--set", "rollout.max_truncated_ratio=1")
    reward = f"{tmp_path / 'reward.py'}:by_length"
    grpoctl("score", "--rollouts", place["rollouts"], "--reward", reward, "--out", place["scores"])
    given = ["--rollouts", place["rollouts"], "--scores", place["scores"], "--policy", policy, "--lr", "1e-3"]
    given += ["--set", "update.old=rollout_logprobs"]
    grpoctl("update", *given, "--out", place["torch"])
    grpoctl("update", *given, "--out", place["megatron"], *megatron(2, 2))
    ours, theirs = (load_file(f"{place[name]}/trainer_state/optimizer.safetensors") for name in ("megatron", "torch"))
    names = [
        name for name in theirs if name.startswith("exp_avg.") and name.endswith(("q_norm.weight", "k_norm.weight"))
    ]
    assert len(names) == 4
    for name in names:
        assert float((ours[name] - theirs[name]).norm() / theirs[name].norm()) < 1e-4, name


@pytest.mark.parametrize(
    "settings, code, message",
    [
        (megatron(2, 1), 2, "tensor_parallel_size: 2 doesn't divide the 1 processes"),
        (megatron(2, 2), 2, "3 attention heads, 3 key-value heads, which 2 doesn't divide"),
        ([*megatron(1, 1), "--set", "update.lora.rank=4"], 2, "engine megatron trains whole weights"),
        (
            [*megatron(1, 1), "--set", "update.dtype=bfloat16", "--set", "runtime.device=cpu"],
            2,
            "bfloat16 on a GPU only",
        ),
        ([*megatron(1, 1), "--set", "runtime.activation_checkpointing=true"], 2, "engine megatron doesn't have it"),
    ],
)
def test_what_megatron_cannot_do_here_is_refused(
    inputs: list[str], tmp_path: Path, settings: list[str], code: int, message: str
) -> None:
    record, _ = grpoctl("update", *inputs, *settings, "--out", str(tmp_path / "u"), code=code)
    assert message in record["error"]


def test_a_variant_that_megatron_computes_otherwise_is_refused(small_run: Path, tmp_path: Path) -> None:
    folder = random_policy(tmp_path / "policy", "llama", tied=True)
    config = json.loads((folder / "config.json").read_bytes())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    rollouts = tmp_path / "rollouts"
    prompts = ["--prompts", "builtin:addition", "--limit", "2", "--group-size", "2", "--max-new-tokens", "4"]
    grpoctl(
        "rollout", *prompts, "--policy", str(folder), "--out", str(rollouts), "--set", "rollout.max_truncated_ratio=1"
    )
    words = ["--rollouts", str(rollouts), "--policy", str(folder), "--out", str(tmp_path / "l")]
    record, _ = grpoctl("logprob", *words, *megatron(1, 1), code=3)
    assert "rope_type 'linear', only default is computed" in record["error"]
