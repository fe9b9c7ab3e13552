"""Two steps, saved, and two more, on every engine of one number of processes, from states of its own and of others.

And four steps with two in between that are dropped: one by the stage, one because its gradient isn't finite.
"""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.parity import PARTITION_ALL, training_rows
from grpoctl.engines.registry import training_engine
from grpoctl.engines.torch.model import load_policy
from grpoctl.inputs.policies import BUILTIN
from grpoctl.processes.ranks import Ranks, join
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import DeepSpeedConfig, RuntimeConfig
from grpoctl.stages.update.batches import TrainingRows
from grpoctl.stages.update.step import Step, StepSettings

ENGINES: dict[str, dict[str, Any]] = {
    "torch": {},
    **{f"zero{stage}": {"zero_stage": stage} for stage in range(4)},
    "zero2adam": {"zero_stage": 2, "offload": "optimizer", "optimizer": "deepspeed"},
}


def trainer(engine: str, ranks: Ranks, scratch: Path, start: Path | None) -> Any:
    (scratch / "ds.json").write_text(json.dumps(PARTITION_ALL))
    layout = ENGINES[engine]
    config = UpdateConfig(engine="deepspeed" if layout else "torch", weight_decay=0.01, adam_eps=1e-6)
    deepspeed = DeepSpeedConfig.model_validate({**layout, "config_file": str(scratch / "ds.json")})
    folder = BUILTIN / "tiny" if start is None else start / "policy"
    policy = load_policy(folder, ref="tiny", vocab_size=320, device="cpu", dtype="float32")
    runtime = RuntimeConfig(device="cpu", deepspeed=deepspeed)
    result = training_engine(config.engine).trainer(policy, config, runtime, ranks)
    if start is not None:
        result.load_state(start / "state")
    return result


def collect(which: Any, data: TrainingRows, ranks: Ranks, number: int) -> None:
    settings = StepSettings(config=UpdateConfig(kl_coef=0.05), temperature=1.0, norm_tokens=256, micro_batch_tokens=512)
    rows = list(range(8 * number, 8 * number + 8))
    Step(trainer=which, data=data, rows=rows, settings=settings, ranks=ranks).run()


def take(which: Any, data: TrainingRows, ranks: Ranks, numbers: range) -> None:
    for number in numbers:
        collect(which, data, ranks, number)
        assert which.step(1e-3) is not None


def drop_two(which: Any, data: TrainingRows, ranks: Ranks) -> None:
    collect(which, data, ranks, 3)
    which.discard()
    poisoned = [None if row is None else np.full_like(row, np.nan) for row in data.advantages]
    collect(which, dataclasses.replace(data, advantages=poisoned), ranks, 2)
    assert which.step(1e-3) is None


def weights(which: Any, ranks: Ranks, scratch: Path) -> dict[str, torch.Tensor]:
    which.export(scratch / "weights")
    return load_file(str(scratch / "weights/model.safetensors")) if ranks.is_first else {}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    moved = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (moved / max(1e-300, sum(float(one[name].double().square().sum()) for name in one))) ** 0.5


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ranks = join("cpu")
    data = training_rows()
    starts = ranks.broadcast(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    found: dict[str, float] = {}
    for engine in ENGINES:
        with tempfile.TemporaryDirectory() as scratch:
            straight_run = trainer(engine, ranks, Path(scratch), None)
            take(straight_run, data, ranks, range(4))
            straight = weights(straight_run, ranks, Path(scratch))
        mine = folder / f"{engine}-{ranks.world_size}"
        with tempfile.TemporaryDirectory() as scratch:
            dropping = trainer(engine, ranks, Path(scratch), None)
            take(dropping, data, ranks, range(1))
            drop_two(dropping, data, ranks)
            take(dropping, data, ranks, range(1, 4))
            ended = weights(dropping, ranks, Path(scratch))
        if ranks.is_first:
            found[f"{mine.name} dropping → {mine.name} dropping"] = difference(straight, ended)
        if mine.name not in starts:
            with tempfile.TemporaryDirectory() as scratch:
                first = trainer(engine, ranks, Path(scratch), None)
                take(first, data, ranks, range(2))
                first.export(mine / "policy")
                first.save_state(mine / "state")
                if ranks.is_first:
                    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                        shutil.copy(BUILTIN / "tiny" / name, mine / "policy")
                ranks.broadcast(None)
        for start in sorted({*starts, mine.name}):
            with tempfile.TemporaryDirectory() as scratch:
                second = trainer(engine, ranks, Path(scratch), folder / start)
                take(second, data, ranks, range(2, 4))
                ended = weights(second, ranks, Path(scratch))
            if ranks.is_first:
                found[f"{start} → {engine}-{ranks.world_size}"] = difference(straight, ended)
    if ranks.is_first:
        (folder / f"found-{ranks.world_size}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
