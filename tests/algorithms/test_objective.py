"""The whole GRPO objective, from rewards to loss and gradient, against loops over scalars written as the papers write it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick
from torch import Tensor

from grpoctl.algorithms.advantages import advantages
from grpoctl.algorithms.aggregation import AGGREGATIONS, loss_denominator, loss_numerator
from grpoctl.algorithms.kl import token_kl
from grpoctl.algorithms.policy_loss import LossSettings, policy_loss

EPS_LOW, EPS_HIGH, BETA, EPS, L_MAX = 0.2, 0.28, 0.04, 1e-6, 9

Rows = list[list[Tensor]]
"""One list of scalar log-probabilities a completion: no padding, no mask."""


def papers_objective(
    policy: Rows, old: Rows, reference: Rows, rewards: list[float], groups: list[int], *, method: str, aggregation: str
) -> Tensor:
    """Return the loss (the negated objective) by loops.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 3 and 4 with section 4.1.2; DAPO (arXiv 2503.14476) eq. 8 for the two
    clip bounds and the mean over tokens; Understanding R1-Zero-like training (arXiv 2503.20783) for the constant divisor.
    """
    completions = []
    for i, tokens in enumerate(policy):
        own_group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i] and not math.isnan(r)]
        if not tokens or math.isnan(rewards[i]):
            continue
        mean = sum(own_group) / len(own_group)
        advantage = rewards[i] - mean
        if len(own_group) < 2 or max(own_group) == min(own_group):
            advantage = 0.0
        elif method == "grpo":
            std = math.sqrt(sum((r - mean) ** 2 for r in own_group) / (len(own_group) - 1))
            advantage /= std + EPS
        terms = []
        for logprob, before, ref in zip(tokens, old[i], reference[i], strict=True):
            ratio = torch.exp(logprob - before)
            clipped = min(max(ratio.item(), 1 - EPS_LOW), 1 + EPS_HIGH)
            surrogate = min(ratio * advantage, torch.tensor(clipped, dtype=torch.float64) * advantage)
            kl = torch.exp(ref - logprob) - (ref - logprob) - 1
            terms.append(surrogate - BETA * kl)
        completions.append(terms)
    if aggregation == "token-mean":
        objective = sum(sum(terms) for terms in completions) / sum(len(terms) for terms in completions)
    elif aggregation == "seq-mean-token-mean":
        objective = sum(sum(terms) / len(terms) for terms in completions) / len(completions)
    elif aggregation == "seq-mean-token-sum":
        objective = sum(sum(terms) for terms in completions) / len(completions)
    else:
        objective = sum(sum(terms) / L_MAX for terms in completions) / len(completions)
    return -objective


def fast_path(  # noqa: PLR0917  the same arguments as papers_objective, then the mask
    policy: Tensor,
    old: Tensor,
    reference: Tensor,
    rewards: list[float],
    groups: list[int],
    mask: Tensor,
    **options: str,
) -> Tensor:
    """Return numerator / denominator as the update engine composes them."""
    advantage = torch.tensor(advantages(rewards, groups, method=options["method"], eps=EPS))[:, None]
    aggregation = options["aggregation"]
    result = policy_loss(
        "ppo_clip",
        policy,
        old_logprobs=old,
        advantages=advantage,
        mask=mask,
        settings=LossSettings(clip_low=EPS_LOW, clip_high=EPS_HIGH),
    )
    kl = token_kl(policy, reference, estimator="k3", mask=mask)
    total = loss_denominator(mask.sum(dim=-1), aggregation=aggregation, norm_tokens=L_MAX)
    return (
        loss_numerator(result.loss, mask, aggregation=aggregation)
        + BETA * loss_numerator(kl, mask, aggregation=aggregation)
    ) / total


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[tuple[float, float, float]]], list[float], list[int]]:
    """Draw per completion its tokens' (policy, old, reference) log-probabilities, its reward and its group."""
    num_groups = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 5), min_size=num_groups, max_size=num_groups))
    reward = st.sampled_from([0.0, 1.0, 0.5, 2.3, -1.0, math.nan])
    log = st.floats(-4, -0.01)
    near = st.floats(-0.6, 0.6)
    token = st.tuples(log, near, near).map(lambda t: (t[0], t[0] + t[1], t[0] + t[2]))
    rewards, groups, tokens = [], [], []
    for group, size in enumerate(sizes):
        for _ in range(size):
            rewards.append(draw(reward))
            groups.append(group)
            tokens.append(draw(st.lists(token, min_size=0, max_size=5)))
    if not any(row and not math.isnan(r) for row, r in zip(tokens, rewards, strict=True)):
        rewards[0], tokens[0] = 1.0, [(-1.0, -1.2, -0.9)]
    return tokens, rewards, groups


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", ["grpo", "dr_grpo"])
@quick(60)
@given(problem=problems(), extra=st.integers(0, 3))
def test_the_fast_path_is_the_papers_objective(method: str, aggregation: str, problem, extra: int) -> None:
    tokens, rewards, groups = problem
    options = {"method": method, "aggregation": aggregation}
    policy, old, reference = (
        [[torch.tensor(token[k], dtype=torch.float64, requires_grad=k == 0) for token in row] for row in tokens]
        for k in range(3)
    )
    expected = papers_objective(policy, old, reference, rewards, groups, **options)
    leaves = [leaf for row in policy for leaf in row]
    slow = torch.autograd.grad(expected, leaves, allow_unused=True)

    width = max(len(row) for row in tokens) + extra
    grids = torch.full((3, len(tokens), width), math.nan, dtype=torch.float64)
    mask = torch.zeros(len(tokens), width, dtype=torch.bool)
    for i, row in enumerate(tokens):
        for t, values in enumerate(row):
            grids[:, i, t] = torch.tensor(values, dtype=torch.float64)
            mask[i, t] = not math.isnan(rewards[i])
    grid = grids[0].clone().requires_grad_()
    loss = fast_path(grid, grids[1], grids[2], rewards, groups, mask, **options)
    (fast,) = torch.autograd.grad(loss, grid)

    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-13)
    by_token = iter(slow)
    for i, row in enumerate(tokens):
        for t in range(len(row)):
            gradient = next(by_token)
            assert fast[i, t].item() == pytest.approx(
                0.0 if gradient is None else gradient.item(), rel=1e-10, abs=1e-13
            )
        assert not fast[i, len(row) :].any()


def test_a_batch_without_signal_has_loss_zero_and_no_gradient_without_kl() -> None:
    logprobs = torch.full((4, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool)
    result = policy_loss(
        "ppo_clip",
        logprobs,
        old_logprobs=torch.full((4, 3), -1.3, dtype=torch.float64),
        advantages=torch.tensor(advantages([2.3] * 4, [0] * 4, method="grpo"))[:, None],
        mask=mask,
        settings=LossSettings(),
    )
    loss = loss_numerator(result.loss, mask, aggregation="token-mean") / 12
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, logprobs)[0].any()
