"""Tokens a second of `grpoctl rollout` against the bare engine it calls, on the same prompts in the same run.

python benchmarks/rollout.py --engine hf|vllm [--policy REF] [--prompts FILE] [--against generate] [--against run-batch]

(vllm: with an interpreter that has it.) The stage and the bare engine draw the same completions with the same engine
object, alternately, after a round that warms both; `--against generate` adds transformers' plain generate to each round.
`--against run-batch` then compares whole commands, cold: `grpoctl rollout` and `vllm run-batch`, each for all completions
and for a single one; the difference is sampling without the start. Each side's best of the rounds counts, so a noisy
neighbour hits all alike. Only ratios mean anything; those of CPU seconds are the steadier ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpoctl.engines.registry import sampling_engine
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.inputs.policies import open_policy
from grpoctl.inputs.prompts import load_prompts
from grpoctl.settings.jobs import RolloutJob
from grpoctl.settings.load import load_job
from grpoctl.stages import rollout
from grpoctl.stages.context import Context
from grpoctl.stages.stage import run

CPU_ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
"""What the stage sets for vLLM in process (grpoctl/engines/vllm/sampler.py), for run-batch too."""


@dataclass(slots=True, kw_only=True)
class Side:
    """One competitor: its tokens in a round, and wall and CPU seconds of every round."""

    name: str
    tokens: int = 0
    wall: list[float]
    cpu: list[float]

    @classmethod
    def named(cls, name: str) -> Side:
        """Return one without rounds."""
        return cls(name=name, wall=[], cpu=[])

    def time(self, work: Callable[[], int]) -> None:
        """Do a round's work, which returns its tokens; children that end within it count."""
        before, started = os.times(), time.perf_counter()
        self.tokens = work()
        self.wall.append(time.perf_counter() - started)
        self.cpu.append(sum(os.times()[:4]) - sum(before[:4]))


class Captured:
    """The engine's sampler, remembering the calls that the stage made and the time spent in vLLM's own generate."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[tuple[Any, Any]] = []
        self.name, self.reproducible = inner.name, inner.reproducible
        self.is_vllm = self.name.startswith("vllm")
        self.generate_seconds = [0.0, 0.0]
        if self.is_vllm:
            self._generate = inner._engine.generate
            inner._engine.generate = self._timed_generate

    def _timed_generate(self, *arguments: Any, **options: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self._generate(*arguments, **options)
        self.generate_seconds[0] += time.perf_counter() - wall
        self.generate_seconds[1] += time.process_time() - cpu
        return outputs

    def sample(self, requests: Any, settings: Any) -> Any:
        self.calls.append((requests, settings))
        return self.inner.sample(requests, settings)

    def again(self) -> int:
        """Make the stage's calls once more, without the stage."""
        drawn = [self.inner.sample(requests, settings) for requests, settings in self.calls]
        return sum(len(sample.completion_ids) for samples in drawn for sample in samples)

    def start_round(self) -> None:
        """Empty vLLM's prefix cache, so that a round doesn't find the prompts of the last one, and its clock."""
        self.generate_seconds = [0.0, 0.0]
        if self.is_vllm:
            self.inner._engine.reset_prefix_cache()


class PlainGenerate:
    """Transformers' generate as its documentation calls it: one padded batch, no log-probabilities kept."""

    def __init__(self, job: RolloutJob) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        policy = open_policy(job.policy)
        self.tokenizer = load_tokenizer(policy.folder, policy.ref)
        dtype = getattr(torch, job.rollout.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=dtype, local_files_only=True)
        self.limit = job.rollout.max_new_tokens

    def generate(self, calls: Sequence[tuple[Any, Any]]) -> int:
        """Draw a completion for each of the stage's requests; return the tokens up to each one's end."""
        import torch

        prompts = [request.prompt_ids for requests, _ in calls for request in requests]
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self.tokenizer.pad_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        with torch.no_grad():
            output: Any = self.model.generate(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=self.limit, eos_token_id=list(self.tokenizer.eos_ids),
                pad_token_id=self.tokenizer.pad_id,
            )  # fmt: skip
        ended = np.isin(output[:, width:].numpy(), self.tokenizer.eos_ids)
        return int(np.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1]).sum())


