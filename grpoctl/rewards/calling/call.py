"""Call a reward function the way its home does: arguments by name from a sample's fields and columns."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

from grpoctl.errors import GrpoctlError
from grpoctl.rewards.calling.outcome import Extras, listed, outcome_of, plain, raised, text
from grpoctl.rewards.columns import GROUND_TRUTH_PATHS, LABEL_PATHS, first_value
from grpoctl.rewards.resolve.signature import ROW_NAMES, VERL_SOLUTION_NAMES, Parameter, named
from grpoctl.rewards.resolve.target import Target
from grpoctl.rewards.sample import RewardOutcome, RewardSample

BATCH_SIGNATURES = frozenset({"trl", "verl_batch", "http"})
"""Called with many completions at once; the others are called with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """All that is needed to load one reward in another process and call it."""

    name: str
    ref: str
    kind: str
    signature: str
    target: Target
    parameters: tuple[Parameter, ...]
    kwargs: dict[str, Any]
    timeout_seconds: float
    """Deadline of one attempt, as the user set it."""
    deadline_seconds: float
    """When the child is killed; later than the timeout where the call itself keeps to it (retries of an endpoint)."""
    iteration: int
    num_iterations: int | None


class BoundReward:
    """A loaded reward function; every call returns outcomes, whatever the function does short of ending the process."""

    def __init__(self, call: RewardCall, function: Callable[..., Any]) -> None:
        self._call = call
        self._function = function
        self._kwargs = {} if call.target.factory or call.kind == "builtin" else call.kwargs
        self._names = frozenset(p.name for p in named(call.parameters))
        self._takes_all = any(p.kind == "kwargs" for p in call.parameters)
        self._positional = [p.name for p in call.parameters if p.kind == "positional"]
        self._typed = next((p.name for p in call.parameters if "RewardSample" in p.annotation), "sample")
        self._solution = next((name for name in VERL_SOLUTION_NAMES if name in self._names), "solution_str")
        self._loop: asyncio.AbstractEventLoop | None = None

    def row(self, sample: RewardSample) -> RewardOutcome:
        """Call a one-completion function (row, verl, openrlhf)."""
        start = time.perf_counter()
        try:
            value = self._row_value(sample)
        except GrpoctlError:  # an interrupt, where a built-in runs in the stage's own process
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is this row's outcome
            return raised(error, seconds=time.perf_counter() - start)
        seconds = time.perf_counter() - start
        if self._call.signature == "openrlhf":
            return _openrlhf_outcome(value, name=self._call.name, seconds=seconds)
        return outcome_of(value, name=self._call.name, seconds=seconds)

    def batch(self, samples: Sequence[RewardSample]) -> list[RewardOutcome] | RewardOutcome:
        """Call a batch function (trl, verl_batch): one outcome per sample, or the one failure of the whole call."""
        start = time.perf_counter()
        logs = _TrlLogs(len(samples))
        try:
            values = self._batch_value(samples, logs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is the batch's outcome
            return raised(error, seconds=time.perf_counter() - start)
        seconds = (time.perf_counter() - start) / len(samples)
        name = self._call.name
        rows = listed(values, name=name, wanted=len(samples))
        return [outcome_of(v, name=name, seconds=seconds, extras=logs.row(i)) for i, v in enumerate(rows)]

    def _row_value(self, sample: RewardSample) -> Any:
        if self._call.signature == "openrlhf":
            prompt = sample.prompt_text if sample.prompt_text is not None else sample.prompt
            label = first_value(sample.source, LABEL_PATHS)
            return self._result(self._function([f"{prompt}{sample.completion}"], [prompt], [label], **self._kwargs))
        if self._call.signature == "verl":
            return self._invoke(self._verl_values(sample))
        return self._invoke(_Row(sample, self._typed))

    def _batch_value(self, samples: Sequence[RewardSample], logs: _TrlLogs) -> Any:
        if self._call.signature == "trl":
            return self._invoke(self._trl_values(samples, logs))
        rows = [self._verl_values(sample) for sample in samples]
        return self._invoke({f"{name}s": [row[name] for row in rows] for name in rows[0]})

    def _verl_values(self, sample: RewardSample) -> dict[str, Any]:
        info = sample.source.get("extra_info")
        if info is None or isinstance(info, Mapping):
            info = {
                **cast("Mapping[str, Any]", info or {}),
                "num_turns": None,
                "rollout_reward_scores": dict[str, Any](),
            }
        return {
            "data_source": sample.source.get("data_source"),
            self._solution: sample.completion,
            "ground_truth": first_value(sample.source, GROUND_TRUTH_PATHS),
            "extra_info": info,
        }

    def _trl_values(self, samples: Sequence[RewardSample], logs: _TrlLogs) -> dict[str, Any]:
        columns = {key: None for sample in samples for key in sample.source}
        hidden = ("prompt", "completion", "completion_ids")
        values: dict[str, Any] = {key: [s.source.get(key) for s in samples] for key in columns if key not in hidden}
        state = SimpleNamespace(
            global_step=self._call.iteration, max_steps=self._call.num_iterations, epoch=float(self._call.iteration)
        )
        return values | {
            "prompts": [s.prompt for s in samples],
            "completions": [_trl_completion(s) for s in samples],
            "completion_ids": [s.completion_ids for s in samples],
            "trainer_state": state,
            "log_extra": logs.log_extra,
            "log_metric": logs.log_metric,
        }

    def _invoke(self, values: Mapping[str, Any]) -> Any:
        """Pass what the function can take, the user's own kwargs first."""
        names = values if self._takes_all else (name for name in self._names if name in values)
        keywords = {name: values[name] for name in names} | self._kwargs
        positional = [keywords.pop(name) for name in self._positional if name in keywords]
        return self._result(self._function(*positional, **keywords))

    def _result(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:  # one loop for all calls, so that a client the function keeps stays usable
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))


