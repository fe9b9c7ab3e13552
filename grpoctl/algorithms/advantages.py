"""Advantages of completions from their rewards, group by group.

Knows rewards, groups and lengths, nothing of models, so `score` runs it without torch. Rewards are computed in float64.
An unscored completion (NaN here, null in the files) takes no part in any mean or deviation and stays NaN. For every
method but `none` a group with fewer than two scored members gets 0: it holds no comparison to learn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

DEFAULT_EPS: Final = 1e-6
"""verl's value; TRL's is 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The scored completions of one batch, group by group, in the caller's order.

    Args:
        rewards: (B,) finite rewards
        groups: the index arrays of each group's members
        lengths: (B,) completion tokens, or None where the method doesn't use them
        eps: added to a standard deviation before dividing by it
    """

    rewards: FloatArray
    groups: list[IntArray]
    lengths: IntArray | None
    eps: float


def advantages(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    method: str,
    eps: float = DEFAULT_EPS,
    lengths: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return each completion's advantage under the named method.

    Args:
        rewards: (B,) rewards, NaN where the completion wasn't scored
        group_index: (B,) any integers; equal numbers are one group, in whatever order the rows stand
        method: a key of `METHODS`
        eps: added to a standard deviation before dividing by it
        lengths: (B,) completion tokens; `opo` and `reinforce_plus_plus_baseline` need them

    Returns:
        (B,) float64, NaN exactly where the reward is NaN. Groups whose scored rewards are all equal get exactly 0
        (`none` and the batch-whitened `reinforce_plus_plus_baseline` excepted: they aren't relative to the group alone).

    Raises:
        ValueError: an unknown method, arrays of different lengths, infinite rewards, or lengths missing where needed.
    """
    if method not in METHODS:
        raise ValueError(f"unknown advantage method {method!r}; known: {', '.join(METHODS)}")
    all_rewards = np.asarray(rewards, dtype=np.float64)
    index = np.asarray(group_index)
    if all_rewards.ndim != 1 or all_rewards.shape != index.shape:
        raise ValueError(f"rewards {all_rewards.shape} and group_index {index.shape} must be two equal vectors")
    if np.isinf(all_rewards).any():
        raise ValueError(f"reward {int(np.flatnonzero(np.isinf(all_rewards))[0])} is infinite")
    token_counts = None if lengths is None else np.asarray(lengths, dtype=np.int64)
    if method in NEEDS_LENGTHS and token_counts is None:
        raise ValueError(f"advantage method {method!r} needs the completions' lengths")

    scored = np.flatnonzero(~np.isnan(all_rewards))
    batch = Batch(
        rewards=all_rewards[scored],
        groups=_members(index[scored]),
        lengths=None if token_counts is None else token_counts[scored],
        eps=eps,
    )
    result = np.full(all_rewards.shape, np.nan)
    result[scored] = METHODS[method](batch)
    return result


def _members(index: npt.NDArray[np.integer[Any]]) -> list[IntArray]:
    order = np.argsort(index, kind="stable")
    _, starts = np.unique(index[order], return_index=True)
    return [np.asarray(part, dtype=np.int64) for part in np.split(order, starts[1:])] if len(order) else []


def _is_flat(rewards: FloatArray) -> bool:
    """True where a group holds no comparison: one member, or all rewards equal."""
    return len(rewards) < 2 or bool(np.all(rewards == rewards[0]))


def _per_group(batch: Batch, rule: Callable[[FloatArray, IntArray], FloatArray]) -> FloatArray:
    result = np.zeros_like(batch.rewards)
    for members in batch.groups:
        rewards = batch.rewards[members]
        if not _is_flat(rewards):
            result[members] = rule(rewards, members)
    return result


