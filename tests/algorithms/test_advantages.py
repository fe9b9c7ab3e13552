"""Advantages from rewards: values by hand, and what must hold for any rewards and groups."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from grpoctl.algorithms.advantages import METHODS, NEEDS_LENGTHS, advantages, token_advantages

GROUP_RELATIVE = [name for name in METHODS if name not in ("none", "reinforce_plus_plus_baseline")]
SUM_TO_ZERO = ("grpo", "dr_grpo", "rloo", "gpg", "batch")
SHIFT_INVARIANT = ("grpo", "dr_grpo", "rloo", "opo", "passk", "batch", "reinforce_plus_plus_baseline")
SCALE_WITH_REWARDS = ("dr_grpo", "rloo", "opo", "gpg", "none")
SCALE_ONLY_THROUGH_EPS = ("grpo", "passk", "batch")

no_denormals = st.floats(-3, 3).map(lambda reward: reward if abs(reward) > 1e-6 else 0.0)
rewards_by_group = st.lists(
    st.lists(st.one_of(no_denormals, st.sampled_from([0.0, 1.0, 2.3])), min_size=1, max_size=8), min_size=1, max_size=4
)


def flat(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    return [r for group in groups for r in group], [i for i, group in enumerate(groups) for _ in group]


def lengths_for(rewards: list[float]) -> list[int]:
    return [1 + (7 * i) % 5 for i in range(len(rewards))]


def compute(groups: list[list[float]], method: str, **options) -> list[list[float]]:
    """Return the advantages in the shape of the groups."""
    rewards, index = flat(groups)
    values = iter(advantages(rewards, index, method=method, lengths=lengths_for(rewards), **options).tolist())
    return [[next(values) for _ in group] for group in groups]


def test_every_method_gives_the_values_worked_out_by_hand() -> None:
    rewards, group, lengths = [1.0, 0.0, 0.0, 3.0, 2.0], [0, 0, 0, 7, 7], [2, 1, 1, 4, 4]
    std0, std1 = statistics.stdev([1, 0, 0]), statistics.stdev([3, 2])
    batch = statistics.stdev(rewards)
    centred = [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5]
    tokens = [centred[0]] * 2 + [centred[1], centred[2]] + [0.5] * 4 + [-0.5] * 4
    whiten = math.sqrt(statistics.variance(tokens) + 1e-8)
    expected = {
        "grpo": [2 / 3 / std0, -1 / 3 / std0, -1 / 3 / std0, 0.5 / std1, -0.5 / std1],
        "dr_grpo": centred,
        "rloo": [1.0, -0.5, -0.5, 1.0, -1.0],
        "opo": [0.5, -0.5, -0.5, 0.5, -0.5],
        "gpg": [value * 5 / 3 for value in centred],
        "passk": [1 / std0, 0, 0, 1 / std1, 0],
        "batch": [value / batch for value in centred],
        "reinforce_plus_plus_baseline": [(value - statistics.fmean(tokens)) / whiten for value in centred],
        "none": rewards,
    }
    assert set(expected) == set(METHODS)
    for method, values in expected.items():
        ours = advantages(rewards, group, method=method, lengths=lengths, eps=0.0)
        assert ours == pytest.approx(values, rel=1e-13), method


def test_the_default_eps_is_verls() -> None:
    assert advantages([0.0, 1.0], [0, 0], method="grpo")[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-14)
    assert advantages([0.0, 1.0], [0, 0], method="grpo", eps=1e-4)[1] == pytest.approx(
        0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-14
    )


@pytest.mark.parametrize("method", SUM_TO_ZERO)
@quick(60)
@given(groups=rewards_by_group)
def test_advantages_of_a_group_sum_to_zero(method: str, groups: list[list[float]]) -> None:
    for values in compute(groups, method):
        assert abs(math.fsum(values)) <= 1e-12 * (1 + sum(map(abs, values)))


@quick(60)
@given(groups=rewards_by_group)
def test_opo_advantages_weighted_by_length_sum_to_zero(groups: list[list[float]]) -> None:
    lengths = iter(lengths_for(flat(groups)[0]))
    for values in compute(groups, "opo"):
        assert abs(math.fsum(value * next(lengths) for value in values)) <= 1e-11


@pytest.mark.parametrize("method", SHIFT_INVARIANT)
@quick(60)
@given(groups=rewards_by_group, shift=st.sampled_from([-64.0, 0.5, 1024.0]))
def test_shifting_all_rewards_changes_nothing(method: str, groups: list[list[float]], shift: float) -> None:
    exact = [[round(reward * 64) / 64 for reward in group] for group in groups]  # so that the shift itself is exact
    before = compute(exact, method)
    after = compute([[reward + shift for reward in group] for group in exact], method)
    for left, right in zip(before, after, strict=True):
        assert left == pytest.approx(right, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("method", SCALE_WITH_REWARDS)
@quick(40)
@given(groups=rewards_by_group, scale=st.sampled_from([0.25, 4.0, 1024.0]))
def test_unnormalised_advantages_scale_with_the_rewards(method: str, groups: list[list[float]], scale: float) -> None:
    before = compute(groups, method)
    after = compute([[reward * scale for reward in group] for group in groups], method)
    assert [[value * scale for value in values] for values in before] == after


@pytest.mark.parametrize("method", SCALE_ONLY_THROUGH_EPS)
@quick(40)
@given(groups=rewards_by_group, scale=st.sampled_from([0.25, 4.0, 1024.0]))
def test_normalised_advantages_change_with_scale_only_through_eps(
    method: str, groups: list[list[float]], scale: float
) -> None:
    scaled = [[reward * scale for reward in group] for group in groups]
    assert compute(groups, method, eps=1e-6) == compute(scaled, method, eps=1e-6 * scale)


@pytest.mark.parametrize("method", GROUP_RELATIVE)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, 2.3, -1e-9, 1e12 / 3])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 15, 16])
def test_equal_rewards_give_exactly_zero(method: str, reward: float, size: int) -> None:
    (values,) = compute([[reward] * size], method)
    assert values == [0.0] * size
    values, other = compute([[reward] * size, [0.0, 1.0, 0.0]], method)
    assert values == [0.0] * size and any(other)


def test_a_batch_of_equal_groups_is_whitened_to_exactly_zero() -> None:
    assert compute([[2.3] * 15, [0.1] * 15], "reinforce_plus_plus_baseline") == [[0.0] * 15] * 2


@pytest.mark.parametrize("method", GROUP_RELATIVE)
@pytest.mark.parametrize("group", [[5.0], [math.nan, 5.0, math.nan], [math.nan, math.nan]])
def test_a_group_with_fewer_than_two_scored_members_gets_zero(method: str, group: list[float]) -> None:
    values, _ = compute([group, [0.0, 1.0]], method)
    assert [math.isnan(value) for value in values] == [math.isnan(reward) for reward in group]
    assert all(value == 0 for value in values if not math.isnan(value))


@pytest.mark.parametrize("method", list(METHODS))
@quick(40)
@given(groups=rewards_by_group, data=st.data())
def test_unscored_members_are_left_out_and_stay_nan(
    method: str, groups: list[list[float]], data: st.DataObject
) -> None:
    rewards, index = flat(groups)
    lengths = lengths_for(rewards)
    unscored = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    with_gaps = [math.nan if gone else reward for reward, gone in zip(rewards, unscored, strict=True)]
    ours = advantages(with_gaps, index, method=method, lengths=lengths)
    kept = [i for i, gone in enumerate(unscored) if not gone]
    alone = advantages(
        [rewards[i] for i in kept], [index[i] for i in kept], method=method, lengths=[lengths[i] for i in kept]
    )
    assert np.isnan(ours).tolist() == unscored
    assert ours[kept].tolist() == alone.tolist()


@pytest.mark.parametrize("method", list(METHODS))
@quick(40)
@given(groups=rewards_by_group, random=st.randoms(use_true_random=False))
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(
    method: str, groups: list[list[float]], random
) -> None:
    rewards, index = flat(groups)
    lengths = lengths_for(rewards)
    order = list(range(len(rewards)))
    random.shuffle(order)
    before = advantages(rewards, index, method=method, lengths=lengths)
    after = advantages(
        [rewards[i] for i in order],
        [1000 - 7 * index[i] for i in order],
        method=method,
        lengths=[lengths[i] for i in order],
    )
    if method == "passk":  # of equal best members the first is rewarded, so only the values of a group are comparable
        assert sorted(after.tolist()) == pytest.approx(sorted(before.tolist()), rel=1e-12, abs=1e-14)
    else:
        assert after.tolist() == pytest.approx(before[order].tolist(), rel=1e-11, abs=1e-13)


def test_the_inputs_are_not_changed() -> None:
    rewards = np.array([0.0, 1.0, 2.0])
    for method in METHODS:
        advantages(rewards, [0, 0, 1], method=method, lengths=[1, 2, 3])
    assert rewards.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("method", list(METHODS))
def test_an_empty_batch_gives_an_empty_result(method: str) -> None:
    assert advantages([], [], method=method, lengths=[]).shape == (0,)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown advantage method 'gae'; known: grpo, dr_grpo"):
        advantages([1.0], [0], method="gae")
    with pytest.raises(ValueError, match=r"rewards \(2,\) and group_index \(1,\) must be two equal vectors"):
        advantages([1.0, 2.0], [0], method="grpo")
    for infinite in (math.inf, -math.inf):
        with pytest.raises(ValueError, match="reward 1 is infinite"):
            advantages([1.0, infinite], [0, 0], method="grpo")
    for method in NEEDS_LENGTHS:
        with pytest.raises(ValueError, match=f"advantage method '{method}' needs the completions' lengths"):
            advantages([1.0, 2.0], [0, 0], method=method)


def test_kl_in_reward_leaves_each_token_the_penalty_still_to_come() -> None:
    ours = token_advantages(0.5, [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.25], kl_coef=0.1)
    assert ours.tolist() == pytest.approx([0.5 - 0.1 * (0.5 - 1.0 - 0.25), 0.5 - 0.1 * (-1.0 - 0.25), 0.5 + 0.1 * 0.25])
    assert token_advantages(0.5, [-1.0, -2.0], [-1.0, -2.0], kl_coef=3.0).tolist() == [0.5, 0.5]
    assert token_advantages(0.5, [], [], kl_coef=3.0).shape == (0,)


def test_advantages_are_computed_without_torch() -> None:
    program = "import sys, grpoctl.algorithms.advantages, grpoctl.algorithms.overlong; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
