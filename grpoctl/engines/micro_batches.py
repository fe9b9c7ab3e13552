"""Deal units to ranks by token count, so that every rank runs the same number of forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpoctl.engines.base import PolicyModel, TokenIds, Unit, micro_batches_by_tokens, padded_width
from grpoctl.engines.forward import make_units
from grpoctl.processes.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward of this rank.

    Args:
        units: its rows
        counts: False for padding: another rank has more chunks, and a sharded engine needs this one's forward too
        last: whether it is the rank's last of the step
    """

    units: Sequence[Unit]
    counts: bool
    last: bool


def deal_micro_batches(
    prompts: Sequence[TokenIds], completions: Sequence[TokenIds], *, policy: PolicyModel, budget: int, ranks: Ranks
) -> list[MicroBatch]:
    """Return this rank's forwards over the rows; every rank gets as many.

    Args:
        prompts: (B) prompt ids by row
        completions: (B) completion ids by row
        policy: tells whether and up to which length prompts may be shared
        budget: tokens of one forward
        ranks: all processes; each computes the whole deal, nothing is sent
    """
    units = make_units(prompts, completions, policy=policy, budget=budget)
    if len(units) < ranks.world_size:  # smaller units, rather than ranks with nothing to do
        total = sum(unit.num_tokens for unit in units)
        units = make_units(prompts, completions, policy=policy, budget=max(1, total // ranks.world_size))
    units = [unit for unit in units if any(len(ids) for ids in unit.completions)]
    if not units:
        return []
    dealt = [list(micro_batches_by_tokens(share, budget)) for share in deal(units, ranks.world_size)]
    count = max(map(len, dealt))
    smallest = min(range(len(units)), key=lambda i: (units[i].num_tokens, i))
    padding = MicroBatch(units=[units[smallest]], counts=False, last=False)
    mine = [MicroBatch(units=share, counts=True, last=False) for share in dealt[ranks.rank]]
    mine += [padding] * (count - len(mine))
    mine[-1] = MicroBatch(units=mine[-1].units, counts=mine[-1].counts, last=True)
    return mine


def deal(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return each rank's units: the widest first, each to the rank with the fewest tokens; order is kept within a rank."""
    loads = [0] * num_ranks
    owners: dict[int, int] = {}
    for i in sorted(range(len(units)), key=lambda i: (-padded_width(units[i].num_tokens), i)):
        owner = loads.index(min(loads))
        owners[i] = owner
        loads[owner] += padded_width(units[i].num_tokens)
    return [[unit for i, unit in enumerate(units) if owners[i] == rank] for rank in range(num_ranks)]