def grpo(batch: Batch) -> FloatArray:
    """Centre by the group's mean and divide by its unbiased standard deviation.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    return _per_group(batch, lambda rewards, _: (rewards - rewards.mean()) / (rewards.std(ddof=1) + batch.eps))


def dr_grpo(batch: Batch) -> FloatArray:
    """Centre by the group's mean only.

    Source: Understanding R1-Zero-like training (arXiv 2503.20783), section 3.2.
    """
    return _per_group(batch, lambda rewards, _: rewards - rewards.mean())


def rloo(batch: Batch) -> FloatArray:
    """Subtract the mean reward of the other members.

    Source: Back to basics: REINFORCE-style optimisation (arXiv 2402.14740), the leave-one-out estimator (RLOO).
    """
    return _per_group(batch, lambda rewards, _: (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


def opo(batch: Batch) -> FloatArray:
    """Subtract the length-weighted mean reward, the variance-optimal baseline under equal per-token gradient norms.

    Source: On-policy RL with optimal reward baseline (arXiv 2505.23585), the length-weighted form.
    """
    assert batch.lengths is not None
    lengths = batch.lengths

    def rule(rewards: FloatArray, members: IntArray) -> FloatArray:
        weights = lengths[members].astype(np.float64)
        total = weights.sum()
        return rewards - (weights @ rewards) / total if total > 0 else np.zeros_like(rewards)

    return _per_group(batch, rule)


def gpg(batch: Batch) -> FloatArray:
    """Centre by the group's mean and scale by batch size over the number of non-zero rewards.

    Source: Group policy gradient (arXiv 2504.02546); the count of non-zero rewards is verl's form.
    """
    num_nonzero = max(1, int(np.count_nonzero(batch.rewards)))
    scale = len(batch.rewards) / num_nonzero
    return _per_group(batch, lambda rewards, _: scale * (rewards - rewards.mean()))


def passk(batch: Batch) -> FloatArray:
    """Give the group's best member its lead over the second best, divided by the group's deviation; 0 to the others.

    Source: Optimizing language models for inference time objectives using RL (arXiv 2503.19595), pass@k with k = G;
    the division by the deviation is verl's.
    """

    def rule(rewards: FloatArray, _: IntArray) -> FloatArray:
        best = int(np.argmax(rewards))
        second = np.partition(rewards, -2)[-2]
        result = np.zeros_like(rewards)
        result[best] = (rewards[best] - second) / (rewards.std(ddof=1) + batch.eps)
        return result

    return _per_group(batch, rule)


def batch_std(batch: Batch) -> FloatArray:
    """Centre by the group's mean and divide by the whole batch's unbiased standard deviation.

    Source: Part I: Tricks or Traps? (arXiv 2508.08221), batch-level deviation; TRL's `scale_rewards="batch"`.
    """
    if _is_flat(batch.rewards):
        return np.zeros_like(batch.rewards)
    deviation = batch.rewards.std(ddof=1) + batch.eps
    return _per_group(batch, lambda rewards, _: (rewards - rewards.mean()) / deviation)


def reinforce_plus_plus_baseline(batch: Batch) -> FloatArray:
    """Centre by the group's mean, then whiten over all tokens of the batch (a row counts once for each of its tokens).

    Source: REINFORCE++ (arXiv 2501.03262), the variant with the group's mean as baseline.
    """
    assert batch.lengths is not None
    centred = _per_group(batch, lambda rewards, _: rewards - rewards.mean())
    weights = batch.lengths.astype(np.float64)
    num_tokens = weights.sum()
    if num_tokens < 2 or not np.any(centred):
        return np.zeros_like(centred)
    mean = weights @ centred / num_tokens
    variance = weights @ (centred - mean) ** 2 / (num_tokens - 1)
    return (centred - mean) / np.sqrt(variance + 1e-8)


def none(batch: Batch) -> FloatArray:
    """Take the reward itself as the advantage: REINFORCE without a baseline.

    Source: Williams (1992), Simple statistical gradient-following algorithms, the REINFORCE rule with baseline 0.
    """
    return batch.rewards.copy()


METHODS: Final[dict[str, Callable[[Batch], FloatArray]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "passk": passk,
    "batch": batch_std,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "none": none,
}
NEEDS_LENGTHS: Final = frozenset({"opo", "reinforce_plus_plus_baseline"})


def token_advantages(
    advantage: float, old_logprobs: npt.ArrayLike, ref_logprobs: npt.ArrayLike, *, kl_coef: float
) -> FloatArray:
    """Spread one completion's advantage over its tokens with the KL penalty taken as a per-token reward.

    Token t receives `advantage − kl_coef · Σ_{s ≥ t} (old_logprobs_s − ref_logprobs_s)`: the outcome, less the
    penalty (k1, the only estimator whose reward form has the right gradient) still to come.

    Args:
        advantage: the completion's scalar advantage
        old_logprobs: (T,) log-probabilities under the policy that sampled
        ref_logprobs: (T,) log-probabilities under the reference
        kl_coef: weight of the penalty

    Returns:
        (T,) float64.
    Source: REINFORCE++ (arXiv 2501.03262), the token-level KL penalty, with discount 1.
    """
    kl = np.asarray(old_logprobs, dtype=np.float64) - np.asarray(ref_logprobs, dtype=np.float64)
    return advantage - kl_coef * np.cumsum(kl[::-1])[::-1]
