"""Hold every training engine to the single-process torch engine: `python benchmarks/parity.py` prints the table.

Each layout takes the same steps on the built-in policy, over completions of 1 to 500 tokens: one with each aggregation
and one in which a single row has loss (so that a second process has nothing but padding), all at learning rate 0, and
then three that move the weights. Gradients are recovered from the optimizer's first moments, through the file that every
engine writes. One-process layouts run in one launched process, two-process layouts in two. Megatron's run on a random
policy with 4 heads, which 2 tensor-parallel processes can share, each in processes of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import load_file

from grpoctl.engines.forward import unit_logprobs
from grpoctl.engines.micro_batches import deal_micro_batches
from grpoctl.engines.registry import training_engine
from grpoctl.engines.torch.model import load_policy
from grpoctl.inputs.policies import BUILTIN
from grpoctl.processes.ranks import ALONE, Ranks, join
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import DeepSpeedConfig, RuntimeConfig
from grpoctl.stages.token_rows import TokenRows
from grpoctl.stages.update.batches import TrainingRows
from grpoctl.stages.update.step import Step, StepSettings

AGGREGATIONS = ("seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean", "seq-mean-token-sum")
"""In the order of their gradients' sizes, so that recovering one from the moments doesn't cancel digits; one row's gradient
lies before the last."""
Launch = tuple[int, int | None]
LAUNCHES: Sequence[Launch] = ((1, None), (2, None), (1, 1), (2, 2), (2, 1), (4, 2))
"""Processes, and how many of them share a copy of a Megatron model (None for the other engines)."""
TINY = BUILTIN / "tiny"
FOUR_HEADS = "four-heads"
ROWS = "rows.json"
LINEAR = torch.nn.functional.linear
GROUP_SIZE = 4
NUM_GROUPS = 9
BUDGETS = {1: 1 << 20, 4: 384}
"""Micro-batch tokens that make one micro-batch a width, and at least four."""
PARTITION_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO 3 leaves small tensors whole; the built-in policy has none but small ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One row of the table."""

    engine: str
    num_processes: int
    stage: int | None = None
    offload: str = "none"
    adam: str = "torch"
    micro_batches: int = 1
    dtype: str = "float32"
    checkpointing: bool = False
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        """As the table says it."""
        if self.engine == "torch":
            words = ["torch" if self.num_processes == 1 else "FSDP2"]
        elif self.engine == "megatron":
            words = [f"Megatron TP {self.tensor_parallel} × DP {self.num_processes // self.tensor_parallel}"]
        else:
            words = [f"DeepSpeed ZeRO {self.stage}"]
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += ["DeepSpeed's Adam"] if self.adam == "deepspeed" else []
        words += ["checkpointing"] if self.checkpointing else []
        return " ".join(words)


def layouts(num_processes: int) -> list[Layout]:
    """Return all layouts of one number of processes."""
    kinds: list[dict[str, Any]] = [{"engine": "torch"}]
    kinds += [{"engine": "deepspeed", "stage": stage} for stage in range(4)]
    kinds += [{"engine": "deepspeed", "stage": stage, "offload": "optimizer"} for stage in (1, 2)]
    kinds += [{"engine": "deepspeed", "stage": 3, "offload": "all"}]
    own = {"engine": "deepspeed", "adam": "deepspeed"}
    kinds += [{**own, "stage": stage, "offload": "optimizer"} for stage in (1, 2)] + [
        {**own, "stage": 0},
        {**own, "stage": 3},
    ]
    result = [
        Layout(num_processes=num_processes, micro_batches=count, **kind) for kind in kinds for count in sorted(BUDGETS)
    ]
    result += [
        Layout(num_processes=num_processes, micro_batches=4, checkpointing=True, **kind)
        for kind in (kinds[0], kinds[4])
    ]
    return result + [
        Layout(num_processes=num_processes, micro_batches=4, dtype="bfloat16", **kind)
        for kind in (kinds[0], kinds[3], kinds[4])
    ]


def megatron_layouts(num_processes: int, tensor_parallel: int) -> list[Layout]:
    """Return Megatron's layouts of one division of the processes."""
    return [
        Layout(engine="megatron", num_processes=num_processes, tensor_parallel=tensor_parallel, micro_batches=count)
        for count in sorted(BUDGETS)
    ]


