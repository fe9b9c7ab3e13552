"""Tokens a second of `grpoctl rollout` against the bare engine it calls, on the same prompts in the same run.

python benchmarks/rollout.py --engine hf|vllm [--policy REF] [--prompts FILE]   (vllm: with an interpreter that has it)

Both sides draw the same completions with the same engine object, alternately; each side's best of the rounds counts, so a
noisy neighbour hits both alike. Only ratios mean anything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from grpoctl.jobs import RolloutJob
from grpoctl.policies import open_policy
from grpoctl.settings import load_job
from grpoctl.stages import rollout
from grpoctl.stages.base import Context
from grpoctl.stages.samplers import sampler_for


class Captured:
    """The engine's sampler, remembering the calls that the stage made."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[tuple[Any, Any]] = []
        self.name, self.reproducible = inner.name, inner.reproducible

    def sample(self, requests: Any, settings: Any) -> Any:
        self.calls.append((requests, settings))
        return self.inner.sample(requests, settings)


def main() -> None:
    """Print seconds, tokens a second and the ratio of the stage to the bare engine."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--engine", default="hf")
    options.add_argument("--policy", default="builtin:tiny")
    options.add_argument("--prompts", default="builtin:addition")
    options.add_argument("--num-prompts", type=int, default=64)
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--max-new-tokens", type=int, default=28)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    sets = [
        f"rollout.engine={given.engine}", f"prompts.limit={given.num_prompts}", f"rollout.group_size={given.group_size}",
        f"rollout.max_new_tokens={given.max_new_tokens}", "runtime.num_threads=1", "runtime.enforce_eager=true",
    ]  # fmt: skip
    flags = {"--policy": given.policy, "--prompts": given.prompts}
    context = Context(quiet=True)
    job = load_job(RolloutJob, flags=flags, sets=sets, environment={})
    captured = Captured(sampler_for(job, context, open_policy(given.policy)))
    rollout.sampler_for = lambda *_: captured  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        stage, bare = [], []
        tokens = 0
        for number in range(given.rounds + 1):  # the first round warms caches and isn't counted
            this = load_job(
                RolloutJob, flags={**flags, "--out": str(Path(folder) / str(number))}, sets=sets, environment={}
            )
            captured.calls.clear()
            started = time.perf_counter()
            result = rollout.run(this, context)
            stage.append(time.perf_counter() - started)
            assert result.artifact is not None
            tokens = result.artifact.manifest.tokens["completion"]
            started = time.perf_counter()
            for requests, settings in captured.calls:
                captured.inner.sample(requests, settings)
            bare.append(time.perf_counter() - started)
    best_stage, best_bare = min(stage[1:]), min(bare[1:])
    print(f"{captured.name}: {tokens} tokens, {given.rounds} rounds, best of each side")
    print(f"  bare engine      {best_bare:8.3f} s  {tokens / best_bare:10,.0f} tokens/s")
    print(f"  grpoctl rollout  {best_stage:8.3f} s  {tokens / best_stage:10,.0f} tokens/s")
    print(f"  ratio            {best_bare / best_stage:8.3f}")


if __name__ == "__main__":
    main()
