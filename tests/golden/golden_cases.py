"""Recorded cases of verl and TRL: reading them, comparing with them, and naming what became of each.

Knows the encoding of the files and what "equal" means, nothing of any formula.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("GRPOCTL_GOLDEN") or Path(__file__).parent)

RTOL = {"float64": 1e-12, "float32": 1e-6}
"""Relative to each element, or to the terms it was summed from where the caller passes their magnitude as `scale`."""

WORDS = {"nan": np.nan, "none": np.nan, "inf": np.inf, "-inf": -np.inf, None: np.nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: it matched, it differs on purpose (for `reason`), or its method isn't here."""

    kind: Literal["matched", "differs", "absent"]
    reason: str = ""


MATCHED = Outcome(kind="matched")


def differs(reason: str) -> Outcome:
    return Outcome(kind="differs", reason=reason)


def absent(method: str) -> Outcome:
    return Outcome(kind="absent", reason=method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recorded call of a peer."""

    name: str
    family: str
    package: str
    function: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]

    @property
    def rtol(self) -> float:
        return RTOL[self.params["dtype"]]

    @property
    def error(self) -> str | None:
        return self.outputs.get("error")

    def tensor(self, key: str) -> Tensor:
        """Return an input in the case's own precision."""
        return torch.tensor(numbers(self.inputs[key]), dtype=getattr(torch, self.params["dtype"]))

    def mask(self, key: str) -> Tensor:
        return torch.tensor(numbers(self.inputs[key])) > 0

    def output(self, key: str) -> npt.NDArray[np.float64]:
        return numbers(self.outputs[key])


def numbers(value: Any) -> npt.NDArray[np.float64]:
    """Decode nested lists of numbers and of the words for numbers that JSON lacks."""
    if isinstance(value, list):
        return np.array([numbers(item) for item in value], dtype=np.float64)
    return np.float64(WORDS[value] if value is None or isinstance(value, str) else value)  # type: ignore[return-value]


def load_cases() -> list[Case]:
    """Return every case of every file in the folder, whatever the files are called."""
    cases: list[Case] = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        cases += [
            Case(
                name=case["name"],
                family=content["family"],
                package=case["source"]["package"],
                function=case["source"]["function"].rsplit(".", 1)[-1],
                params=case["params"],
                inputs=case["inputs"],
                outputs=case["outputs"],
            )
            for case in content["cases"]
        ]
    return cases


def gap(ours: Any, peer: Any, *, rtol: float, scale: Any = 0.0) -> str:
    """Return "" where ours agrees with the peer, otherwise the worst element in words.

    Agreement of an element: both NaN, the same infinity, or |ours − peer| ≤ rtol · max(|peer|, scale). `scale` is the
    magnitude of the terms that the element was summed from: after cancellation an error relative to the small result
    says nothing about the formula.
    """
    left, right = _as_array(ours), _as_array(peer)
    if left.shape != right.shape:
        return f"shape {left.shape} against {right.shape}"
    with np.errstate(invalid="ignore"):
        allowed = rtol * np.fmax(np.abs(right), _as_array(scale))
        close = np.abs(left - right) <= allowed
    agrees = close | (left == right) | (np.isnan(left) & np.isnan(right))
    if agrees.all():
        return ""
    with np.errstate(invalid="ignore"):
        excess = np.where(agrees, -np.inf, np.nan_to_num(np.abs(left - right), nan=np.inf))
    worst = np.unravel_index(int(np.argmax(excess)), left.shape)
    return f"at {tuple(map(int, worst))}: {left[worst]!r} against {right[worst]!r}"


def first_gap(*gaps: str) -> str:
    return next((text for text in gaps if text), "")


def _as_array(value: Any) -> npt.NDArray[np.float64]:
    if isinstance(value, Tensor):
        value = value.detach().double().numpy()
    return np.asarray(value, dtype=np.float64)


def members_by_group(labels: Sequence[Any]) -> list[list[int]]:
    """Return each group's rows, in the order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        groups.setdefault(label, []).append(row)
    return list(groups.values())
