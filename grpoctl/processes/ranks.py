"""The processes of one stage: who this one is, and the few exchanges that stages need.

Alone nothing of torch.distributed is touched. Results go to every rank in the order of ranks, so a sum is the same number
on each of them and every rank decides alike.
"""

from __future__ import annotations

import atexit
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from grpoctl.errors import GrpoctlError, PeerFailed
from grpoctl.processes import launcher

Value = TypeVar("Value")
PATIENCE: Final = timedelta(hours=1)
"""How long a rank waits for another one: as long as the first may take to upload the new policy."""
LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")
"""What gloo and NCCL say when another process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A process among the `world_size` that work on one stage."""

    rank: int = 0
    world_size: int = 1
    block: int = 1
    """Processes that count as one here, because they share a copy of the model and work on the same rows."""

    def in_blocks(self, size: int) -> Ranks:
        """Return blocks of `size` neighbours as ranks; what they exchange is the word of each block's first."""
        return Ranks(rank=self.rank // size, world_size=self.world_size // size, block=self.block * size)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def all_gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in the order of ranks, on every rank."""
        return self._of_all(value)[:: self.block]

    def _of_all(self, value: Value) -> list[Value]:
        """Return every process's value."""
        count = self.world_size * self.block
        if count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * count
        with self.lost_peers():
            cast("Any", dist).all_gather_object(values, value)
        return values

    def broadcast(self, value: Value) -> Value:
        """Return the first rank's value on every rank."""
        return self.all_gather(value)[0]

    @contextmanager
    def agreed(self) -> Generator[None]:
        """Run a block on every rank; where it fails on one it fails on all, so that none waits for a process that left.

        Raises:
            PeerFailed: on all ranks but the first, and there where another rank failed.
        """
        mine: GrpoctlError | None = None
        try:
            yield
        except GrpoctlError as error:
            mine = error
        failures = self._of_all(None if mine is None else (str(mine), mine.exit_code))
        number, failure = next(((i, found) for i, found in enumerate(failures) if found is not None), (0, None))
        if failure is None:
            return
        if self.is_first and number == 0 and mine is not None:
            raise mine
        text, code = failure
        raise PeerFailed(f"process {number} of {self.world_size}: {text}", exit_code=code) from mine

    @contextmanager
    def lost_peers(self) -> Generator[None]:
        """Turn the error of a collective whose other end died into PeerFailed (exit 75); the dead one told why."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size * self.block > 1 and any(words in str(error) for words in LOST):
                raise PeerFailed(
                    f"process {self.rank} of {self.world_size}: another process is gone (see its message, or the "
                    "kernel's log for one that ran out of memory); nothing was committed, rerun",
                    exit_code=75,
                ) from error
            raise


ALONE: Final = Ranks()


def join(device: str) -> Ranks:
    """Return this process's place among those that a launcher started, connected to them; ALONE without a launcher.

    Args:
        device: runtime.device; with a GPU each process takes the one of its local rank
    """
    if not launcher.is_launched():
        return ALONE
    import os

    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        on_gpu = device in ("auto", "cuda") and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size())


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
