"""What a reward reads from the rows: compared with the columns before the first call, and with every row's nulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpoctl.errors import InputRefused, UsageError
from grpoctl.extras import did_you_mean
from grpoctl.rewards.columns import GROUND_TRUTH_PATHS, LABEL_PATHS, first_value, provides
from grpoctl.rewards.resolve.signature import (
    ROW_NAMES,
    TRL_NAMES,
    VERL_BATCH_NAMES,
    VERL_NAMES,
    VERL_SOLUTION_NAMES,
    Parameter,
    named,
)
from grpoctl.rewards.resolve.target import Target
from grpoctl.rewards.sample import RewardSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReference:
    """One reward, found and understood, not yet called."""

    name: str
    """Its column in `rewards.<name>`."""
    ref: str
    """As the user wrote it."""
    kind: str
    """builtin, module, file, entry_point or http."""
    signature: str
    """row, trl, verl, verl_batch, openrlhf or http; see `signature.py`."""
    kwargs: dict[str, Any]
    """Bound by the user; a built-in's have its defaults filled in."""
    source_digest: str
    """sha256 of the file that defines the function; of the URL for an endpoint."""
    target: Target
    """Where a child finds the function."""
    parameters: tuple[Parameter, ...] = ()
    """The function's parameters."""
    allow_null: bool = False
    """The user said that nulls in the columns it reads are the function's own business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """A value that a reward cannot be called without."""

    what: str
    paths: tuple[str, ...]
    """Columns or dotted paths, any of which provides it."""
    nullable: bool


def check_columns(reference: RewardReference, columns: Sequence[str]) -> None:
    """Compare what a reward needs with the columns of the prompts.

    Args:
        reference: the reward.
        columns: names of the source columns; dotted paths of struct fields may be among them.

    Raises:
        InputRefused: a needed value is in no column.
    """
    for need in _needs(reference):
        if any(provides(columns, path) for path in need.paths):
            continue
        wanted = " or ".join(need.paths)
        raise InputRefused(
            f"reward {reference.name} ({reference.ref}): {need.what} needs a column {wanted}; the columns are "
            f"{', '.join(columns) or 'none'}{did_you_mean(need.paths[0], columns)}; {_remedy(reference)}"
        )


def refuse_unscorable_inputs(reference: RewardReference, samples: Sequence[RewardSample]) -> None:
    """Look for nulls where the reward needs a value.

    Raises:
        InputRefused: a row has one; names the first.
    """
    needs = [need for need in _needs(reference) if not need.nullable and not reference.allow_null]
    for sample in samples:
        for need in needs:
            if first_value(sample.source, need.paths) is None:
                raise InputRefused(
                    f"reward {reference.name} ({reference.ref}): {' or '.join(need.paths)} is null in row "
                    f"{sample.sample_id}; expected a value in every row. Fill or drop such rows, or say "
                    "`allow_null: true` if the reward handles None"
                )
        if reference.signature == "openrlhf" and not isinstance(sample.prompt, str) and sample.prompt_text is None:
            raise InputRefused(
                f"reward {reference.name} ({reference.ref}): the prompt of row {sample.sample_id} is a list of messages; "
                "an openrlhf function gets prompt and completion as one text. Use text prompts or another signature"
            )


def check_callable(ref: str, signature: str, parameters: Sequence[Parameter], kwargs: Mapping[str, Any]) -> None:
    """Check that a signature's home passes all that the function requires.

    Raises:
        UsageError: a required parameter would be left over.
    """
    if signature == "openrlhf":
        num_positional = sum(p.kind in {"positional", "any"} and p.name not in kwargs for p in parameters)
        if num_positional < 3 and not any(p.kind == "args" for p in parameters):
            raise UsageError(
                f"reward {ref}: called as openrlhf it gets (queries, prompts, labels); it takes {num_positional}"
            )
    known = {"verl": VERL_NAMES, "verl_batch": VERL_BATCH_NAMES}.get(signature)
    if known is None:
        return
    left = [p.name for p in named(parameters) if p.required and p.name not in known and p.name not in kwargs]
    if left:
        shown = ", ".join(name for name in known if name not in VERL_SOLUTION_NAMES[1:])
        raise UsageError(
            f"reward {ref}: called as {signature} it gets {shown}; nothing provides {left[0]!r}; bind it with kwargs"
        )


def _needs(reference: RewardReference) -> list[_Need]:
    if reference.kind == "builtin":
        column = reference.kwargs.get("column")
        return [] if column is None else [_Need(what="option `column`", paths=(column,), nullable=False)]
    bound = {} if reference.target.factory else reference.kwargs
    required = [p for p in named(reference.parameters) if p.required and p.name not in bound]
    if reference.signature == "openrlhf":
        return [
            _Need(what="parameter `labels`", paths=LABEL_PATHS, nullable=required[2:] == [] or required[2].takes_null())
        ]
    if reference.signature in {"verl", "verl_batch"}:
        paths = {"ground_truth": GROUND_TRUTH_PATHS, "data_source": ("data_source",)}
        return [_need(p, paths[p.name.removesuffix("s")]) for p in required if p.name.removesuffix("s") in paths]
    names = TRL_NAMES if reference.signature == "trl" else ROW_NAMES
    return [_need(p, (p.name,)) for p in required if p.name not in names and "RewardSample" not in p.annotation]


def _need(parameter: Parameter, paths: tuple[str, ...]) -> _Need:
    return _Need(what=f"parameter `{parameter.name}`", paths=paths, nullable=parameter.takes_null())


def _remedy(reference: RewardReference) -> str:
    if reference.kind == "builtin":
        return "name the right one with the option `column`"
    if reference.signature in {"verl", "verl_batch", "openrlhf"}:
        return "add or rename the column, or give the parameter a default"
    return "rename the parameter or the column, give the parameter a default, or bind it with kwargs"
