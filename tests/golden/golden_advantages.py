"""The recorded advantages of verl and TRL.

Every case is also compared with `plain_advantages`, loops over Python floats written from the papers, so our own value is
asserted where a peer's differs on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from golden_cases import MATCHED, RTOL, Case, Outcome, absent, differs, gap, members_by_group, numbers

from grpoctl.algorithms.advantages import METHODS, advantages

UNSCORED = "unscored (NaN) reward: ours is left out and stays null; verl spreads the NaN, TRL writes advantage 0"
INFINITE = "infinite reward: ours is refused; the peers return NaN, inf or ±3.4e38"
GROUP_OF_ONE = "group of one: ours is exactly 0 (no comparison); verl uses mean 0, std 1 or refuses, TRL refuses"
FEW_TOKENS = "whitening over fewer than two tokens: ours is exactly 0; verl refuses"
EQUAL_REWARDS = "group of equal rewards: ours is exactly 0; the peers leave the rounding residue of mean and std"

FLOAT32_COUNTS = (
    "verl's n/(n − 1) (whitening) or B/non-zero (gpg) is float32; equal to 1e-12 once ours takes that factor"
)

VERL_EPS, TRL_EPS = 1e-6, 1e-4

VERL_METHODS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "passk",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
NOT_HERE = (
    "gae",
    "gdpo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "remax",
    "tir_optimal_token_baseline",
)
PASSK_WITHOUT_STD = "grpo_passk with norm_adv_by_std_in_grpo false"
NORMALIZE_THEN_SUM = "multi_objective_aggregation normalize_then_sum"

METHODS_NOT_HERE = {name: "advantages" for name in (*NOT_HERE, PASSK_WITHOUT_STD, NORMALIZE_THEN_SUM)}

COUPLES_THE_BATCH = ("gpg", "batch", "reinforce_plus_plus_baseline")
"""A row's advantage depends on other groups' rewards."""


def verl_advantages(case: Case) -> Outcome:
    """Compare with a verl estimator: token-level rewards summed to an outcome, one advantage a row."""
    estimator = case.params["estimator"]
    if estimator in NOT_HERE:
        with pytest.raises(ValueError, match="unknown advantage method"):
            advantages([1.0], [0], method=estimator)
        return absent(estimator)
    method = VERL_METHODS[estimator]
    config = case.params.get("config", case.params)
    if not config.get("norm_adv_by_std_in_grpo", True):
        if method == "passk":
            return absent(PASSK_WITHOUT_STD)
        method = {"grpo": "dr_grpo"}.get(method, method)

    mask = numbers(case.inputs["response_mask"])
    dtype = torch.float32 if estimator == "grpo_vectorized" else getattr(torch, case.params["dtype"])
    rewards = case.tensor("token_level_rewards").sum(dim=-1).to(dtype).double().tolist()
    lengths = [int(length) for length in mask.sum(axis=1)]
    rtol = RTOL["float32"] if dtype == torch.float32 else case.rtol
    peer: list[float | None] = [None] * len(rewards)
    if case.error is None:
        spread = case.output("advantages")
        for row, length in enumerate(lengths):
            if length:
                seen = spread[row][mask[row] > 0]
                assert len(set(seen)) == 1 or np.isnan(seen).all(), "a row of verl's has one advantage"
                peer[row] = float(seen[0])
    return compare(rewards, case.inputs["group"], lengths, peer, method=method, eps=VERL_EPS, rtol=rtol, case=case)


def trl_advantages(case: Case) -> Outcome:
    """Compare with TRL: rewards of several functions, weighted and summed, in groups of consecutive rows."""
    if case.params.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        return absent(NORMALIZE_THEN_SUM)
    assert case.params.get("multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
    scale = case.params.get("scale_rewards", "group")
    method = {"group": "grpo", "True": "grpo", "none": "dr_grpo", "False": "dr_grpo", "batch": "batch"}[str(scale)]
    dtype = getattr(torch, case.params["dtype"])
    per_function = torch.tensor(numbers(case.inputs["rewards_per_func"])).float().to(dtype)
    weights = torch.tensor(case.params.get("reward_weights") or [1.0] * len(per_function), dtype=dtype)
    total = (per_function * weights[:, None]).nansum(dim=0)
    rewards = torch.where(per_function.isnan().all(dim=0), torch.nan, total).double().tolist()
    groups = [row // case.params["num_generations"] for row in range(len(rewards))]
    peer = [None] * len(rewards) if case.error is not None else [float(value) for value in case.output("advantages")]
    return compare(rewards, groups, [1] * len(rewards), peer, method=method, eps=TRL_EPS, rtol=case.rtol, case=case)


HANDLERS = {("trl", "advantages"): trl_advantages} | {
    ("verl", f"compute_{name}_advantage{suffix}"): verl_advantages
    for name, suffix in (
        ("gae", "_return"),
        ("gdpo_outcome", ""),
        ("gpg_outcome", ""),
        ("grpo_outcome", ""),
        ("grpo_passk_outcome", ""),
        ("grpo_vectorized_outcome", ""),
        ("multi_turn_optimal_token_baseline", ""),
        ("opo_outcome", ""),
        ("optimal_token_baseline", ""),
        ("reinforce_plus_plus_baseline_outcome", ""),
        ("reinforce_plus_plus_outcome", ""),
        ("remax_outcome", ""),
        ("rloo_outcome", ""),
        ("rloo_vectorized_outcome", ""),
    )
}


def compare(  # noqa: PLR0912  one branch a rule
    rewards: list[float],
    groups: Sequence[object],
    lengths: list[int],
    peer: list[float | None],
    *,
    method: str,
    eps: float,
    rtol: float,
    case: Case,
) -> Outcome:
    """Compare row by row; `peer` is None where the peer shows no value (a row without tokens, or it raised)."""
    labels = {label: number for number, label in enumerate(dict.fromkeys(groups))}
    index = [labels[label] for label in groups]
    if any(math.isinf(reward) for reward in rewards):
        with pytest.raises(ValueError, match="is infinite"):
            advantages(rewards, index, method=method, eps=eps, lengths=lengths)
        return differs(INFINITE)

    ours = advantages(rewards, index, method=method, eps=eps, lengths=lengths)
    plain, scales = plain_advantages(method, rewards, groups, lengths, eps)
    message = gap(ours, plain, rtol=RTOL["float64"], scale=scales)
    assert not message, f"ours against the plain formula {message}"

    scored_groups = [[row for row in rows if not math.isnan(rewards[row])] for rows in members_by_group(groups)]
    singles = {rows[0] for rows in scored_groups if len(rows) == 1}
    flats = {row for rows in scored_groups if len(rows) > 1 and len({rewards[r] for r in rows}) == 1 for row in rows}
    unscored = {row for row, reward in enumerate(rewards) if math.isnan(reward)}
    spoilt = _spoilt_rows(case.package, method, groups, unscored)
    whitens_a_single = bool(singles) and method == "reinforce_plus_plus_baseline"
    spoilt_by_single = set(range(len(rewards))) if whitens_a_single else singles
    all_flat = len(flats | singles | unscored) == len(rewards)

    if case.error is not None and method == "reinforce_plus_plus_baseline" and sum(lengths) < 2:
        assert all(ours[row] == 0 for row in range(len(rewards)) if row not in unscored)
        return differs(FEW_TOKENS)
    if case.error is not None:
        assert singles, f"{case.package} refused the case for a reason without a rule: {case.error}"
        assert all(ours[row] == 0 for row in singles)
        return differs(GROUP_OF_ONE)

    reasons: set[str] = set()
    for row, value in enumerate(peer):
        if row in unscored:
            assert math.isnan(ours[row])
        exact = (row in singles or row in flats) and (method != "reinforce_plus_plus_baseline" or all_flat)
        if exact:
            assert ours[row] == 0, "no comparison in the group: exactly 0"
        if value is None:
            continue
        if not gap(ours[row], value, rtol=rtol, scale=0.0 if exact else scales[row]):
            continue
        if method in ("reinforce_plus_plus_baseline", "gpg") and not (spoilt or row in spoilt_by_single):
            factor = _float32_counts(method, rewards, groups, lengths)
            if not gap(ours[row] * factor, value, rtol=rtol, scale=scales[row]):
                reasons.add(FLOAT32_COUNTS)
                continue
        if row in spoilt:
            reasons.add(UNSCORED)
        elif row in spoilt_by_single:
            reasons.add(GROUP_OF_ONE)
        elif exact:
            reasons.add(EQUAL_REWARDS)
        else:
            message = gap(ours[row], value, rtol=rtol, scale=scales[row])
            assert not message, f"row {row} {message} (allowed {rtol * scales[row]:.3g})"
    return differs(sorted(reasons)[0]) if reasons else MATCHED


def _spoilt_rows(package: str, method: str, groups: Sequence[object], unscored: set[int]) -> set[int]:
    """Return the rows whose peer value a NaN reward changes: verl never leaves a NaN out, TRL does."""
    if package == "trl":
        return unscored
    if unscored and method in COUPLES_THE_BATCH:
        return set(range(len(groups)))
    return {row for rows in members_by_group(groups) if unscored & set(rows) for row in rows}


def plain_advantages(
    method: str, rewards: Sequence[float], groups: Sequence[object], lengths: Sequence[int], eps: float
) -> tuple[list[float], list[float]]:
    """Return the advantages by loops over floats, and the magnitude of the terms each was computed from.

    After cancellation in `r − mean` and in the deviation the rounding error is of the order of
    (1 + |A|) · max|r| / deviation, whatever the size of A.
    """
    assert method in METHODS
    result = [math.nan] * len(rewards)
    scales = [0.0] * len(rewards)
    scored = [row for row, reward in enumerate(rewards) if not math.isnan(reward)]
    largest = max((abs(rewards[row]) for row in scored), default=0.0)
    batch_deviation = _deviation([rewards[row] for row in scored]) + eps if len(scored) > 1 else math.nan
    num_nonzero = sum(rewards[row] != 0 for row in scored)
    for rows in members_by_group([groups[row] for row in scored]):
        members = [scored[position] for position in rows]
        values = [rewards[row] for row in members]
        mean = math.fsum(values) / len(values)
        for row in members:
            if len(members) == 1 or min(values) == max(values):
                result[row], scales[row] = 0.0, 0.0
                continue
            others = [rewards[other] for other in members if other != row]
            deviation = 1.0
            if method in ("grpo", "passk"):
                deviation = _deviation(values) + eps
            if method == "batch":
                deviation = batch_deviation
            if method in ("grpo", "dr_grpo", "batch", "reinforce_plus_plus_baseline"):
                result[row] = (rewards[row] - mean) / deviation
            elif method == "rloo":
                result[row] = rewards[row] - math.fsum(others) / len(others)
            elif method == "opo":
                tokens = sum(lengths[other] for other in members)
                baseline = math.fsum(lengths[other] * rewards[other] for other in members) / tokens if tokens else 0.0
                result[row] = rewards[row] - baseline if tokens else 0.0
            elif method == "gpg":
                result[row] = (rewards[row] - mean) * len(scored) / max(1, num_nonzero)
                deviation = max(1, num_nonzero) / len(scored)
            elif method == "passk":
                first_best = row == min(r for r in members if rewards[r] == max(values))
                result[row] = (rewards[row] - max(others)) / deviation if first_best else 0.0
            scales[row] = (1 + abs(result[row])) * largest / deviation
    if method == "none":
        return list(rewards), scales
    if method == "reinforce_plus_plus_baseline":
        return _whitened(result, lengths, largest)
    return result, scales


def _float32_counts(method: str, rewards: list[float], groups: Sequence[object], lengths: list[int]) -> float:
    """Return what our advantages are multiplied by when a ratio of counts is rounded to float32, as verl's is."""
    if method == "gpg":
        exact = len(rewards) / max(1, sum(reward != 0 for reward in rewards))
        return float(np.float32(exact)) / exact
    centred, _ = plain_advantages("dr_grpo", rewards, groups, lengths, 0.0)
    tokens = [value for value, length in zip(centred, lengths, strict=True) for _ in range(length)]
    exact = len(tokens) / (len(tokens) - 1)
    variance = _deviation(tokens) ** 2
    return math.sqrt((variance + 1e-8) / (variance * float(np.float32(exact)) / exact + 1e-8))


def _whitened(centred: list[float], lengths: Sequence[int], largest: float) -> tuple[list[float], list[float]]:
    tokens = [
        value for value, length in zip(centred, lengths, strict=True) for _ in range(length) if not math.isnan(value)
    ]
    zero = [math.nan if math.isnan(value) else 0.0 for value in centred]
    if len(tokens) < 2 or not any(tokens + [value for value in centred if not math.isnan(value)]):
        return zero, [0.0] * len(centred)
    mean = math.fsum(tokens) / len(tokens)
    deviation = math.sqrt(_deviation(tokens) ** 2 + 1e-8)
    result = [(value - mean) / deviation for value in centred]
    return result, [0.0 if math.isnan(value) else (1 + abs(value)) * largest / deviation for value in result]


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