def alternate(job: RolloutJob, against: Sequence[str], rounds: int) -> tuple[list[Side], list[int]]:
    """Time the warm stage, the bare engine and plain generate in turns; return them and the seeds of the completions."""
    context = Context(quiet=True)
    engine = sampling_engine(job.rollout.engine)
    captured = Captured(engine.sampler(job, open_policy(job.policy), context.warm))
    rollout.sampling_engine = lambda name: replace(engine, sampler=lambda *_: captured)  # type: ignore[attr-defined]
    stage, bare, plain = Side.named("grpoctl rollout"), Side.named(captured.name), Side.named("plain generate")
    inside = Side.named("of which LLM.generate")
    generate = PlainGenerate(job) if "generate" in against else None

    def run_stage(out: Path) -> int:
        result = run(rollout.STAGE, job.model_copy(update={"out": str(out)}), context)
        assert result.artifact is not None
        return result.artifact.manifest.tokens["completion"]

    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            out = Path(folder) / str(number)
            captured.calls.clear()
            captured.start_round()
            stage.time(lambda out=out: run_stage(out))
            captured.start_round()
            bare.time(captured.again)
            inside.tokens = bare.tokens
            inside.wall.append(captured.generate_seconds[0])
            inside.cpu.append(captured.generate_seconds[1])
            if job.rollout.dtype == "float32":  # in bfloat16 the same seed may draw another token
                assert bare.tokens == stage.tokens, f"bare engine {bare.tokens} tokens, stage {stage.tokens}"
            if generate is not None:
                plain.time(lambda: generate.generate(captured.calls))
    sides = [stage, bare, *([inside] if captured.is_vllm else []), *([] if generate is None else [plain])]
    for side in sides:
        del side.wall[0], side.cpu[0]  # the first round warms caches
    return sides, [request.seed for requests, _ in captured.calls for request in requests]


def commands(job: RolloutJob, sets: Sequence[str], seeds: Sequence[int], rounds: int) -> list[Side]:
    """Time whole commands, each started cold: `grpoctl rollout` and `vllm run-batch`, for all completions and for one."""
    sides = {
        (name, part): Side.named(f"{name}, {part}") for name in ("rollout", "run-batch") for part in ("all", "one")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = chat_requests(job, seeds)
        for number in range(rounds):
            for part in ("all", "one"):
                out = folder / f"{part}-{number}"
                one = ["prompts.limit=1", "rollout.group_size=1"] if part == "one" else []
                sides["rollout", part].time(lambda out=out, one=one: rollout_command(job, [*sets, *one], out))
                some = requests if part == "all" else requests[:1]
                sides["run-batch", part].time(lambda out=out, some=some: batch_command(job, some, out))
    return list(sides.values())


def rollout_command(job: RolloutJob, sets: Sequence[str], out: Path) -> int:
    """Run `grpoctl rollout` in a process of its own and return its tokens."""
    options = [word for setting in sets for word in ("--set", setting)]
    command = [sys.executable, "-m", "grpoctl", "rollout", "--policy", job.policy, "--prompts", job.prompts.path]
    started([*command, *options, "--out", str(out)])
    return json.loads((out / "_MANIFEST.json").read_bytes())["tokens"]["completion"]


def batch_command(job: RolloutJob, requests: Sequence[dict[str, Any]], out: Path) -> int:
    """Run `vllm run-batch` in a process of its own, with the engine set as the stage sets it, and return its tokens."""
    asked, answered = out.with_suffix(".in.jsonl"), out.with_suffix(".out.jsonl")
    asked.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(asked), "-o", str(answered),
        "--model", str(open_policy(job.policy).folder), "--served-model-name", "policy", "--dtype", job.rollout.dtype,
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-enable-chunked-prefill",
        *(["--enforce-eager"] if job.runtime.enforce_eager else []),
    ]  # fmt: skip
    started(command)
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    assert len(answers) == len(requests) and not any(answer["error"] for answer in answers), answers[:1]
    return sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)


