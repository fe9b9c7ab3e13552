"""Text to token ids and back, through the policy's own tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from grpoctl.engines.base import TokenIds
from grpoctl.errors import InputRefused
from grpoctl.extras import require

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A policy's tokenizer and what the model's config says about it.

    Args:
        eos_ids: ids that end a completion, of generation_config, config or tokenizer
        pad_id: id for padding; never used to find lengths
        context_tokens: longest sequence of the model
        vocab_size: rows of the embedding
    """

    inner: Any
    folder: Path
    eos_ids: tuple[int, ...]
    pad_id: int
    context_tokens: int
    vocab_size: int

    def encode_text(self, text: str) -> TokenIds:
        """Return the ids of a plain text prompt, with the tokenizer's own special tokens."""
        return np.asarray(self.inner(text)["input_ids"], dtype=np.int32)

    def encode_messages(self, messages: Messages) -> TokenIds:
        """Return the ids of a templated conversation that asks for the assistant's turn.

        Raises:
            InputRefused: no chat template, or the template refuses the messages.
        """
        return self._templated(messages, ask=True)

    def encode_conversation(self, messages: Messages) -> TokenIds:
        """Return the ids of a templated conversation that ends with its last turn.

        Raises:
            InputRefused: no chat template, or the template refuses the messages.
        """
        return self._templated(messages, ask=False)

    def _templated(self, messages: Messages, *, ask: bool) -> TokenIds:
        if not self.inner.chat_template:
            raise InputRefused(
                f"{self.folder}: the tokenizer has no chat template, but prompts are messages; "
                "add chat_template.jinja to the policy or give prompts as text"
            )
        from jinja2 import TemplateError

        try:
            text = self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except TemplateError as error:
            raise InputRefused(
                f"{self.folder}: the chat template refuses {json.dumps(messages)[:120]}: {error}"
            ) from error
        return np.asarray(self.inner(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text of ids without special tokens."""
        return self.inner.decode(list(map(int, ids)), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_whole(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens, as a template wrote it."""
        return self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_many(self, rows: Sequence[TokenIds]) -> list[str]:
        """Return the texts of many rows of ids."""
        return self.inner.batch_decode(
            [ids.tolist() for ids in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @property
    def bos_id(self) -> int | None:
        """Id of the begin token, or None."""
        return self.inner.bos_token_id


@lru_cache(maxsize=8)
def load_tokenizer(folder: Path, ref: str) -> Tokenizer:
    """Load the tokenizer of a policy folder.

    Raises:
        InputRefused: it can't be loaded, or there is no EOS id anywhere.
        UsageError: transformers isn't installed.
    """
    require("transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        inner = cast("Any", AutoTokenizer).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputRefused(f"{ref}: its tokenizer can't be loaded ({str(error).splitlines()[0]})") from error
    config = _json(folder / "config.json")
    text_config = config.get("text_config") or config
    eos = _eos_ids(folder, config, inner)
    if not eos:
        raise InputRefused(
            f"{ref}: no end-of-sequence token in generation_config.json (eos_token_id), config.json or the tokenizer; "
            "set eos_token_id, or every completion would run to max_new_tokens"
        )
    pad = inner.pad_token_id if inner.pad_token_id is not None else eos[0]
    context = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    if not context or "vocab_size" not in text_config:
        raise InputRefused(f"{ref}: config.json lacks max_position_embeddings or vocab_size")
    if min(eos) >= int(text_config["vocab_size"]):
        raise InputRefused(
            f"{ref}: end-of-sequence token {min(eos)} is outside the model's {text_config['vocab_size']} embeddings; "
            "correct eos_token_id, or every completion would run to max_new_tokens"
        )
    return Tokenizer(
        inner=inner,
        folder=folder,
        eos_ids=eos,
        pad_id=pad,
        context_tokens=int(context),
        vocab_size=int(text_config["vocab_size"]),
    )


def _eos_ids(folder: Path, config: dict[str, Any], inner: Any) -> tuple[int, ...]:
    generation = _json(folder / "generation_config.json")
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), inner.eos_token_id):
        for token in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return tuple(found)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}
