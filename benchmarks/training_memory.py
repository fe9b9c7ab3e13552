"""Peak memory of a training process by engine and layout: `python benchmarks/training_memory.py [MODEL_FOLDER]`.

Each layout runs in processes of its own, two of them on this machine, and takes two steps over 8 random completions.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from grpoctl.engines.registry import Loading, training_engine
from grpoctl.engines.torch.lora import Adapters, Base, draw, insert
from grpoctl.inputs.policies import BUILTIN, open_policy
from grpoctl.processes.ranks import join
from grpoctl.settings.fields import LoraConfig, UpdateConfig
from grpoctl.settings.runtime import DeepSpeedConfig, RuntimeConfig
from grpoctl.stages.token_rows import TokenRows
from grpoctl.stages.update.batches import TrainingRows
from grpoctl.stages.update.step import Step, StepSettings

RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Has the C library give the memory of freed tensors back, so that it isn't counted."""
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("torch", 1, {"engine": "torch"}),
    ("FSDP2", 2, {"engine": "torch"}),
    *((f"ZeRO {stage}", 2, {"engine": "deepspeed", "stage": stage}) for stage in range(4)),
    ("ZeRO 2, checkpointing", 2, {"engine": "deepspeed", "stage": 2, "checkpointing": True}),
    ("FSDP2, LoRA rank 16", 2, {"engine": "torch", "lora": 16}),
]


def random_rows(num_rows: int, vocab_size: int) -> TrainingRows:
    """Return completions of 24 tokens after prompts of 16, four a group."""
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, vocab_size, 16).astype(np.int32) for _ in range(num_rows // 4)]
    completions = [generator.integers(0, vocab_size, 24).astype(np.int32) for _ in range(num_rows)]
    values = [np.full(24, -3.0, dtype=np.float32) for _ in range(num_rows)]
    rows = TokenRows(
        sample_ids=[str(row) for row in range(num_rows)],
        group_ids=[str(row // 4) for row in range(num_rows)],
        prompt_ids=[prompts[row // 4] for row in range(num_rows)],
        completion_ids=completions,
        completion_masks=[np.ones(24, dtype=bool)] * num_rows,
        rollout_logprobs=list(values),
    )
    return TrainingRows(
        rows=rows,
        advantages=[np.full(24, (-1.0) ** row, dtype=np.float32) for row in range(num_rows)],
        denominator_logprobs=list(values),
        old_logprobs=list(values),
        ref_logprobs=[None] * num_rows,
        trainable=list(range(num_rows)),
    )


def work(folder: Path, model: Path, number: int) -> None:
    """Take the step and write what every process needed, bytes."""
    torch.set_num_threads(1)
    _, _, kind = LAYOUTS[number]
    ranks = join("cpu")
    update = UpdateConfig(engine=kind["engine"])
    runtime = RuntimeConfig(
        device="cpu",
        activation_checkpointing=kind.get("checkpointing", False),
        deepspeed=DeepSpeedConfig(zero_stage=kind.get("stage", 0)),
    )
    vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    adapters = Adapters(config=LoraConfig(rank=kind.get("lora", 1)), base=Base(ref="", weights_digest=""))
    hooks: dict[str, Any] = {
        "insert": lambda policy: insert(policy, adapters),
        "fill": lambda policy: draw(policy, seed=0),
    }
    engine = training_engine(update.engine)
    loading = Loading(
        policy=open_policy(str(model)),
        dtype="float32",
        runtime=runtime,
        ranks=ranks,
        **(hooks if "lora" in kind else {}),
    )
    trainer = engine.trainer(engine.load(loading), update, runtime, ranks)
    ready = _peak()
    data = random_rows(8, vocab_size)
    settings = StepSettings(config=update, temperature=1.0, norm_tokens=24, micro_batch_tokens=512)
    started = time.monotonic()
    for _ in range(2):
        Step(trainer=trainer, data=data, rows=list(range(8)), settings=settings, ranks=ranks).run()
        trainer.step(1e-6)
    found = {"loading": max(ranks.all_gather(ready)), "training": max(ranks.all_gather(_now()))}
    found |= {"peak": max(ranks.all_gather(_peak())), "seconds": (time.monotonic() - started) / 2}
    if ranks.is_first:
        (folder / f"{number}.json").write_text(json.dumps(found))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _now() -> int:
    """Return the memory held between steps: weights, moments and what the allocator keeps."""
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=BUILTIN / "tiny")
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--layout", type=int, help="number of the only one to run")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.model, arguments.layout)
        return
    print(
        "| layout | processes | after loading, MB | after a step, MB | peak, MB | s a step |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, count, _) in enumerate(LAYOUTS):
            if arguments.layout not in (None, number):
                continue
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={count}",
                __file__,
            ]
            command += [str(arguments.model), "--worker", folder, "--layout", str(number)]
            subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **RETURN_FREED})
            row = json.loads((Path(folder) / f"{number}.json").read_text())
            sizes = " | ".join(f"{row[key] / 1e6:,.0f}" for key in ("loading", "training", "peak"))
            print(f"| {name} | {count} | {sizes} | {row['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