def four_heads(folder: Path) -> Path:
    """Write a random policy of 4 heads and 2 key-value heads; return its folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=320, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(5)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def training_rows(folder: Path = TINY) -> TrainingRows:
    """Return groups of completions of 1 to 500 tokens, their logarithms uniform, some masked, with ratios away from 1."""
    generator = np.random.default_rng(11)
    prompts, completions, masks, groups = [], [], [], []
    for group in range(NUM_GROUPS):
        prompt = generator.integers(0, 320, int(generator.integers(3, 40))).astype(np.int32)
        for member in range(GROUP_SIZE):
            length = 1 if member == 0 else 500 if (group, member) == (2, 1) else int(500 ** generator.random())
            prompts.append(prompt)
            completions.append(generator.integers(0, 320, length).astype(np.int32))
            mask = generator.random(length) < 0.9
            mask[0] = True
            masks.append(mask)
            groups.append(f"g{group}")
    policy = load_policy(folder, ref="tiny", vocab_size=320, device="cpu", dtype="float32")
    own: dict[int, np.ndarray] = {}
    for micro_batch in deal_micro_batches(prompts, completions, policy=policy, budget=4096, ranks=ALONE):
        with torch.no_grad():
            values = unit_logprobs(policy, micro_batch.units, temperature=1.0)[0].numpy()
        place = 0
        for unit in micro_batch.units:
            for row, ids in zip(unit.rows, unit.completions, strict=True):
                own[row] = values[place : place + len(ids)]
                place += len(ids)
    ordered = [own[row] for row in range(len(completions))]
    old = [row + generator.normal(0, 0.2, len(row)).astype(np.float32) for row in ordered]
    reference = [row + generator.normal(0, 0.2, len(row)).astype(np.float32) for row in ordered]
    scores = generator.normal(0, 1, len(ordered)).astype(np.float32)
    rows = TokenRows(
        sample_ids=[f"{group}#{i}" for i, group in enumerate(groups)],
        group_ids=groups,
        prompt_ids=prompts,
        completion_ids=completions,
        completion_masks=masks,
        rollout_logprobs=list(old),
    )
    return TrainingRows(
        rows=rows,
        advantages=[np.full(len(row), score, dtype=np.float32) for row, score in zip(ordered, scores, strict=True)],
        denominator_logprobs=list(old),
        old_logprobs=list(old),
        ref_logprobs=list(reference),
        trainable=list(range(len(ordered))),
    )


def _policy(layout: Layout, folder: Path, ranks: Ranks) -> Any:
    if layout.engine != "megatron":
        return load_policy(folder, ref="tiny", vocab_size=320, device="cpu", dtype=layout.dtype)
    from grpoctl.engines.megatron.model import load_megatron

    size = layout.tensor_parallel
    return load_megatron(
        folder, ref="tiny", vocab_size=320, device="cpu", dtype=layout.dtype, tensor_parallel_size=size, ranks=ranks
    )


def take_steps(layout: Layout, data: TrainingRows, ranks: Ranks, scratch: Path, folder: Path = TINY) -> dict[str, Any]:
    """Return losses and norms by step, gradients of the steps that don't move, and the final weights (first rank)."""
    config = UpdateConfig(engine=layout.engine, dtype=layout.dtype, kl_coef=0.05, grad_clip=None, weight_decay=0.01)  # type: ignore[arg-type]
    ds_config = scratch / "ds.json"
    ds_config.write_text(json.dumps(PARTITION_ALL))
    runtime = RuntimeConfig(
        device="cpu",
        activation_checkpointing=layout.checkpointing,
        deepspeed=DeepSpeedConfig.model_validate(
            {
                "zero_stage": layout.stage or 0,
                "offload": layout.offload,
                "optimizer": layout.adam,
                "config_file": str(ds_config),
            }
        ),
    )
    trainer = training_engine(config.engine).trainer(_policy(layout, folder, ranks), config, runtime, ranks)
    sharers = ranks.in_blocks(layout.tensor_parallel)
    everything = list(range(len(data.rows.sample_ids)))
    shortest = [min(everything, key=lambda row: len(data.rows.completion_ids[row]))]
    third = len(everything) // 3
    plan = [(aggregation, everything, 0.0) for aggregation in AGGREGATIONS]
    plan.insert(-1, ("token-mean", shortest, 0.0))
    plan += [("token-mean", everything[third * part : third * (part + 1)], 1e-4) for part in range(3)]
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "micro_batches": []}
    before: dict[str, torch.Tensor] = {}
    for number, (aggregation, rows, lr) in enumerate(plan):
        settings = StepSettings(
            config=config.model_copy(update={"aggregation": aggregation}),
            temperature=1.0,
            norm_tokens=256,
            micro_batch_tokens=BUDGETS[layout.micro_batches],
        )
        sums, denominator = Step(trainer=trainer, data=data, rows=rows, settings=settings, ranks=sharers).run()
        found["losses"].append((sums.policy_numerator + 0.05 * sums.kl_numerator) / denominator)
        found["micro_batches"].append(sums.num_micro_batches)
        found["norms"].append(trainer.step(lr))
        if lr == 0.0:
            folder = scratch / f"state-{number}"
            trainer.save_state(folder)
            if ranks.is_first:
                after = load_file(str(folder / "optimizer.safetensors"))
                moments = {k.partition(".")[2]: v.double() for k, v in after.items() if k.startswith("exp_avg.")}
                zero = torch.zeros(())
                found["gradients"].append(
                    {k: (v - config.beta1 * before.get(k, zero)) / (1 - config.beta1) for k, v in moments.items()}
                )
                before = moments
    trainer.export(scratch / "weights")
    if ranks.is_first:
        found["weights"] = {k: v.double() for k, v in load_file(str(scratch / "weights/model.safetensors")).items()}
    return found


