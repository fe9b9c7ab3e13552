"""A user's ds_config.json is taken where it changes speed, refused by its keys where it would change the result."""

from typing import Any

import pytest

from grpoctl.engines.deepspeed.config import engine_config
from grpoctl.errors import UsageError
from grpoctl.settings.runtime import DeepSpeedConfig


def merged(given: dict[str, Any], **ours: Any) -> dict[str, Any]:
    return engine_config(DeepSpeedConfig(config_file="ds.json", **ours), given, grad_clip=1.0, world_size=2)


def test_settings_that_change_speed_only_are_kept() -> None:
    given = {"zero_optimization": {"reduce_bucket_size": 1000, "stage": "auto"}, "wall_clock_breakdown": True}
    config = merged(given, zero_stage=3, offload="all")
    assert config["zero_optimization"] == {
        "reduce_bucket_size": 1000,
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert config["wall_clock_breakdown"] is True
    assert (config["train_batch_size"], config["gradient_clipping"]) == (2, 1.0)
    assert given["zero_optimization"]["stage"] == "auto"


def test_what_the_file_says_of_offload_is_merged() -> None:
    given = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    assert merged(given, offload="optimizer")["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
    }


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"train_batch_size": 64}, "train_batch_size: is 64 there, 2 by our settings"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps: is 8 there, 1"),
        ({"gradient_clipping": 0.5}, "gradient_clipping: is 0.5 there, 1.0"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer: update.lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: update.lr_schedule"),
        ({"bf16": {"enabled": True}}, "bf16: it would round the master weights"),
        ({"fp16": {"enabled": True}}, "fp16: float16"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: is 3 there, 2"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer: runtime.deepspeed.offload",
        ),
    ],
)
def test_a_contradiction_is_refused_by_its_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=r"ds\.json: ") as caught:
        merged(given)
    assert key in str(caught.value)


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"train_batch_size.*gradient_clipping"):
        merged({"gradient_clipping": 3.0, "train_batch_size": 64})


def test_a_section_that_is_switched_off_contradicts_nothing() -> None:
    assert merged({"fp16": {"enabled": False}, "bf16": {"enabled": False}, "amp": None})["zero_optimization"]


@pytest.mark.parametrize("ours", [{"offload": "all"}, {"offload": "optimizer", "zero_stage": 0}])
def test_offload_without_the_stage_that_splits_it_is_refused(ours: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"runtime\.deepspeed\.offload"):
        merged({}, **ours)
