"""A value-head reward model: a language model's last hidden states and one linear map to a number, hidden → 1.

A row's reward is read at its last valid token, whose place comes from the row's length, never from a pad id; rows are
padded on the right, so nothing that follows that token can reach it.

N rows, T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  paths of unknown type
from torch import Tensor

from grpoctl.engines.base import FloatVector, TokenIds, Unit, micro_batches_by_tokens, padded_width
from grpoctl.engines.torch.model import pick_device
from grpoctl.errors import InputRefused
from grpoctl.extras import require
from grpoctl.inputs.reward_models import HEAD_FILE

HEAD_TENSOR: Final = "value_head.weight"
HEAD_OF_TRANSFORMERS: Final = "score.weight"
NOT_OF_THE_HEAD: Final = frozenset({"lm_head.weight"})
"""What a published reward model may hold besides: the output embedding of the language model that it was."""
POOLING_TOLERANCE: Final = 2e-3
"""Largest relative difference to transformers' own score of the probe; float32 noise is near 1e-6."""
ONE_FILE: Final = "1000000GB"


@dataclass(slots=True, kw_only=True)
class RewardModel:
    """A backbone with float32 weights and its head.

    Args:
        backbone: transformers' model without an output embedding
        head: (1, H) float32
        device: where both are
        context_tokens: longest row; a padded row is cut there
        autocast: bfloat16 to run the backbone in it, None for float32
    """

    backbone: Any
    head: Tensor
    device: torch.device
    context_tokens: int
    autocast: torch.dtype | None = None

    def features(self, rows: Sequence[TokenIds], *, budget: int) -> Tensor:
        """Return (N, H) float32 hidden states of each row's last token.

        Only rows of one padded width, which a row's own length decides, run together: neighbours never change a result.

        Args:
            rows: (N) at least one id each
            budget: tokens of one forward, padding included
        """
        units = [Unit(prompt_ids=ids, completions=(), rows=(i,)) for i, ids in enumerate(rows)]
        places: list[int] = []
        parts: list[Tensor] = []
        for batch in micro_batches_by_tokens(units, budget):
            places += [unit.rows[0] for unit in batch]
            parts.append(self._last_hidden([unit.prompt_ids for unit in batch]))
        back = torch.empty(len(places), dtype=torch.int64)
        back[torch.tensor(places, dtype=torch.int64)] = torch.arange(len(places))
        return torch.cat(parts)[back.to(self.device)]

    def _last_hidden(self, rows: Sequence[TokenIds]) -> Tensor:
        width = min(padded_width(max(len(ids) for ids in rows)), self.context_tokens)
        input_ids = np.zeros((len(rows), width), dtype=np.int64)
        for row, ids in enumerate(rows):
            input_ids[row, : len(ids)] = ids
        last = torch.tensor([len(ids) - 1 for ids in rows], device=self.device)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            tensor = cast("Any", torch).from_numpy(input_ids).to(self.device)
            output = self.backbone(input_ids=tensor, use_cache=False)
        return output.last_hidden_state[torch.arange(len(rows), device=self.device), last].float()

    def rewards(self, features: Tensor) -> Tensor:
        """Return (N,) rewards of (N, H) features; a sum by row, because a matrix product's last bit depends on N."""
        return (features * self.head).sum(dim=-1)

    @torch.no_grad()
    def score(self, rows: Sequence[TokenIds], *, budget: int) -> FloatVector:
        """Return (N,) rewards of rows of ids, float32."""
        if not rows:
            return np.zeros(0, dtype=np.float32)
        return self.rewards(self.features(rows, budget=budget)).cpu().numpy()


def new_reward_model(folder: Path, *, ref: str, device: str, dtype: str, seed: int, context_tokens: int) -> RewardModel:
    """Put a fresh head on a language model.

    The head is drawn from N(0, 1/(H + 1)). Source: Stiennon et al. 2020 (arXiv 2009.01325), appendix B.1.

    Raises:
        InputRefused: the language model can't be loaded in full.
    """
    from transformers import AutoModelForCausalLM

    module, info = _loaded(AutoModelForCausalLM, folder, ref)
    _check_complete(info, ref)
    place = pick_device(device)
    backbone = module.base_model.to(place).eval()
    size = int(backbone.config.get_text_config().hidden_size)
    head = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(size + 1)
    return RewardModel(
        backbone=backbone,
        head=head.to(place),
        device=place,
        context_tokens=context_tokens,
        autocast=torch.bfloat16 if dtype == "bfloat16" else None,
    )


def load_reward_model(folder: Path, *, ref: str, device: str, dtype: str, context_tokens: int) -> RewardModel:
    """Load a folder that `save_reward_model` wrote, or a published AutoModelForSequenceClassification one.

    Raises:
        InputRefused: weights of head or backbone are missing, left over or of another shape: nothing is ever left random.
    """
    backbone, head = _ours(folder, ref) if (folder / HEAD_FILE).is_file() else _published(folder, ref)
    place = pick_device(device)
    return RewardModel(
        backbone=backbone.to(place).eval(),
        head=head.float().to(place),
        device=place,
        context_tokens=context_tokens,
        autocast=torch.bfloat16 if dtype == "bfloat16" else None,
    )