def chat_requests(job: RolloutJob, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the stage's completions as lines of a batch file: one request a completion, with its seed and logprobs."""
    prompts = load_prompts(job.prompts)
    if prompts.format != "messages":
        raise SystemExit("run-batch takes conversations only: --prompt-column NAME, or prompts that are messages")
    size = job.rollout.group_size
    body = {
        "model": "policy",
        "temperature": 1.0,
        "max_completion_tokens": job.rollout.max_new_tokens,
        "logprobs": True,
    }
    return [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, "messages": prompts.prompts[number // size], "seed": seed},
        }
        for number, seed in enumerate(seeds)
    ]


def started(command: Sequence[str]) -> None:
    """Run a command to its end; show what it said where it failed."""
    done = subprocess.run(
        command, env=CPU_ENGINE | os.environ, capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def show(sides: Sequence[Side], rounds: int) -> None:
    """Print seconds, tokens a second, and how the first side's tokens a second compare with each one's."""
    first = sides[0]
    print(f"{rounds} rounds, best of each side       tokens      wall s     CPU s  first/this: wall    CPU")
    for side in sides:
        wall, cpu = min(side.wall), min(side.cpu)
        ratio = [
            first.tokens / mine / (side.tokens / theirs)
            for mine, theirs in ((min(first.wall), wall), (min(first.cpu), cpu))
        ]
        print(f"  {side.name:32} {side.tokens:9,} {wall:11.3f} {cpu:9.3f} {ratio[0]:17.3f} {ratio[1]:6.3f}")


def without_start(sides: Sequence[Side]) -> list[Side]:
    """Return each command's sampling alone: all completions less one."""
    pairs = zip(sides[::2], sides[1::2], strict=True)
    return [
        Side(
            name=f"{whole.name}, less one",
            tokens=whole.tokens - one.tokens,
            wall=[min(whole.wall) - min(one.wall)],
            cpu=[min(whole.cpu) - min(one.cpu)],
        )
        for whole, one in pairs
    ]


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", default="hf", choices=("hf", "vllm"))
    options.add_argument("--policy", default="builtin:tiny")
    options.add_argument("--prompts", default="builtin:addition")
    options.add_argument("--prompt-column", help="text; it becomes a user turn of the policy's chat template")
    options.add_argument("--num-prompts", type=int, default=64)
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--max-new-tokens", type=int, default=28)
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--command-rounds", type=int, default=1, help="of --against run-batch")
    options.add_argument("--against", action="append", default=[], choices=("generate", "run-batch"))
    given = options.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings would stand between the tables
    if "run-batch" in given.against and given.engine != "vllm":
        raise SystemExit("--against run-batch compares the same engine: --engine vllm")
    sets = [
        f"rollout.engine={given.engine}", f"prompts.limit={given.num_prompts}", f"rollout.group_size={given.group_size}",
        f"rollout.max_new_tokens={given.max_new_tokens}", f"rollout.dtype={given.dtype}", "runtime.num_threads=1",
        "runtime.enforce_eager=true", "rollout.max_truncated_ratio=1",
    ]  # fmt: skip
    if given.prompt_column:
        sets += [f"prompts.column={given.prompt_column}", "prompts.chat_template=always"]
    job = load_job(RolloutJob, flags={"--policy": given.policy, "--prompts": given.prompts}, sets=sets, environment={})
    sides, seeds = alternate(job, given.against, given.rounds)
    show(sides, given.rounds)
    if "run-batch" in given.against:
        whole = commands(job, sets, seeds, given.command_rounds)
        show(whole[::2], given.command_rounds)
        show(whole[1::2], given.command_rounds)
        show(without_start(whole), given.command_rounds)


if __name__ == "__main__":
    main()
