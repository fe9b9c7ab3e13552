"""The hf engine's record: transformers' generate with the very model that training uses."""

from __future__ import annotations

from grpoctl.engines.base import Sampler
from grpoctl.engines.registry import SamplingEngine
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.engines.warm import Warm
from grpoctl.inputs.policies import PolicyFolder
from grpoctl.settings.jobs import RolloutJob


def make_sampler(job: RolloutJob, policy: PolicyFolder, warm: Warm) -> Sampler:
    """Return a sampler around the policy's model, warm or loaded."""
    from grpoctl.engines.hf.sampler import HfSampler

    model = warm.model(policy, dtype=job.rollout.dtype, runtime=job.runtime)
    tokenizer = load_tokenizer(policy.folder, policy.ref)
    return HfSampler(model, tokenizer, batch_size=job.runtime.rollout_batch_size)


ENGINE = SamplingEngine(sampler=make_sampler)
