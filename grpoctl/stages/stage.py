"""What stages share: results, shard selection, progress, stopping, and models kept warm between stages of one process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, Final, TypeVar

from grpoctl.artifacts.artifact import Artifact, ArtifactWriter, Work, committed
from grpoctl.artifacts.storage import check_writable, locate
from grpoctl.errors import InputRefused, Interrupted, UsageError
from grpoctl.inputs.policies import Policy
from grpoctl.inputs.reward_models import RewardModelFolder
from grpoctl.processes import launcher as launched
from grpoctl.processes.memory import memory_errors
from grpoctl.processes.ranks import ALONE, Ranks, join
from grpoctl.settings.runtime import RuntimeConfig

log = logging.getLogger("grpoctl")
Item = TypeVar("Item")
PACKAGES: Final = ("torch", "transformers", "vllm", "deepspeed", "megatron-core", "mbridge", "peft", "pyarrow", "numpy")
PROGRESS_SECONDS: Final = 30.0
WARM_MODELS: Final = 2
"""Models kept in memory: the policy and the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How a stage ended.

    Args:
        stage: its name
        out: artifact or folder it wrote
        state: done, already_done, partial (other shards are still missing) or planned
        artifact: the committed artifact, where there is one
        facts: numbers for `--json` and for the line that a person reads
    """

    stage: str
    out: str
    state: str
    artifact: Artifact | None
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """`--shards A-B/N`: this process writes shards A to B of N, both counted from 0 and included."""

    first: int
    last: int
    total: int

    @staticmethod
    def parse(text: str) -> ShardRange:
        """Read `A-B/N` or `A/N`.

        Raises:
            UsageError: anything else, or numbers out of range.
        """
        left, separator, total = text.partition("/")
        first, dash, last = left.partition("-")
        numbers = [first, last if dash else first, total]
        if not separator or not all(number.isdigit() for number in numbers):
            raise UsageError(f"--shards {text}: expected A-B/N, as in 0-3/16")
        result = ShardRange(first=int(numbers[0]), last=int(numbers[1]), total=int(numbers[2]))
        if not result.first <= result.last < result.total:
            raise UsageError(f"--shards {text}: expected 0 ≤ A ≤ B < N")
        return result

    def indices(self, num_shards: int) -> list[int]:
        """Return the selected shard numbers of a plan.

        Raises:
            UsageError: the plan has another number of shards.
        """
        if self.total != num_shards:
            raise UsageError(f"--shards …/{self.total}: this work has {num_shards} shards; write …/{num_shards}")
        return list(range(self.first, self.last + 1))


class StopFlag:
    """Turns SIGTERM and SIGINT into a request that stages look at between shards and steps; the second one is immediate."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def install(self) -> None:
        """Catch both signals; only possible on the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise Interrupted("stopped at once; finished shards are kept, rerun to continue", signal_number=number)
        self.signal_number = number
        if not launched.has_speaker():
            print("stopping after the current shard; once more to stop at once", file=sys.stderr)

    def check(self) -> None:
        """Raise Interrupted where a signal came."""
        if self.signal_number is not None:
            raise Interrupted("stopped; finished shards are kept, rerun to continue", signal_number=self.signal_number)


@dataclass(slots=True, kw_only=True)
class Context:
    """One process's surroundings: stop flag, shard selection, dry run, and warm models."""

    stop: StopFlag = field(default_factory=StopFlag)
    shards: ShardRange | None = None
    dry_run: bool = False
    quiet: bool = False
    models: OrderedDict[tuple[str, str, str], Any] = field(default_factory=OrderedDict)
    reward_models: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    trainers: dict[str, Any] = field(default_factory=dict)
    samplers: dict[str, Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    ranks: Ranks = ALONE

    def join(self, runtime: RuntimeConfig) -> Ranks:
        """Return this process's place among those that run the stage, connected to the others."""
        self.ranks = join(runtime.device)
        return self.ranks

    def tell_once(self, message: str) -> None:
        """Say something on stderr, once in the life of this process."""
        if message not in self.told:
            self.told.add(message)
            log.info("%s", message)

    def selected(self, num_shards: int) -> list[int]:
        """Return the shards that this process is to write."""
        return list(range(num_shards)) if self.shards is None else self.shards.indices(num_shards)

    def megatron_model(self, policy: Policy, *, dtype: str, runtime: RuntimeConfig) -> Any:
        """Return this process's share of the policy's Megatron model, loaded once for each weights digest.

        Raises:
            TryAgain: the device has no memory for it.
        """
        from grpoctl.engines.megatron.model import load_megatron
        from grpoctl.engines.tokenizer import load_tokenizer

        set_threads(runtime)
        key = (policy.weights_digest, f"megatron {dtype}", runtime.device)
        if key not in self.models:
            self.models[key] = load_megatron(
                policy.folder,
                ref=policy.ref,
                vocab_size=load_tokenizer(policy.folder, policy.ref).vocab_size,
                device=runtime.device,
                dtype=dtype,
                tensor_parallel_size=runtime.megatron.tensor_parallel_size,
                ranks=self.ranks,
            )
        return self.models[key]

    def model(self, policy: Policy, *, dtype: str, runtime: RuntimeConfig, device: str | None = None) -> Any:
        """Return the policy's whole model, loaded once for each weights digest, on the device or on runtime's.

        Raises:
            TryAgain: the device has no memory for it.
        """
        from grpoctl.engines.tokenizer import load_tokenizer
        from grpoctl.engines.torch.model import load_policy

        set_threads(runtime)
        key = (policy.weights_digest, dtype, runtime.device)
        if key not in self.models:
            size = load_tokenizer(policy.folder, policy.ref).vocab_size
            with memory_errors("loading the model", "take another device, or more of them"):
                place = device or runtime.device
                loaded = load_policy(policy.folder, ref=policy.ref, vocab_size=size, device=place, dtype=dtype)
            self.models[key] = loaded
            while len(self.models) > WARM_MODELS:
                self.models.popitem(last=False)
        self.models.move_to_end(key)
        return self.models[key]

    def reward_model(self, model: RewardModelFolder, *, dtype: str, runtime: RuntimeConfig) -> Any:
        """Return a reward model, loaded once for each weights digest; one is kept.

        Raises:
            TryAgain: the device has no memory for it.
        """
        from grpoctl.engines.tokenizer import load_tokenizer
        from grpoctl.engines.value_head.model import load_reward_model

        set_threads(runtime)
        key = (model.weights_digest, dtype, runtime.device)
        if key not in self.reward_models:
            self.reward_models.clear()
            size = load_tokenizer(model.folder, model.ref).context_tokens
            with memory_errors("loading the reward model", "take another device"):
                self.reward_models[key] = load_reward_model(
                    model.folder, ref=model.ref, device=runtime.device, dtype=dtype, context_tokens=size
                )
        return self.reward_models[key]

    def follow(self, items: Sequence[Item], label: str) -> Iterator[Item]:
        """Yield items, checking for a stop request before each and telling progress on stderr."""
        started = told = time.monotonic()
        for number, item in enumerate(_with_bar(items, label, quiet=self.quiet)):
            with self.ranks.agreed():  # a signal to one process stops all of them, before the same item
                self.stop.check()
            yield item
            now = time.monotonic()
            if not sys.stderr.isatty() and now - told >= PROGRESS_SECONDS:
                told = now
                rate = (number + 1) / (now - started)
                left = (len(items) - number - 1) / rate
                log.info("%s %d/%d, %.2f/s, %.0f s left", label, number + 1, len(items), rate, left)


def _with_bar(items: Sequence[Item], label: str, *, quiet: bool) -> Iterable[Item]:
    if quiet or not sys.stderr.isatty() or len(items) < 2:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=label, console=Console(stderr=True), transient=True)


