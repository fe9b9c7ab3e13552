"""Tell from its parameter names how a reward function wants to be called.

The rules, in order; `kwargs` that the user bound to the reward are taken out of the parameters first:

1. `solution_strs`                                       -> verl_batch
2. `solution_str`, or `ground_truth` together with
   `model_output` or `predict_str`                       -> verl
3. `queries` together with `prompts` or `labels`         -> openrlhf
4. `completions`, or `prompts`                           -> trl
5. a first parameter annotated `RewardSample`, or any of
   `sample`, `completion`, `prompt`, `finish_reason`     -> row
6. `completion_ids` alone: annotated as a list of lists  -> trl, as a list -> row, not annotated -> refused
7. anything else                                         -> refused, with what was found and how to say it

Parameters of rules 1–4 beside `sample` or `completion` point both ways and are refused too.

What each signature is given (a parameter is passed only if the function names it or takes `**kwargs`):

- row: called once per completion with `sample` (or the first parameter, if annotated `RewardSample`), `sample_id`, `prompt`,
  `completion`, `prompt_ids`, `completion_ids`, `finish_reason`, `source`, and every other column by its name. Those eight
  names win over columns of the same name. Returns a number, None or a dict with `score`.
- trl: called with whole groups, as lists: `prompts`, `completions`, `completion_ids`, every other column,
  `trainer_state` (`global_step`, `max_steps`, `epoch`), `log_extra`, `log_metric`. Completions are message lists where the
  prompt is one. Source: trl 1.16, GRPOTrainer._calculate_rewards.
- verl: called once per completion with `data_source`, `solution_str`, `ground_truth` and `extra_info`; the ground truth is
  the column `reward_model.ground_truth`, else `ground_truth`, else `answer`; `extra_info` also holds `num_turns` and
  `rollout_reward_scores`. Returns a number or a dict with `score`. Source: verl 0.9, NaiveRewardManager.
- verl_batch: the same four in the plural, as lists. Source: verl 0.9, BatchRewardManager.
- openrlhf: called by position with one completion at a time, `([query], [prompt], [label])`, where query is prompt and
  completion together; the label is the column `label`, else `labels`, else `answer`. Returns a list, a tensor or a dict with
  `rewards`. Source: openrlhf 0.11, SingleTurnAgentExecutor._fetch_rewards_via_func.

Every one may be async.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpoctl.errors import UsageError

SIGNATURES = ("row", "trl", "verl", "verl_batch", "openrlhf", "http")
ROW_NAMES = ("sample", "sample_id", "prompt", "completion", "prompt_ids", "completion_ids", "finish_reason", "source")
TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
VERL_SOLUTION_NAMES = ("solution_str", "model_output", "predict_str")
VERL_NAMES = ("data_source", *VERL_SOLUTION_NAMES, "ground_truth", "extra_info")
VERL_BATCH_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a reward function, as read from its source or by `inspect`."""

    name: str
    kind: str
    """positional, any, keyword, args or kwargs."""
    required: bool
    annotation: str
    """The annotation's source text, or empty."""

    def takes_null(self) -> bool:
        """Whether a null in this parameter's column is the function's own business."""
        return not self.required or "None" in self.annotation or "Optional" in self.annotation


def named(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters that have a name to pass by (no `*args`, no `**kwargs`)."""
    return [p for p in parameters if p.kind not in {"args", "kwargs"}]


def detected_signature(parameters: Sequence[Parameter], *, bound: Mapping[str, Any], ref: str) -> str:
    """Return the signature that the parameter names say, by the rules at the top of this file.

    Raises:
        UsageError: the names fit no signature, or more than one.
    """
    free = [p for p in named(parameters) if p.name not in bound]
    names = {p.name for p in free}
    batch = _batch_signature(names)
    typed_row = bool(free) and "RewardSample" in free[0].annotation and "[" not in free[0].annotation
    row = typed_row or bool(names & {"sample", "completion"})
    if batch and row:
        raise UsageError(_undecided(parameters, ref, f"the names fit both {batch} and row"))
    if batch:
        return batch
    if row or names & {"prompt", "finish_reason"}:
        return "row"
    ids = next((p for p in free if p.name == "completion_ids"), None)
    if ids is not None and ids.annotation:
        return "trl" if ids.annotation.count("[") >= 2 else "row"
    raise UsageError(_undecided(parameters, ref, "the names fit no known signature"))


def _batch_signature(names: set[str]) -> str | None:
    if "solution_strs" in names:
        return "verl_batch"
    if "solution_str" in names or ("ground_truth" in names and names & set(VERL_SOLUTION_NAMES)):
        return "verl"
    if "queries" in names and names & {"prompts", "labels"}:
        return "openrlhf"
    if names & {"completions", "prompts"}:
        return "trl"
    return None


def _undecided(parameters: Sequence[Parameter], ref: str, why: str) -> str:
    stars = {"args": "*", "kwargs": "**"}
    shown = ", ".join(stars.get(p.kind, "") + p.name for p in parameters)
    return (
        f"reward {ref}: cannot tell how to call ({shown}): {why}. Expected parameters like (completion, <column>) for row, "
        "(completions, **kwargs) for trl, (data_source, solution_str, ground_truth, extra_info) for verl, their plurals for "
        "verl_batch, (queries, prompts, labels) for openrlhf. Rename the parameters, or say which one is meant with "
        f"signature: {' | '.join(SIGNATURES[:-1])}"
    )
