"""What a rollout does with an engine that misbehaves, and with one that holds other weights than it should."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.warm import model_key
from grpoctl.errors import GateFailed, TryAgain
from grpoctl.inputs.policies import open_policy
from grpoctl.settings.jobs import LogprobJob, RolloutJob
from grpoctl.settings.load import load_job
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages import logprob, rollout
from grpoctl.stages.context import Context
from grpoctl.stages.rollout import draw_samples
from grpoctl.stages.stage import run

SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=(), stop_token_ids=())
REQUESTS = [SampleRequest(prompt_ids=np.array([5], np.int32), seed=i, max_new_tokens=3) for i in range(3)]


class Engine:
    """Answers each call with the finish reasons it was given."""

    name, reproducible = "engine", True

    def __init__(self, *reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        self.asked: list[list[int]] = []

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        self.asked.append([request.seed for request in requests])
        one = np.array([1], np.int32), np.array([-0.1], np.float32)
        return [Sample(completion_ids=one[0], logprobs=one[1], finish_reason=r) for r in self.reasons.pop(0)]


def test_an_aborted_request_is_asked_again() -> None:
    engine = Engine(["stop", "abort", "abort"], ["stop", "abort"], ["length"])
    samples = draw_samples(engine, REQUESTS, SETTINGS)
    assert [sample.finish_reason for sample in samples] == ["stop", "stop", "length"]
    assert engine.asked == [[0, 1, 2], [1, 2], [2]]


def test_a_request_aborted_thrice_stays_aborted() -> None:
    engine = Engine(["stop", "abort", "stop"], ["abort"], ["abort"])
    assert draw_samples(engine, REQUESTS, SETTINGS)[1].finish_reason == "abort"


def test_too_few_samples_is_try_again() -> None:
    with pytest.raises(TryAgain, match="returned 2 samples for 3 requests"):
        draw_samples(Engine(["stop", "stop"]), REQUESTS, SETTINGS)


def test_rollouts_from_stale_weights_are_stopped_by_the_gap(small_run: Path, tmp_path: Path) -> None:
    """Plant old weights under the new policy's digest, as an engine that ignored a reload would hold them."""
    policy = open_policy(str(small_run / "policies"))
    context = Context(quiet=True)
    runtime = RuntimeConfig(num_threads=1)
    old = context.warm.model(open_policy("builtin:tiny"), dtype="float32", runtime=runtime)
    with torch.no_grad():
        for parameter in old.module.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    context.warm.models[model_key(policy.weights_digest, forward="torch", dtype="float32", runtime=runtime)] = old
    flags = {"--policy": str(small_run / "policies"), "--out": str(tmp_path / "rollouts"), "--max-new-tokens": "28"}
    sets = ["prompts.limit=8", "runtime.num_threads=1"]
    run(rollout.STAGE, load_job(RolloutJob, flags=flags, sets=sets, environment={}), context)
    flags = {"--policy": flags["--policy"], "--rollouts": flags["--out"], "--out": str(tmp_path / "logprobs")}
    with pytest.raises(GateFailed, match=r"differ by .* nats on average, limit 0.001 .*stale weights"):
        run(logprob.STAGE, load_job(LogprobJob, flags=flags, environment={}), Context(quiet=True))