def save_reward_model(model: RewardModel, folder: Path) -> None:
    """Write backbone and head as float32 safetensors; config and tokenizer are the caller's to carry."""
    folder.mkdir(parents=True, exist_ok=True)
    model.backbone.save_pretrained(folder, safe_serialization=True, max_shard_size=ONE_FILE)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    save_file({HEAD_TENSOR: model.head.detach().cpu().contiguous()}, str(folder / HEAD_FILE))
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors leaves 0600, which another user's job can't read


def _loaded(auto: Any, folder: Path, ref: str) -> tuple[Any, Mapping[str, Any]]:
    require("transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of missing and left-over weights; ours is an error
    try:
        return auto.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputRefused(f"{ref}: transformers can't load it ({str(error).splitlines()[0]})") from error
    finally:
        transformers_logging.set_verbosity(level)


def _check_complete(info: Mapping[str, Any], ref: str, *, may_hold: frozenset[str] = frozenset()) -> None:
    """Refuse weights that transformers would have left random, or would have dropped."""
    missing = sorted(map(str, info["missing_keys"]))
    if HEAD_OF_TRANSFORMERS in missing:
        raise InputRefused(
            f"{ref}: no value head: {HEAD_OF_TRANSFORMERS} isn't among its weights and would be random; expected a "
            "reward model with its head"
        )
    if missing:
        raise InputRefused(
            f"{ref}: {len(missing)} weights are missing and would be random ({missing[0]}); copy the whole folder"
        )
    left_over = sorted(set(map(str, info["unexpected_keys"])) - may_hold)
    if left_over:
        raise InputRefused(
            f"{ref}: {len(left_over)} weights have no place in its architecture ({left_over[0]}), so it would score "
            f"without them; expected one head, {HEAD_TENSOR} in {HEAD_FILE} or {HEAD_OF_TRANSFORMERS}"
        )
    if info["mismatched_keys"]:
        raise InputRefused(f"{ref}: weights of another shape than its config says ({info['mismatched_keys']})")


def _ours(folder: Path, ref: str) -> tuple[Any, Tensor]:
    from transformers import AutoModel

    backbone, info = _loaded(AutoModel, folder, ref)
    _check_complete(info, ref)
    tensors = load_file(str(folder / HEAD_FILE))
    if set(tensors) != {HEAD_TENSOR}:
        raise InputRefused(
            f"{ref}: {HEAD_FILE} holds {sorted(tensors)}, expected {HEAD_TENSOR} alone; the head was edited or cut off"
        )
    size = int(backbone.config.get_text_config().hidden_size)
    _check_shape(tensors[HEAD_TENSOR], size, f"{ref}: {HEAD_TENSOR}")
    return backbone, tensors[HEAD_TENSOR]


def _published(folder: Path, ref: str) -> tuple[Any, Tensor]:
    from transformers import AutoModelForSequenceClassification

    module, info = _loaded(AutoModelForSequenceClassification, folder, ref)
    if module.config.num_labels != 1:
        raise InputRefused(f"{ref}: num_labels is {module.config.num_labels}, a reward model has 1; it is a classifier")
    _check_complete(info, ref, may_hold=NOT_OF_THE_HEAD)
    head = getattr(module, "score", None)
    if not isinstance(head, torch.nn.Linear) or "bias" in dict(head.named_parameters()):
        raise InputRefused(
            f"{ref}: {type(module).__name__} has no plain linear head on the last token ({HEAD_OF_TRANSFORMERS}, no bias); "
            "only decoder models with one are supported"
        )
    _check_shape(head.weight, int(module.config.get_text_config().hidden_size), f"{ref}: {HEAD_OF_TRANSFORMERS}")
    module.eval()
    _check_pooling(module, ref)
    return module.base_model, head.weight.detach()


def _check_shape(head: Tensor, size: int, where: str) -> None:
    if tuple(head.shape) != (1, size):
        raise InputRefused(f"{where}: shape {tuple(head.shape)}, expected (1, {size})")


@torch.no_grad()
def _check_pooling(module: Any, ref: str) -> None:
    """Refuse architectures that compute more than head times last hidden state."""
    text = module.config.get_text_config()
    ids = [i for i in range(1, min(32, int(text.vocab_size))) if i != text.pad_token_id][:12]
    row = torch.tensor([ids])
    theirs = float(module(input_ids=row, use_cache=False).logits[0, 0])
    hidden = module.base_model(input_ids=row, use_cache=False).last_hidden_state[0, -1]
    ours = float((hidden.float() * module.score.weight).sum())
    if not abs(ours - theirs) <= POOLING_TOLERANCE * max(1.0, abs(theirs)):
        raise InputRefused(
            f"{ref}: its architecture scores a probe {theirs:.4g}, head times last hidden state is {ours:.4g}; "
            "models that compute more than that aren't supported"
        )
