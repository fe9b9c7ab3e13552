"""The prompts of one iteration: which rows of the prompt set, in which order, and as which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpoctl.algorithms.seeds import identity_order
from grpoctl.engines.base import TokenIds
from grpoctl.engines.tokenizer import Tokenizer
from grpoctl.errors import InputRefused, UsageError
from grpoctl.inputs.prompts import PromptSet
from grpoctl.settings.jobs import RolloutJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """A prompt of this iteration, ready to sample: `row` is its position in the prompt set."""

    row: int
    prompt_id: str
    ids: TokenIds
    max_new_tokens: int


def choose_rows(prompts: PromptSet, job: RolloutJob) -> list[int]:
    """Return the rows of this iteration: all in file order, or its part of an endless series of shuffled epochs."""
    total = len(prompts.ids)
    wanted = job.rollout.prompts_per_iteration
    if wanted is None:
        return list(range(total))
    if wanted > total:
        raise UsageError(
            f"rollout.prompts_per_iteration: {wanted} prompts wanted, {job.prompts.path} has {total}; lower it"
        )
    first = job.iteration * wanted
    orders: dict[int, list[int]] = {}
    rows: list[int] = []
    for position in range(first, first + wanted):
        epoch, offset = divmod(position, total)
        if epoch not in orders:
            orders[epoch] = identity_order(prompts.ids, "prompts", prompts.digest, job.seed, epoch)
        rows.append(orders[epoch][offset])
    if len(set(rows)) < len(rows):  # an epoch's end and the next one's start may share a prompt: keep its first place
        seen = dict.fromkeys(rows)
        spare = (row for row in orders[max(orders)] if row not in seen)
        rows = [*seen, *(next(spare) for _ in range(len(rows) - len(seen)))]
    return rows


def plan_prompts(
    prompts: PromptSet, chosen: Sequence[int], job: RolloutJob, tokenizer: Tokenizer
) -> tuple[list[PlannedPrompt], int]:
    """Tokenise the chosen prompts and settle every length question before anything is sampled.

    Returns:
        The prompts in order, and how many were skipped as overlong.

    Raises:
        InputRefused: prompts without room in the context, a double BOS, or ids outside the vocabulary.
    """
    encode = tokenizer.encode_messages if prompts.format == "messages" else tokenizer.encode_text
    encoded = {row: encode(prompts.prompts[row]) for row in chosen}  # type: ignore[arg-type]
    _check_ids(encoded, prompts, tokenizer)
    context, limit = tokenizer.context_tokens, job.rollout.max_new_tokens
    overlong = [row for row in chosen if len(encoded[row]) > context - 1]
    if overlong and job.prompts.overlong == "error":
        names = [prompts.ids[row] for row in overlong[:5]]
        raise InputRefused(
            f"{job.prompts.path}: {len(overlong)} prompts are longer than {context - 1} tokens (context {context} less one)"
            f": {names}; shorten them or set prompts.overlong to skip or truncate_left"
        )
    plan: list[PlannedPrompt] = []
    tight: list[str] = []
    for row in chosen:
        ids = encoded[row]
        if len(ids) > context - 1:
            if job.prompts.overlong == "skip":
                continue
            ids = ids[-max(1, context - limit) :]
        room = context - len(ids)
        if room < limit:
            tight.append(prompts.ids[row])
        plan.append(PlannedPrompt(row=row, prompt_id=prompts.ids[row], ids=ids, max_new_tokens=min(limit, room)))
    if tight and not job.prompts.cap_to_context:
        raise InputRefused(
            f"{job.prompts.path}: prompt + max_new_tokens ({limit}) exceeds the context of {context} for {len(tight)} "
            f"prompts: {tight[:5]}; lower rollout.max_new_tokens or set prompts.cap_to_context"
        )
    if not plan:
        raise InputRefused(f"{job.prompts.path}: no prompt is left after skipping overlong ones")
    return plan, len(chosen) - len(plan)


def _check_ids(encoded: dict[int, TokenIds], prompts: PromptSet, tokenizer: Tokenizer) -> None:
    for row, ids in encoded.items():
        if len(ids) == 0:
            raise InputRefused(f"prompt {prompts.ids[row]}: has no tokens; remove it")
        if int(ids.max()) >= tokenizer.vocab_size:
            raise InputRefused(
                f"prompt {prompts.ids[row]}: token id {int(ids.max())} is outside the model's {tokenizer.vocab_size} "
                "embeddings; tokenizer and model don't belong together"
            )
        if tokenizer.bos_id is not None and len(ids) > 1 and int(ids[0]) == int(ids[1]) == tokenizer.bos_id:
            raise InputRefused(
                f"prompt {prompts.ids[row]}: starts with two BOS tokens (id {tokenizer.bos_id}); "
                "remove the one written in the prompt text or the chat template"
            )
