"""A policy split over all processes of a stage (FSDP2), each of which reads its share of the files only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpoctl.inputs.policies import Policy
from grpoctl.processes.memory import memory_errors
from grpoctl.settings.runtime import RuntimeConfig
from grpoctl.stages.stage import Context, set_threads

Step = Callable[[Any], None]


def split_model(
    policy: Policy,
    context: Context,
    *,
    dtype: str,
    runtime: RuntimeConfig,
    before: Step = lambda model: None,
    after: Step = lambda model: None,
) -> Any:
    """Return the policy's model split over all processes, loaded once for each weights digest.

    A folder whose tensors don't fit the model one to one is loaded whole on every process first.

    Args:
        policy: the folder
        context: keeps the model, and knows the processes
        dtype: of the forward
        runtime: device and threads
        before: changes the model before it is split, while its parameters may be on no device
        after: gives values to what `before` added

    Raises:
        TryAgain: there is no memory for it.
        InputRefused: the model can't be loaded.
    """
    from grpoctl.engines.tokenizer import load_tokenizer
    from grpoctl.engines.torch.fsdp import shard, split_again
    from grpoctl.engines.torch.fsdp_load import empty_policy, fill, materialize
    from grpoctl.engines.torch.model import autocast_type, check_policy, load_policy

    ranks = context.ranks
    key = (policy.weights_digest, dtype, runtime.device)
    if key in context.models:
        return context.models[key]
    loading = "loading the model", "take more devices (runtime.num_processes)"
    set_threads(runtime)
    with ranks.agreed(), memory_errors(*loading):
        size = load_tokenizer(policy.folder, policy.ref).vocab_size
        model = empty_policy(policy.folder, vocab_size=size, device=runtime.device)
    in_shares = all(ranks.gather(model is not None))
    with ranks.agreed(), memory_errors(*loading):
        if not in_shares:
            model = load_policy(policy.folder, ref=policy.ref, vocab_size=size, device="cpu", dtype=dtype)
        before(model)
    assert model is not None
    shard(model, ranks, device=runtime.device)
    with ranks.agreed(), memory_errors(*loading):
        if in_shares:
            materialize(model)
            fill(model, policy.folder, ranks)
        after(model)
    if in_shares:
        check_policy(model, policy.ref)  # every process computes the same, so that all refuse it or none
        split_again(model)
        model.autocast = autocast_type(dtype)
    context.models[key] = model
    return model
