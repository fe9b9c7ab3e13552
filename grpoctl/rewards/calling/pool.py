"""Score completions with rewards of any kind; whatever a user's function does, every completion gets a typed outcome.

Functions of users run in children that are killed at their deadline; built-ins that cannot hang run here in a plain loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from grpoctl.errors import UsageError
from grpoctl.rewards.builtin.registry import BUILTINS, builtin_function
from grpoctl.rewards.calling.call import BoundReward, RewardCall
from grpoctl.rewards.calling.child import MAX_PROCESSES, OutputLog, WorkerLink, scrubbed_environment
from grpoctl.rewards.calling.http_endpoint import longest_call_seconds
from grpoctl.rewards.calling.scheduler import ScoringRun, Workers
from grpoctl.rewards.resolve.columns_check import RewardReference, refuse_unscorable_inputs
from grpoctl.rewards.sample import RewardOutcome, RewardSample

_SLACK_SECONDS = 10.0
"""What a built-in with a time limit of its own (`code`) may take on top of it before its child is killed."""


class RewardPool:
    """Children for the rewards of one stage; use it as a context manager."""

    def __init__(
        self,
        references: Sequence[RewardReference],
        *,
        num_workers: int,
        timeout_seconds: float,
        log_path: Path | None = None,
        iteration: int = 0,
        num_iterations: int | None = None,
        keep_environment: Sequence[str] = (),
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        """Import every reward once, so that a broken one fails before the first completion is scored.

        Args:
            references: the rewards, with names of their own.
            num_workers: children at once.
            timeout_seconds: deadline of one call of a user's function.
            log_path: file that what the children print is appended to, up to 1 MiB; None drops it.
            iteration: TRL's `trainer_state.global_step`.
            num_iterations: TRL's `trainer_state.max_steps`.
            keep_environment: names of environment variables that look like secrets but are passed on.
            max_processes: processes that one child may have below it before it is killed.

        Raises:
            PluginFailed: importing a reward failed.
            UsageError: two rewards have the same name.
        """
        self._references = {reference.name: reference for reference in references}
        if len(self._references) < len(references):
            names = [reference.name for reference in references]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"rewards: two are named {twice!r}; give one another name with `name:`")
        self._calls = {
            name: _call(reference, timeout_seconds, iteration, num_iterations)
            for name, reference in self._references.items()
        }
        log = OutputLog(log_path)
        environment = scrubbed_environment(os.environ, keep=keep_environment)

        def started() -> WorkerLink:
            return WorkerLink(log, environment=environment, max_processes=max_processes)

        self._workers = Workers(max(1, num_workers), started)
        self._inline = {name: _bound(call) for name, call in self._calls.items() if _runs_inline(call)}
        try:
            for name in self._calls:
                if name not in self._inline:
                    ScoringRun(self._workers, self._calls[name], []).load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(
        self, name: str, samples: Sequence[RewardSample], *, max_failures: int | None = None
    ) -> list[RewardOutcome]:
        """Return one outcome per sample, in their order.

        Args:
            name: the reward's name.
            samples: whole groups, one after the other, so that a batch function sees groups undivided.
            max_failures: give up as soon as more rows than this timed out, raised or crashed.

        Raises:
            InputRefused: a value that the reward needs is null in a row; nothing was called.
            PluginFailed: the function returned something that no row can make right, or too many rows failed.
        """
        refuse_unscorable_inputs(self._references[name], samples)
        if name in self._inline:
            return [self._inline[name].row(sample) for sample in samples]
        return ScoringRun(self._workers, self._calls[name], samples).outcomes(max_failures)

    def close(self) -> None:
        """End all children and everything that they started."""
        self._workers.close()


def _call(reference: RewardReference, timeout_seconds: float, iteration: int, num_iterations: int | None) -> RewardCall:
    return RewardCall(
        name=reference.name,
        ref=reference.ref,
        kind=reference.kind,
        signature=reference.signature,
        target=reference.target,
        parameters=reference.parameters,
        kwargs=reference.kwargs,
        timeout_seconds=timeout_seconds,
        deadline_seconds=_deadline_seconds(reference, timeout_seconds),
        iteration=iteration,
        num_iterations=num_iterations,
    )


def _deadline_seconds(reference: RewardReference, timeout_seconds: float) -> float:
    if reference.kind == "http":
        return longest_call_seconds(timeout_seconds)
    own = reference.kwargs.get("timeout_seconds", 0.0) if reference.kind == "builtin" else 0.0
    return max(timeout_seconds, own + _SLACK_SECONDS) if own else timeout_seconds


def _runs_inline(call: RewardCall) -> bool:
    return call.kind == "builtin" and BUILTINS[call.target.attribute].in_process


def _bound(call: RewardCall) -> BoundReward:
    return BoundReward(call, builtin_function(call.target.attribute, call.kwargs))
