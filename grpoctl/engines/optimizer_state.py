"""The optimizer's state on disk: both moments of every parameter whole, under its name, and its number of steps.

Nothing in the file tells how many processes or which engine wrote it, so any engine on any number of them continues from
it. A rank holds one whole tensor at a time beside its own share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from safetensors import safe_open
from torch import Tensor

from grpoctl.engines.tensor_file import write_tensors
from grpoctl.errors import InputRefused
from grpoctl.processes.ranks import Ranks

STATE_FILE: Final = "optimizer.safetensors"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def write_state(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    steps: Mapping[str, int],
    moment: Callable[[str, str], Tensor],
    *,
    ranks: Ranks,
) -> None:
    """Write the state; every rank calls it, the first one writes.

    Args:
        folder: where the first rank writes
        shapes: of every parameter that has state, by name
        steps: taken so far, by name
        moment: returns a parameter's whole moment from its name and the moment's; a collective on several ranks
        ranks: all processes
    """
    named = {f"{kind}.{name}": shape for kind in MOMENTS for name, shape in shapes.items()}

    def fetched() -> Iterator[tuple[str, Tensor]]:
        for key in sorted(named):
            kind, _, name = key.partition(".")
            yield key, moment(name, kind)

    if not ranks.is_first:
        for _ in fetched():
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"steps": json.dumps(dict(steps), sort_keys=True)}
    write_tensors(folder / STATE_FILE, named, fetched(), metadata=metadata)


def read_state(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], put: Callable[[str, int, Mapping[str, Tensor]], None]
) -> None:
    """Hand each parameter's steps and moments to `put(name, steps, {moment: whole tensor})`, one parameter at a time.

    Raises:
        InputRefused: the state belongs to a model with other parameters.
    """
    path = folder / STATE_FILE
    with cast("Any", safe_open(str(path), framework="pt")) as file:
        steps: dict[str, int] = json.loads(file.metadata()["steps"])
        if not set(steps) <= set(shapes):
            foreign = sorted(set(steps) - set(shapes))[0]
            raise InputRefused(f"{path}: optimizer state for {foreign}, which this model lacks; name the right update")
        for name, count in steps.items():
            moments: dict[str, Tensor] = {kind: file.get_tensor(f"{kind}.{name}") for kind in MOMENTS}
            if tuple(moments["exp_avg"].shape) != tuple(shapes[name]):
                raise InputRefused(
                    f"{path}: {name} has shape {tuple(moments['exp_avg'].shape)}, the model has {tuple(shapes[name])}"
                )
            put(name, count, moments)
