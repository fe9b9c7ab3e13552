"""A user's preference file as pairs: which of two answers to one prompt is the better one.

An answer is a text or a message list; with its prompt it becomes the whole text or conversation that a reward model reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from grpoctl.artifacts.canonical import sha256_json
from grpoctl.errors import InputRefused
from grpoctl.inputs.json_columns import column_values
from grpoctl.inputs.prompts import Messages, json_messages
from grpoctl.inputs.rows import read_rows
from grpoctl.settings.fields import RewardModelConfig

Text = str | Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two whole texts or conversations that differ in their answer.

    Args:
        row: number in the file
        prompt_key: digest of what both answer; equal for pairs of one prompt
    """

    row: int
    chosen: Text
    rejected: Text
    prompt_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSet:
    """All usable pairs of a file.

    Args:
        digest: of the files' bytes
        format: `text` or `messages`
        notes: what was noticed, for stderr
    """

    digest: str
    pairs: list[Pair]
    format: str
    notes: tuple[str, ...]


def load_preferences(path: str, config: RewardModelConfig) -> PreferenceSet:
    """Read the preference files that a path names.

    Raises:
        InputRefused: no rows, a missing column, null or malformed cells, a conversation that ends with no answer, or no
            pair whose answers differ.
    """
    table, digest = read_rows(path)
    chosen = _cells(table, config, "chosen_column", path)
    rejected = _cells(table, config, "rejected_column", path)
    named = config.prompt_column != RewardModelConfig().prompt_column
    has_prompt = named or config.prompt_column in table.column_names
    prompts = _cells(table, config, "prompt_column", path) if has_prompt else [None] * table.num_rows
    pairs: list[Pair] = []
    for row, (prompt, better, worse) in enumerate(zip(prompts, chosen, rejected, strict=True)):
        where = f"{path}: row {row}"
        whole = _whole(prompt, better, f"{where}: {config.chosen_column}")
        other = _whole(prompt, worse, f"{where}: {config.rejected_column}")
        if isinstance(whole, str) != isinstance(other, str):
            raise InputRefused(f"{where}: one answer is text, the other a message list; expected both of one kind")
        pairs.append(Pair(row=row, chosen=whole, rejected=other, prompt_key=_key(prompt, whole)))
    return _checked(path, digest, pairs)


def _cells(table: pa.Table, config: RewardModelConfig, setting: str, path: str) -> list[Text]:
    name = str(getattr(config, setting))
    if name not in table.column_names:
        raise InputRefused(
            f"{path}: no column {name!r}, found {', '.join(table.column_names)}; "
            f"name it with --set reward_model.{setting}=…"
        )
    values = column_values(table, name)
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise InputRefused(f"{path}: {name} is null in {len(missing)} rows: {missing[:5]}; remove or fill them")
    return [_text(value, f"{path}: row {row}: {name}") for row, value in enumerate(values)]


def _text(value: Any, where: str) -> Text:
    """Return a cell as text or as a checked message list."""
    if isinstance(value, str):
        value = json_messages(value) or value
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(cast("Any", value)).__name__
        raise InputRefused(f"{where}: found {found}, expected text or a message list")
    turns: Messages = []
    for number, turn in enumerate(cast("list[Any]", value)):
        fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise InputRefused(f"{where}[{number}]: found {turn!r:.80}, expected a message with role and content")
        turns.append({key: item for key, item in fields.items() if item is not None})
    return turns


def _whole(prompt: Text | None, answer: Text, where: str) -> Text:
    """Return the text or conversation that holds the prompt and ends with the answer."""
    if isinstance(answer, str):
        if prompt is None or isinstance(prompt, str):
            return (prompt or "") + answer
        return [*prompt, {"role": "assistant", "content": answer}]
    if answer[-1]["role"] != "assistant":
        raise InputRefused(f"{where}: the last turn is the {answer[-1]['role']}'s, expected the assistant's answer")
    if answer[0]["role"] != "assistant":
        return answer
    if prompt is None:
        raise InputRefused(f"{where}: begins with the assistant's turn and there is no prompt column; add the prompt")
    turns: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*turns, *answer]


def _key(prompt: Text | None, whole: Text) -> str:
    """Return what names the prompt; a whole text without a prompt column is its own."""
    if not isinstance(whole, str):
        return sha256_json([whole[:-1]])
    return sha256_json(prompt if prompt is not None else whole)


def _checked(path: str, digest: str, pairs: Sequence[Pair]) -> PreferenceSet:
    kinds = {isinstance(pair.chosen, str): pair.row for pair in reversed(pairs)}
    if len(kinds) > 1:
        raise InputRefused(f"{path}: row {kinds[True]} is text, row {kinds[False]} messages; expected one kind")
    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    same = len(pairs) - len(different)
    if not different:
        raise InputRefused(f"{path}: chosen equals rejected in all {same} rows; there is nothing to learn from")
    notes = (f"chosen equals rejected in {same} of {len(pairs)} rows; left out",) if same else ()
    return PreferenceSet(digest=digest, pairs=different, format="text" if True in kinds else "messages", notes=notes)