def set_threads(runtime: RuntimeConfig) -> None:
    """Apply runtime.num_threads."""
    if runtime.num_threads is not None:
        import torch

        torch.set_num_threads(runtime.num_threads)


def environment() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def already_done(out: str, work: Work) -> StageResult | None:
    """Return the result of work that is committed already, or None where it can be written.

    Raises:
        Conflict: other work is committed there.
        InputRefused: nothing can be written there.
    """
    artifact = committed(out, work)
    if artifact is None:
        check_writable(locate(out))
        return None
    return StageResult(
        stage=work.stage, out=out, state="already_done", artifact=artifact, facts=dict(artifact.manifest.stats)
    )


def planned(out: str, work: Work, **facts: Any) -> StageResult:
    """Return the result of a dry run."""
    details = {"fingerprint": work.fingerprint, "num_shards": work.num_shards, **facts}
    return StageResult(stage=work.stage, out=out, state="planned", artifact=None, facts=details)


def finished(writer: ArtifactWriter, artifact: Artifact | None) -> StageResult:
    """Return the result of a stage that wrote its shards; partial while other processes' shards are missing."""
    work = writer.work
    if artifact is None:
        facts = {"missing_shards": writer.missing_shards()}
        return StageResult(stage=work.stage, out=writer.url, state="partial", artifact=None, facts=facts)
    facts = dict(artifact.manifest.stats)
    return StageResult(stage=work.stage, out=writer.url, state="done", artifact=artifact, facts=facts)


def check_outside(out: str, *inputs: str | None, flag: str = "--out") -> None:
    """Refuse an output that lies inside an input, or the other way round.

    Raises:
        UsageError: they overlap.
    """
    ours = _absolute(out) + "/"
    for given in inputs:
        theirs = _absolute(given or "") + "/"
        if given and (ours.startswith(theirs) or theirs.startswith(ours)):
            raise UsageError(f"{flag} {out}: overlaps the input {given}; choose another folder")


def _absolute(url: str) -> str:
    return url.rstrip("/") if "://" in url else os.path.realpath(url)


def require_same_tokenizer(policy: Policy, digest: str, where: str) -> None:
    """Refuse a policy whose tokenizer isn't the one that the rollouts were made with.

    Raises:
        InputRefused: the digests differ.
    """
    if policy.tokenizer_digest != digest:
        raise InputRefused(
            f"{policy.ref}: tokenizer {policy.tokenizer_digest[:12]}… differs from {digest[:12]}… of {where}; "
            "both stages must use one tokenizer and chat template"
        )
