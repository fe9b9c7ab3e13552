"""Adapters: what is published is the merged policy, what is continued are the adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpoctl.artifacts.artifact import Artifact
from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.torch.lora import Adapters, Base, draw, insert, load_adapters, merged
from grpoctl.engines.torch.model import load_policy
from grpoctl.engines.torch.trainer import TorchTrainer
from grpoctl.errors import InputRefused, UsageError
from grpoctl.inputs.policies import BUILTIN
from grpoctl.pipeline.run import Pipeline
from grpoctl.settings.fields import LoraConfig
from grpoctl.settings.jobs import PipelineConfig, UpdateJob
from grpoctl.settings.load import load_job
from grpoctl.stages.context import Context
from grpoctl.stages.stage import run
from grpoctl.stages.update import stage as update

ADAPTERS = Adapters(
    config=LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj")), base=Base(ref="x", weights_digest="")
)
QUICKSTART = str(Path(__file__).parents[2] / "pipelines/quickstart.yaml")


def tiny() -> Any:
    return load_policy(BUILTIN / "tiny", ref="tiny", vocab_size=320, device="cpu", dtype="float32")


def fresh(seed: int = 5) -> TorchTrainer:
    policy = tiny()
    insert(policy, ADAPTERS)
    draw(policy, seed=seed)
    settings = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip=1.0)
    return TorchTrainer(policy, settings)


def step(which: TorchTrainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(which.policy.module.named_parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    assert which.step(1e-2) is not None


def test_only_adapters_train_and_fresh_ones_change_nothing() -> None:
    policy = fresh().policy
    names = {name for name, parameter in policy.module.named_parameters() if parameter.requires_grad}
    assert len(names) == 2 * 2 * 2 and all(".lora_" in name for name in names)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(
            policy.hidden(ids, torch.arange(12)[None], None), tiny().hidden(ids, torch.arange(12)[None], None)
        )


def test_merging_is_w_plus_scale_b_a() -> None:
    parts = {
        "q.base_layer.weight": torch.ones(2, 3),
        "q.base_layer.bias": torch.zeros(2),
        "q.lora_A.default.weight": torch.tensor([[1.0, 0.0, 2.0]]),
        "q.lora_B.default.weight": torch.tensor([[1.0], [3.0]]),
    }
    result = merged(parts, scale=0.5)
    assert set(result) == {"q.weight", "q.bias"}
    assert result["q.weight"].tolist() == [[1.5, 1.0, 2.0], [2.5, 1.0, 4.0]]


def test_the_merged_policy_answers_like_the_adapters_and_peft_reads_them(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = fresh()
    for seed in range(3):
        step(trainer, seed)
    trainer.export(tmp_path / "policy", adapter=tmp_path / "adapter")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "policy" / name).write_bytes((BUILTIN / "tiny" / name).read_bytes())
    plain = load_policy(tmp_path / "policy", ref="merged", vocab_size=320, device="cpu", dtype="float32")
    ids, places = torch.arange(40)[None], torch.arange(40)[None]
    with torch.no_grad():
        ours = trainer.policy.module(input_ids=ids, position_ids=places).logits
        assert float((plain.module(input_ids=ids, position_ids=places).logits - ours).abs().max()) < 1e-4
        theirs = PeftModel.from_pretrained(tiny().module, str(tmp_path / "adapter"))
        assert torch.equal(theirs(input_ids=ids, position_ids=places).logits, ours)


def test_adapters_and_their_state_continue_exactly(tmp_path: Path) -> None:
    straight = fresh()
    for seed in range(4):
        step(straight, seed)
    first = fresh()
    step(first, 0)
    step(first, 1)
    first.export(tmp_path / "policy", adapter=tmp_path / "adapter")
    first.save_state(tmp_path / "state")
    second = fresh(seed=99)
    load_adapters(second.policy, tmp_path / "adapter")
    second.load_state(tmp_path / "state")
    step(second, 2)
    step(second, 3)
    for one, two in zip(straight.policy.module.parameters(), second.policy.module.parameters(), strict=True):
        assert torch.equal(one, two)


def test_unknown_targets_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"update\.lora\.targets \['nothing'\]"):
        insert(tiny(), Adapters(config=LoraConfig(rank=2, targets=("nothing",)), base=ADAPTERS.base))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    sets = [
        f"run_dir={run_dir}", "iterations=2", "rollout.prompts_per_iteration=8", "rollout.group_size=4",
        "update.mini_batch_size=16", "update.kl_coef=0.01", "reference=initial", "update.lora.rank=4", "update.lr=1e-3",
    ]  # fmt: skip
    config = load_job(PipelineConfig, flags={}, sets=sets, file=QUICKSTART, environment={})
    Pipeline(config=config, context=Context(quiet=True)).run()
    return run_dir


def rerun(lora_run: Path, out: Path, *sets: str) -> Artifact:
    folder, before = lora_run / "iter-000001", lora_run / "iter-000000"
    flags = {f"--{name}": str(folder / name) for name in ("rollouts", "scores")}
    logprobs = next(str(path) for path in (folder / "logprobs",) if path.is_dir())
    flags |= {
        "--logprobs": logprobs,
        "--policy": str(lora_run / "policies/v000001"),
        "--resume-from": str(before / "update"),
        "--out": str(out),
        "--kl-coef": "0.01",
        "--lr": "1e-3",
    }
    base = ["update.mini_batch_size=16", "update.lora.rank=4"]
    job = load_job(UpdateJob, flags=flags, sets=[*base, *sets], environment={}, file=QUICKSTART)
    artifact = run(update.STAGE, job, Context(quiet=True)).artifact
    assert artifact is not None
    return artifact


def test_a_run_continues_its_adapters_beside_the_first_policy(lora_run: Path) -> None:
    first, second = (lora_run / f"iter-00000{i}/update" for i in (0, 1))
    record = json.loads((second / "adapter/grpoctl_adapter.json").read_text())
    assert record["base"]["ref"] == "builtin:tiny"
    weights = load_file(str(second / "policy/model.safetensors"))
    start = load_file(str(BUILTIN / "tiny/model.safetensors"))
    adapters = load_file(str(second / "adapter/adapter_model.safetensors"))
    layer = "model.layers.0.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(weights[f"{layer}.weight"], start[f"{layer}.weight"].float() + (b @ a) * 4.0)
    state = load_file(str(second / "trainer_state/optimizer.safetensors"))
    assert all(".lora_" in name for name in state)
    assert set(weights) == set(load_file(str(first / "policy/model.safetensors")))


def test_a_stage_by_itself_continues_as_the_run_did(lora_run: Path, tmp_path: Path) -> None:
    again = rerun(lora_run, tmp_path / "again")
    weights = load_file(str(lora_run / "iter-000001/update/policy/model.safetensors"))
    assert all(
        torch.equal(value, weights[name]) for name, value in load_file(f"{again.url}/policy/model.safetensors").items()
    )


def test_other_adapter_settings_are_refused(lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="its adapters have rank 4"):
        rerun(lora_run, tmp_path / "a", "update.lora.rank=8")


def test_whole_weights_do_not_continue_from_adapters(lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"optimizer state for .*lora_A.*which this model lacks"):
        rerun(lora_run, tmp_path / "a", "update.lora.rank=0")
