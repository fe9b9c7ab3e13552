"""Every row goes to one rank, and all ranks run as many forwards."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grpoctl.engines.base import Unit, padded_width
from grpoctl.engines.micro_batches import deal, deal_micro_batches
from grpoctl.processes.ranks import Ranks

POLICY = SimpleNamespace(shares_prompts=True, max_shared_tokens=None)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=24),
    num_ranks=st.integers(1, 5),
    budget=st.sampled_from([1, 128, 1000, 1 << 20]),
)
def test_every_row_is_dealt_once_and_every_rank_runs_as_many_forwards(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    prompts = [np.full(3 + i // 4, 7, dtype=np.int32) for i in range(len(lengths))]
    completions = [np.zeros(length, dtype=np.int32) for length in lengths]
    dealt = [
        deal_micro_batches(
            prompts, completions, policy=POLICY, budget=budget, ranks=Ranks(rank=i, world_size=num_ranks)
        )
        for i in range(num_ranks)
    ]
    assert len({len(chunks) for chunks in dealt}) == 1
    rows = sorted(row for chunks in dealt for c in chunks if c.counts for unit in c.units for row in unit.rows)
    with_tokens = [row for row, length in enumerate(lengths) if length]
    assert [row for row in rows if lengths[row]] == with_tokens
    assert len(rows) == len(set(rows))
    for chunks in dealt:
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(chunks)
        assert all(any(len(ids) for unit in chunk.units for ids in unit.completions) for chunk in chunks)


def test_one_row_on_two_ranks_leaves_the_second_with_padding() -> None:
    row = ([np.array([1], dtype=np.int32)], [np.array([2, 3], dtype=np.int32)])
    first, second = (
        deal_micro_batches(*row, policy=POLICY, budget=100, ranks=Ranks(rank=rank, world_size=2)) for rank in (0, 1)
    )
    assert [chunk.counts for chunk in first] == [True]
    assert [chunk.counts for chunk in second] == [False]


def test_the_widest_units_go_first_to_the_rank_with_the_fewest_tokens() -> None:
    ids = np.array([1], dtype=np.int32)
    units = [
        Unit(prompt_ids=ids, completions=(np.zeros(length, dtype=np.int32),), rows=(row,))
        for row, length in enumerate([60, 200, 100, 60, 60])
    ]
    shares = deal(units, 2)
    assert [[unit.rows[0] for unit in share] for share in shares] == [[1, 4], [0, 2, 3]]
    assert [sum(padded_width(unit.num_tokens) for unit in share) for share in shares] == [320, 256]
