"""Reward models: a REF becomes a local folder with a value head, known by digest, and the rule for what it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from grpoctl import __version__
from grpoctl.artifacts.manifest import Record
from grpoctl.errors import InputRefused
from grpoctl.inputs.policies import open_policy

REWARD_MODEL_RECORD: Final = "grpoctl_reward_model.json"
HEAD_FILE: Final = "value_head.safetensors"
CLASSIFIER: Final = "ForSequenceClassification"
TEXT_RULES: Final = {
    "messages": "the reward model's chat template over the prompt's turns and the completion as the assistant's",
    "user_turn": "the reward model's chat template over the prompt as the user's turn and the completion as the assistant's",
    "text": "prompt and completion joined, as plain text",
}
"""What a reward model reads, by name; manifests carry the sentence."""


class RewardModelRecord(Record):
    """`grpoctl_reward_model.json`: written last; without it a folder with a value head isn't a reward model."""

    kind: Literal["value_head"] = "value_head"
    """A linear map, hidden → 1, on the last valid token's hidden state."""
    base_weights_digest: str
    """Weights digest of the language model it was made from."""
    weights_digest: str
    """Digest over every tensor of backbone and head: name, dtype, shape and bytes."""
    tokenizer_digest: str
    """Digest over the tokenizer's files and the chat template, carried from the base."""
    template: Literal["messages", "text"]
    """Whether it was trained on conversations under the chat template or on plain text."""
    held_out_accuracy: float | None
    """Share of held-out pairs whose chosen answer has the higher reward; null where none were held out."""
    num_pairs: int
    """Pairs trained on."""
    num_held_out: int
    """Pairs kept for the accuracy."""
    fingerprint: str
    """sha256 of the canonical JSON of `definition`."""
    definition: dict[str, Any]
    """Everything that defines the result: settings, seed, digests of the pairs and of the base."""
    stats: dict[str, Any]
    """Losses and seconds of the training."""
    grpoctl_version: str = __version__
    """Version that wrote it."""
    environment: dict[str, str]
    """Versions of the packages that computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFolder:
    """A reward model on this machine's disk.

    Args:
        kind: `value_head` for our own, `sequence_classification` for a published one
        template: `messages` or `text` where its record says what it was trained on, None for a published one
    """

    ref: str
    folder: Path
    kind: str
    weights_digest: str
    tokenizer_digest: str
    template: str | None

    def text_rule(self, prompt_format: str) -> str:
        """Return which of TEXT_RULES applies to rollouts whose prompts are `text` or `messages`.

        What it was trained on decides; a published model gets its chat template where it has one.

        Raises:
            InputRefused: conversations, but a reward model of plain text.
        """
        template = self.template or ("messages" if has_chat_template(self.folder) else "text")
        if template == "messages":
            return "messages" if prompt_format == "messages" else "user_turn"
        if prompt_format == "messages":
            reason = "was trained on plain text" if self.template else "has no chat template"
            raise InputRefused(f"{self.ref}: {reason}, but these prompts are messages; train one on conversations")
        return "text"


def open_reward_model(ref: str) -> RewardModelFolder:
    """Resolve a REF, bring it to the local disk and check its digests.

    Raises:
        InputRefused: not a model folder, an unfinished one, or content that differs from its own record.
        TryAgain: a download broke off.
    """
    found = open_policy(ref)
    record = read_record(found.folder, ref)
    if record is None and (found.folder / HEAD_FILE).is_file():
        raise InputRefused(
            f"{ref}: has a value head but no {REWARD_MODEL_RECORD}, which is written last; rerun its training or copy "
            "the whole folder"
        )
    if record is not None:
        if not (found.folder / HEAD_FILE).is_file():
            raise InputRefused(f"{ref}: {HEAD_FILE} is missing and the head would be random; copy the whole folder")
        if (record.weights_digest, record.tokenizer_digest) != (found.weights_digest, found.tokenizer_digest):
            what = "weights" if record.weights_digest != found.weights_digest else "tokenizer"
            raise InputRefused(f"{ref}: {what} differ from the digest in {REWARD_MODEL_RECORD}; damaged or edited")
    elif not any(name.endswith(CLASSIFIER) for name in _architectures(found.folder)):
        raise InputRefused(
            f"{ref}: no value head: no {HEAD_FILE}, and its architecture is "
            f"{', '.join(_architectures(found.folder)) or 'not named'}, not …{CLASSIFIER}; train one with "
            "`grpoctl reward-model train --base …`"
        )
    return RewardModelFolder(
        ref=ref,
        folder=found.folder,
        kind=record.kind if record else "sequence_classification",
        weights_digest=found.weights_digest,
        tokenizer_digest=found.tokenizer_digest,
        template=record.template if record else None,
    )


def is_reward_model(folder: Path) -> bool:
    """Return whether a model folder has a head for rewards already."""
    classifies = any(name.endswith(CLASSIFIER) for name in _architectures(folder))
    return classifies or (folder / HEAD_FILE).is_file() or (folder / REWARD_MODEL_RECORD).is_file()


def _architectures(folder: Path) -> list[str]:
    return [str(name) for name in json.loads((folder / "config.json").read_bytes()).get("architectures") or ()]


def has_chat_template(folder: Path) -> bool:
    """Return whether a model folder's tokenizer has a chat template, without loading it."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_bytes()).get("chat_template"))


def read_record(folder: Path, ref: str) -> RewardModelRecord | None:
    """Return a folder's record, or None where there is none."""
    path = folder / REWARD_MODEL_RECORD
    return parsed_record(path.read_bytes(), ref) if path.is_file() else None


def parsed_record(data: bytes, ref: str) -> RewardModelRecord:
    """Return a record from its bytes.

    Raises:
        InputRefused: they aren't one.
    """
    try:
        return RewardModelRecord.model_validate_json(data)
    except ValidationError as error:
        raise InputRefused(f"{ref}: {REWARD_MODEL_RECORD} is damaged ({error.errors()[0]['msg']})") from error
