"""Train a value-head reward model on pairs of answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grpoctl.algorithms.seeds import identity_order, identity_seed
from grpoctl.artifacts.canonical import sha256_json
from grpoctl.artifacts.writer import ArtifactWriter
from grpoctl.engines.base import OptimizerSettings, TokenIds
from grpoctl.engines.tokenizer import Tokenizer, load_tokenizer
from grpoctl.engines.warm import set_threads
from grpoctl.errors import GateFailed, InputRefused, UsageError
from grpoctl.inputs.policies import PolicyFolder, open_policy
from grpoctl.inputs.preferences import Pair, PreferenceSet, Text, load_preferences
from grpoctl.inputs.reward_models import is_reward_model
from grpoctl.processes.memory import memory_errors
from grpoctl.settings.fields import defining
from grpoctl.settings.jobs import RewardModelJob
from grpoctl.stages.context import Context
from grpoctl.stages.reward_model.write import STAGE_NAME, facts_of, find_trained, scratch_folder, write_reward_model
from grpoctl.stages.stage import Definition, Facts, Prepared, Stage

log = logging.getLogger("grpoctl")
CURVE_POINTS: Final = 20
COIN_TOSS: Final = 0.6
"""Held-out accuracy below which a warning asks about the learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Pairs as ids, those of one prompt on one side."""

    training: list[Any]
    held_out: list[Any]
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelInputs:
    """The language model that gets a head, and the pairs."""

    base: PolicyFolder
    preferences: PreferenceSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelPlan:
    """The pairs as ids, what they are fitted to, and what is known of them."""

    base: PolicyFolder
    preferences: PreferenceSet
    tokenizer: Tokenizer
    split: _Split

    @property
    def facts(self) -> dict[str, Any]:
        """Numbers of pairs."""
        split = self.split
        return {
            "num_pairs": len(split.training),
            "num_held_out": len(split.held_out),
            "num_skipped": split.num_skipped,
        }


def open_inputs(job: RewardModelJob) -> RewardModelInputs:
    """Open the base and read the pairs.

    Raises:
        UsageError: no preference file named.
        InputRefused: unusable pairs, or a base that isn't a plain language model.
    """
    if job.preferences is None:
        raise UsageError("name the file of pairs with --preferences (data with prompt, chosen, rejected)")
    if "base" not in job.model_fields_set:
        log.info("no --base: using the built-in tiny policy, builtin:tiny")
    base = open_policy(job.base)
    if is_reward_model(base.folder):
        raise InputRefused(f"{job.base}: is a reward model already; name a language model as --base")
    return RewardModelInputs(base=base, preferences=load_preferences(job.preferences, job.reward_model))


def define(job: RewardModelJob, inputs: RewardModelInputs) -> Definition:
    """Return what the reward model is made of."""
    base = inputs.base
    return Definition(
        values={
            "stage": STAGE_NAME,
            "reward_model": defining(job.reward_model),
            "seed": job.seed,
            "preferences": inputs.preferences.digest,
            "base": {"weights_digest": base.weights_digest, "tokenizer_digest": base.tokenizer_digest},
        }
    )


def prepare(job: RewardModelJob, inputs: RewardModelInputs, context: Context) -> Prepared[RewardModelPlan]:
    """Tokenise the pairs, and hold some out.

    Raises:
        InputRefused: pairs too long for the model.
    """
    for note in inputs.preferences.notes:
        log.warning("%s: %s", job.preferences, note)
    tokenizer = load_tokenizer(inputs.base.folder, inputs.base.ref)
    split = _split(job, inputs.preferences, tokenizer)
    plan = RewardModelPlan(base=inputs.base, preferences=inputs.preferences, tokenizer=tokenizer, split=split)
    fingerprint = sha256_json(define(job, inputs).values)
    return Prepared(plan=plan, facts={"fingerprint": fingerprint, "num_steps": _num_steps(job, split), **plan.facts})


def compute(job: RewardModelJob, plan: RewardModelPlan, writer: ArtifactWriter, context: Context) -> Facts:
    """Fit the model and write its folder.

    Raises:
        GateFailed: the loss is no longer finite.
        Conflict: something else was put there meanwhile.
    """
    set_threads(job.runtime)
    with scratch_folder(job.out) as scratch:
        with memory_errors("training the reward model", "lower runtime.micro_batch_tokens"):
            model = _new_model(job, plan.base, plan.tokenizer)
            stats = _train(job, context, model, plan.preferences.digest, plan.split)
        numbers = {**plan.facts, **stats, "template": plan.preferences.format}
        record = write_reward_model(job, plan.base, model, writer.work.definition, numbers, scratch=scratch)
    return Facts(stats=facts_of(record))


def _split(job: RewardModelJob, preferences: PreferenceSet, tokenizer: Tokenizer) -> _Split:
    """Tokenise the pairs, leave out or refuse those that are too long, and hold out whole prompts."""
    from grpoctl.engines.value_head.trainer import PairIds

    settings = job.reward_model
    limit = min(settings.max_tokens or tokenizer.context_tokens, tokenizer.context_tokens)
    pairs: list[tuple[Pair, PairIds]] = []
    long: list[int] = []
    for pair in preferences.pairs:
        ids = PairIds(
            chosen=_encoded(tokenizer, pair.chosen, f"{job.preferences}: row {pair.row}"),
            rejected=_encoded(tokenizer, pair.rejected, f"{job.preferences}: row {pair.row}"),
        )
        if max(len(ids.chosen), len(ids.rejected)) > limit:
            long.append(pair.row)
        else:
            pairs.append((pair, ids))
    if long and (settings.overlong == "error" or not pairs):
        raise InputRefused(
            f"{job.preferences}: {len(long)} pairs are longer than {limit} tokens (rows {long[:5]}); raise --max-tokens "
            f"(the model's context is {tokenizer.context_tokens}), shorten them, or leave them out with "
            "--set reward_model.overlong=skip"
        )
    if long:
        log.warning("%s: %d pairs are longer than %d tokens; left out", job.preferences, len(long), limit)
    held = _held_out([pair for pair, _ in pairs], preferences, job)
    split = _Split(
        training=[ids for pair, ids in pairs if pair.prompt_key not in held],
        held_out=[ids for pair, ids in pairs if pair.prompt_key in held],
        num_skipped=len(long),
    )
    if settings.holdout_fraction > 0 and not split.held_out:
        log.warning("%s: too few prompts to hold any out; no accuracy will be reported", job.preferences)
    return split


def _encoded(tokenizer: Tokenizer, text: Text, where: str) -> TokenIds:
    ids = tokenizer.encode_text(text) if isinstance(text, str) else tokenizer.encode_conversation(text)
    if not len(ids):
        raise InputRefused(f"{where}: an empty text has no token to read a reward at; remove the row")
    return ids


def _held_out(pairs: Sequence[Pair], preferences: PreferenceSet, job: RewardModelJob) -> set[str]:
    """Return the prompts that are held out: the first of a shuffle that reach the wanted share of the pairs."""
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.prompt_key] = counts.get(pair.prompt_key, 0) + 1
    keys = list(counts)
    wanted = round(job.reward_model.holdout_fraction * len(pairs))
    if job.reward_model.holdout_fraction > 0:
        wanted = max(1, wanted)
    held: set[str] = set()
    for place in identity_order(keys, "held out", preferences.digest, job.seed):
        if wanted <= 0 or len(held) + 1 == len(keys):
            break
        held.add(keys[place])
        wanted -= counts[keys[place]]
    return held


def _num_steps(job: RewardModelJob, split: _Split) -> int:
    return job.reward_model.epochs * -(-len(split.training) // job.reward_model.batch_size)


def _new_model(job: RewardModelJob, base: PolicyFolder, tokenizer: Tokenizer) -> Any:
    from grpoctl.engines.value_head.model import new_reward_model

    return new_reward_model(
        base.folder,
        ref=base.ref,
        device=job.runtime.device,
        dtype=job.reward_model.dtype,
        seed=identity_seed("value head", job.seed),
        context_tokens=tokenizer.context_tokens,
    )


def _train(job: RewardModelJob, context: Context, model: Any, digest: str, split: _Split) -> dict[str, Any]:
    """Fit the model in place; return its numbers."""
    from grpoctl.engines.value_head.trainer import PreferenceTrainer

    settings = job.reward_model
    optimizer = OptimizerSettings(
        beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=settings.weight_decay, grad_clip=settings.grad_clip
    )
    budget = job.runtime.micro_batch_tokens
    trainer = PreferenceTrainer(model, optimizer, head_only=settings.head_only, budget=budget)
    started = time.monotonic()
    curve = _fit(job, context, trainer, split.training, digest)
    accuracy = trainer.accuracy(split.held_out) if split.held_out else None
    if accuracy is not None and accuracy < COIN_TOSS:
        log.warning("held-out pair accuracy %.3f is near a coin toss; try a higher --lr or more --epochs", accuracy)
    return {
        "held_out_accuracy": accuracy,
        "training_accuracy": trainer.accuracy(split.training),
        "num_steps": _num_steps(job, split),
        "loss": curve,
        "seconds": round(time.monotonic() - started, 3),
    }


def _fit(job: RewardModelJob, context: Context, trainer: Any, pairs: Sequence[Any], digest: str) -> dict[str, float]:
    """Take all steps; return {step: mean loss since the point before}."""
    settings = job.reward_model
    names = [str(number) for number in range(len(pairs))]
    batches = [
        [pairs[i] for i in order[start : start + settings.batch_size]]
        for epoch in range(settings.epochs)
        for order in [identity_order(names, "pairs", digest, job.seed, epoch)]
        for start in range(0, len(pairs), settings.batch_size)
    ]
    warmup = round(settings.warmup_fraction * len(batches))
    every = -(-len(batches) // CURVE_POINTS)
    curve: dict[str, float] = {}
    since: list[float] = []
    for step, batch in enumerate(batches):
        context.stop.check()
        left = (len(batches) - step) / (len(batches) - warmup) if step >= warmup else (step + 1) / (warmup + 1)
        loss, norm = trainer.step(batch, settings.lr * left)
        since.append(loss)
        if not (abs(loss) < float("inf") and norm < float("inf")):
            raise GateFailed(f"step {step + 1}: loss {loss}, gradient norm {norm}; lower --lr and rerun")
        if (step + 1) % every == 0 or step + 1 == len(batches):
            curve[str(step + 1)] = round(sum(since) / len(since), 6)
            since.clear()
            log.info("step %d/%d  loss %.4f  grad %.3f", step + 1, len(batches), curve[str(step + 1)], norm)
    return curve


STAGE = Stage(
    name=STAGE_NAME,
    job=RewardModelJob,
    table=None,
    reads=lambda job: (job.preferences, job.base),
    open=open_inputs,
    define=define,
    prepare=prepare,
    compute=compute,
    already=lambda job, inputs, work, context: find_trained(job.out, work.definition),
)