def compare(found: dict[str, Any], reference: dict[str, Any], *, moving: bool = True) -> dict[str, Any]:
    """Return the largest relative differences from the reference, losses and norms also of the steps that move or not.

    Each parameter's gradient is held against its own norm, or a hundredth of the whole gradient's where that is more;
    `strict` is the largest against its own norm alone, `strict_at` names the parameter and `strict_size` tells its
    gradient's norm as a part of the whole gradient's.
    Weights are held against all weights: AdamW makes steps of the learning rate's size out of a key bias's gradient,
    which is next to nothing, so that one parameter may differ by 1e-4 of itself.
    """
    last = None if moving else len(reference["gradients"])
    gradient = 0.0
    strict = (0.0, "", 0.0)
    for ours, theirs in zip(found["gradients"], reference["gradients"], strict=True):
        whole = sum(float(value.square().sum()) for value in theirs.values()) ** 0.5
        for name, value in theirs.items():
            own = float(value.norm())
            gap = float((ours[name] - value).norm())
            gradient = max(gradient, gap / max(own, 1e-2 * whole))
            strict = max(strict, (gap / own, name, own / whole))
    squares = [
        (float((found["weights"][name] - value).square().sum()), float(value.square().sum()))
        for name, value in reference["weights"].items()
    ]
    weights = (sum(moved for moved, _ in squares) / sum(size for _, size in squares)) ** 0.5
    return {
        "loss": max(
            abs(a - b) / abs(b) for a, b in list(zip(found["losses"], reference["losses"], strict=True))[:last]
        ),
        "gradient": gradient,
        "norm": max(abs(a - b) / b for a, b in list(zip(found["norms"], reference["norms"], strict=True))[:last]),
        "weights": weights,
        "strict": strict[0],
        "strict_at": strict[1],
        "strict_size": strict[2],
    }


def work(folder: Path, wanted: Sequence[int] | None, tensor_parallel: int | None) -> None:
    """Run this process's part of every layout; the first rank writes the rows of the table."""
    torch.set_num_threads(1)
    ranks = join("cpu")
    place = TINY if tensor_parallel is None else folder / FOUR_HEADS
    data = training_rows(place)
    chosen = layouts(ranks.world_size)
    if tensor_parallel is not None:
        chosen = megatron_layouts(ranks.world_size, tensor_parallel)
    references: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for number, layout in enumerate(chosen):
        if wanted is not None and number not in wanted:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            if ranks.is_first and layout.dtype not in references:
                plain = Layout(engine="torch", num_processes=1, dtype=layout.dtype)
                references[layout.dtype] = take_steps(plain, data, ALONE, Path(scratch), place)
            found = take_steps(layout, data, ranks, Path(scratch), place)
            torch.nn.functional.linear = LINEAR  # ZeRO 3 leaves its own in the process
        if ranks.is_first:
            row = {**dataclasses.asdict(layout), "name": layout.name, **compare(found, references[layout.dtype])}
            if layout.dtype != "float32":
                row["against_float32"] = compare(found, references["float32"], moving=False)
            rows.append(row | {"forwards": found["micro_batches"][0], "seconds": time.monotonic() - started})
            print(line(rows[-1]), flush=True)
            (folder / ROWS).write_text(json.dumps(rows))


def table(launches: Sequence[Launch] = LAUNCHES, wanted: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Run the layouts in launched processes and return their rows."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        four_heads(Path(folder) / FOUR_HEADS)
        for count, tensor_parallel in launches:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            command += [__file__, "--worker", folder]
            command += [] if tensor_parallel is None else ["--megatron", str(tensor_parallel)]
            command += [] if wanted is None else ["--only", ",".join(map(str, wanted))]
            subprocess.run(command, check=True, stdout=sys.stderr)
            rows += json.loads((Path(folder) / ROWS).read_text())
    return rows


def line(row: dict[str, Any]) -> str:
    """Return one row of the table as text."""
    numbers = "  ".join(f"{row[name]:8.1e}" for name in ("loss", "gradient", "norm", "weights"))
    return (
        f"{row['name']:36s} {row['num_processes']}p  {row['forwards']:3d} forwards  {row['dtype']:8s}  {numbers}  "
        f"{row['seconds']:5.1f} s  {row['strict']:8.1e} at {row['strict_at']} ({row['strict_size']:.0e} of the whole)"
    )


def main() -> None:
    """Print the table, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path)
    parser.add_argument(
        "--megatron", type=int, help="of a worker: run Megatron's layouts with this many tensor-parallel processes"
    )
    parser.add_argument("--only")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    wanted = None if arguments.only is None else [int(word) for word in arguments.only.split(",")]
    if arguments.worker is not None:
        work(arguments.worker, wanted, arguments.megatron)
        return
    rows = table(wanted=wanted)
    print(
        "last: a gradient against its own norm alone, where that is largest, and its norm as a part of the whole gradient's"
    )
    print(f"{'largest relative difference from torch on one process':75s} loss      gradient  norm      weights")
    for row in rows:
        print(line(row))
    for row in rows:
        if "against_float32" in row:
            print(f"bfloat16 against float32: {line({**row, **row['against_float32']})}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
