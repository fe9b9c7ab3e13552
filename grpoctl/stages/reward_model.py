"""Train a value-head reward model on pairs of answers and write it as one folder, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grpoctl.algorithms.seeds import identity_order, identity_seed
from grpoctl.artifacts import conflict
from grpoctl.config import RewardModelJob, defining
from grpoctl.engines.base import OptimizerSettings, TokenIds
from grpoctl.engines.tokenizer import Tokenizer, load_tokenizer
from grpoctl.errors import Conflict, GateFailed, InputRefused, UsageError
from grpoctl.policies import Policy, open_policy, policy_files, tokenizer_digest, weights_digest
from grpoctl.preferences import Pair, PreferenceSet, Text, load_preferences
from grpoctl.reward_models import (
    REWARD_MODEL_RECORD,
    RewardModelRecord,
    is_reward_model,
    parsed_record,
)
from grpoctl.schema.canonical import sha256_json
from grpoctl.stages.base import Context, StageResult, check_outside, environment, memory_errors, set_threads
from grpoctl.storage import create_exclusively, list_names, locate, put_file, read_bytes, read_if_there

log = logging.getLogger("grpoctl")
STAGE: Final = "reward-model train"
CURVE_POINTS: Final = 20
COIN_TOSS: Final = 0.6
"""Held-out accuracy below which a warning asks about the learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Pairs as ids, those of one prompt on one side."""

    training: list[Any]
    held_out: list[Any]
    num_skipped: int


def run(job: RewardModelJob, context: Context) -> StageResult:
    """Train a reward model.

    Raises:
        UsageError: no preference file named, or out lies inside an input.
        InputRefused: unusable pairs, pairs too long for the model, or a base that isn't a plain language model.
        GateFailed: the loss is no longer finite.
        Conflict: something else lies at `out`.
    """
    if job.preferences is None:
        raise UsageError("name the file of pairs with --preferences (Parquet or JSONL with prompt, chosen, rejected)")
    check_outside(job.out, job.preferences, job.base)
    base = open_policy(job.base)
    if is_reward_model(base.folder):
        raise InputRefused(f"{job.base}: is a reward model already; name a language model as --base")
    preferences = load_preferences(job.preferences, job.reward_model)
    definition = _definition(job, base, preferences)
    done = _already_done(job.out, definition)
    if done is not None:
        return done
    for note in preferences.notes:
        log.warning("%s: %s", job.preferences, note)
    tokenizer = load_tokenizer(base.folder, base.ref)
    split = _split(job, preferences, tokenizer)
    facts = {"num_pairs": len(split.training), "num_held_out": len(split.held_out), "num_skipped": split.num_skipped}
    if context.dry_run:
        planned = {"fingerprint": sha256_json(definition), "num_steps": _num_steps(job, split), **facts}
        return StageResult(stage=STAGE, out=job.out, state="planned", artifact=None, facts=planned)
    set_threads(job.runtime)
    with memory_errors("training the reward model", "runtime.micro_batch_tokens"):
        model, stats = _trained(job, context, base, preferences, tokenizer, split)
    return _written(job, base, preferences, definition, model, {**facts, **stats})


def _definition(job: RewardModelJob, base: Policy, preferences: PreferenceSet) -> dict[str, Any]:
    return {
        "stage": STAGE,
        "reward_model": defining(job.reward_model),
        "seed": job.seed,
        "preferences": preferences.digest,
        "base": {"weights_digest": base.weights_digest, "tokenizer_digest": base.tokenizer_digest},
    }


def _already_done(out: str, definition: Mapping[str, Any]) -> StageResult | None:
    """Return the result where this very model lies at `out`, None where nothing does."""
    location = locate(out)
    data = read_if_there(location.child(REWARD_MODEL_RECORD))
    if data is not None:
        record = parsed_record(data, out)
        if record.fingerprint != sha256_json(definition):
            raise conflict(out, record.definition, definition)
        return StageResult(stage=STAGE, out=out, state="already_done", artifact=None, facts=_facts(record))
    names = list_names(location)
    if names:
        raise Conflict(
            f"{out}: holds {names[0]} but no {REWARD_MODEL_RECORD} (unfinished, or something else); choose another "
            "--out or remove the folder"
        )
    return None


def _facts(record: RewardModelRecord) -> dict[str, Any]:
    return {
        "held_out_accuracy": record.held_out_accuracy,
        **record.stats,
        "weights_digest": record.weights_digest,
        "fingerprint": record.fingerprint,
    }


def _split(job: RewardModelJob, preferences: PreferenceSet, tokenizer: Tokenizer) -> _Split:
    """Tokenise the pairs, leave out or refuse those that are too long, and hold out whole prompts."""
    from grpoctl.engines.preference_trainer import PairIds

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


def _trained(
    job: RewardModelJob,
    context: Context,
    base: Policy,
    preferences: PreferenceSet,
    tokenizer: Tokenizer,
    split: _Split,
) -> tuple[Any, dict[str, Any]]:
    """Return the fitted model and its numbers."""
    from grpoctl.engines.preference_trainer import PreferenceTrainer
    from grpoctl.engines.value_head import new_reward_model

    settings = job.reward_model
    model = new_reward_model(
        base.folder,
        ref=base.ref,
        device=job.runtime.device,
        dtype=settings.dtype,
        seed=identity_seed("value head", job.seed),
        context_tokens=tokenizer.context_tokens,
    )
    optimizer = OptimizerSettings(
        beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=settings.weight_decay, grad_clip=settings.grad_clip
    )
    budget = job.runtime.micro_batch_tokens
    trainer = PreferenceTrainer(model, optimizer, head_only=settings.head_only, budget=budget)
    started = time.monotonic()
    curve = _fit(job, context, trainer, split.training, preferences.digest)
    accuracy = trainer.accuracy(split.held_out) if split.held_out else None
    if accuracy is not None and accuracy < COIN_TOSS:
        log.warning("held-out pair accuracy %.3f is near a coin toss; try a higher --lr or more --epochs", accuracy)
    stats = {
        "held_out_accuracy": accuracy,
        "training_accuracy": trainer.accuracy(split.training),
        "num_steps": _num_steps(job, split),
        "loss": curve,
        "seconds": round(time.monotonic() - started, 3),
    }
    return model, stats


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
    every = max(1, len(batches) // CURVE_POINTS)
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
            curve[str(step + 1)] = sum(since) / len(since)
            since.clear()
            log.info("step %d/%d  loss %.4f  grad %.3f", step + 1, len(batches), curve[str(step + 1)], norm)
    return curve


def _written(
    job: RewardModelJob,
    base: Policy,
    preferences: PreferenceSet,
    definition: Mapping[str, Any],
    model: Any,
    stats: dict[str, Any],
) -> StageResult:
    """Complete the folder beside its place, then move it there; the record is its last file."""
    from grpoctl.engines.value_head import save_reward_model

    location = locate(job.out)
    beside = Path(location.path).parent if location.is_local else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tmp-reward-model-", dir=beside))
    try:
        scratch.chmod(0o755)
        save_reward_model(model, scratch)
        _carry(base.folder, scratch, type(model.backbone).__name__)
        record = RewardModelRecord(
            base_weights_digest=base.weights_digest,
            weights_digest=weights_digest(scratch),
            tokenizer_digest=tokenizer_digest(scratch),
            template="messages" if preferences.format == "messages" else "text",
            held_out_accuracy=stats.pop("held_out_accuracy"),
            num_pairs=stats["num_pairs"],
            num_held_out=stats["num_held_out"],
            fingerprint=sha256_json(definition),
            definition=dict(definition),
            stats=stats,
            environment=environment(),
        )
        (scratch / REWARD_MODEL_RECORD).write_text(record.model_dump_json(indent=1))
        _moved(scratch, job.out, definition)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return StageResult(stage=STAGE, out=job.out, state="done", artifact=None, facts=_facts(record))


def _carry(base: Path, folder: Path, architecture: str) -> None:
    """Copy tokenizer and template unchanged, and the config with the architecture and type of what is saved."""
    for path in policy_files(base):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((base / "config.json").read_bytes())
    config |= {"architectures": [architecture], "dtype": "float32"}
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _moved(scratch: Path, out: str, definition: Mapping[str, Any]) -> None:
    """Put the finished folder at its place; another process may have been there first."""
    location = locate(out)
    if location.is_local:
        try:
            os.rename(scratch, location.path)
        except OSError:
            if _already_done(out, definition) is None:
                raise
        return
    for path in sorted(scratch.iterdir()):
        if path.name != REWARD_MODEL_RECORD:
            put_file(path, location.child(path.name))
    place = location.child(REWARD_MODEL_RECORD)
    if not create_exclusively(place, (scratch / REWARD_MODEL_RECORD).read_bytes()):
        record = parsed_record(read_bytes(place), out)
        if record.weights_digest != parsed_record((scratch / REWARD_MODEL_RECORD).read_bytes(), out).weights_digest:
            raise Conflict(f"{place.url}: another reward model was written here meanwhile; choose another --out")