class _Row(Mapping[str, Any]):
    """A sample's values by parameter name, looked up only when wanted."""

    def __init__(self, sample: RewardSample, typed: str) -> None:
        self._sample = sample
        self._typed = typed

    def __getitem__(self, name: str) -> Any:
        if name in ("sample", self._typed):
            return self._sample
        if name in ROW_NAMES:
            return attrgetter(name)(self._sample)
        return self._sample.source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*ROW_NAMES, *self._sample.source]))

    def __len__(self) -> int:
        return len(list(self))


class _TrlLogs:
    """What TRL's `log_extra` and `log_metric` were told during one call, by row."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._columns: dict[str, list[Any]] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        rows = list(values)
        if len(rows) != self._num_rows:
            raise ValueError(f"log_extra({column!r}): {len(rows)} values for {self._num_rows} completions")
        self._columns[column] = rows

    def log_metric(self, name: str, value: Any) -> None:
        self._columns[name] = [value] * self._num_rows

    def row(self, index: int) -> Extras:
        return {text(c): plain(rows[index]) for c, rows in self._columns.items() if rows[index] is not None}


def _trl_completion(sample: RewardSample) -> Any:
    if isinstance(sample.prompt, str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]


def _openrlhf_outcome(value: Any, *, name: str, seconds: float) -> RewardOutcome:
    """Unpack `{"rewards": tensor, "scores": tensor, "extra_logs": {name: tensor}}`, a list or a tensor of one."""
    extras: Extras = {}
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        if "rewards" not in fields:
            return outcome_of(fields, name=name, seconds=seconds, key="rewards")  # refuses, naming the keys
        logs: Mapping[str, Any] = {**(fields.get("extra_logs") or {}), "scores": fields.get("scores")}
        extras = {text(key): plain(_only(log)) for key, log in logs.items() if log is not None}
        value = fields["rewards"]
    if isinstance(value, (list, tuple)):
        value = listed(value, name=name, wanted=1)[0]
    return outcome_of(value, name=name, seconds=seconds, extras=extras)


def _only(value: Any) -> Any:
    values = cast("Sequence[Any]", value)
    return values[0] if isinstance(value, (list, tuple)) and len(values) == 1 else values


async def _awaited(value: Any) -> Any:
    return await value
