"""Seeds and orders as functions of identity."""

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from grpoctl.algorithms.seeds import identity_order, identity_seed

parts = st.lists(st.one_of(st.integers(-5, 5), st.text(alphabet="ab|:1", max_size=4)), min_size=1, max_size=4)


def test_a_seed_is_the_same_on_every_machine_and_version() -> None:
    digest = hashlib.sha256(b"int:2:17|int:1:3|str:2:p0|int:1:5").digest()
    assert identity_seed(17, 3, "p0", 5) == int.from_bytes(digest[:8], "big") >> 1
    assert identity_seed(17, 3, "p0", 5) == 1594922934297697255


def test_an_order_is_the_same_on_every_machine_and_version() -> None:
    assert identity_order(["a", "b", "c", "d", "e"], "digest", 17, 0) == [1, 0, 3, 2, 4]


def test_neighbours_have_distinct_seeds_that_fill_63_bits() -> None:
    seeds = [identity_seed(17, i, f"p{p}", s) for i in range(10) for p in range(10) for s in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62 and min(seeds) < 2**53
    # vLLM gives child j of a request seed + j: derived seeds must not stand next to each other
    ordered = sorted(seeds)
    assert min(b - a for a, b in pairwise(ordered)) > 1024


@quick(200)
@given(parts, parts)
def test_different_identities_have_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    assert (identity_seed(*left) == identity_seed(*right)) == (left == right)


def test_a_number_and_its_text_are_different_identities() -> None:
    assert identity_seed(1) != identity_seed("1")
    assert identity_seed("a", "b") != identity_seed("a|str:1:b")


@quick(100)
@given(st.lists(st.text(max_size=5), unique=True, max_size=12), st.integers(0, 99), st.randoms(use_true_random=False))
def test_an_order_is_a_permutation_that_ignores_the_order_of_its_input(keys, seed, random) -> None:
    order = identity_order(keys, "digest", seed)
    assert sorted(order) == list(range(len(keys)))
    shuffled = list(keys)
    random.shuffle(shuffled)
    again = identity_order(shuffled, "digest", seed)
    assert [shuffled[i] for i in again] == [keys[i] for i in order]


def test_another_epoch_gives_another_order() -> None:
    keys = [f"p{i}" for i in range(30)]
    assert identity_order(keys, "digest", 17, 0) != identity_order(keys, "digest", 17, 1)
