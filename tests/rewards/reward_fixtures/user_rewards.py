"""Reward functions as users of other systems write them; importing this file fails unless a child does it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from grpoctl.rewards.sample import RewardSample

if "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("PYTEST_PID") == str(os.getpid()):
    raise RuntimeError("user code was imported into the caller's process")


def newcomer(completion, answer):
    return float(completion == answer)


def typed(item: RewardSample) -> float | None:
    return float(len(item.completion)) if item.source else None


def keyword_only(*, completion: str, finish_reason: str, level: int = 3) -> float:
    return float(level) if finish_reason == "stop" else 0.0


def positional_only(completion, answer, /):
    return float(completion == answer)


def everything(completion, **columns):
    return float(len(columns))


def trl_style(prompts, completions, answer, completion_ids, trainer_state, log_extra, log_metric, **kwargs):  # noqa: PLR0917
    texts = [c if isinstance(c, str) else c[0]["role"] + ":" + c[0]["content"] for c in completions]
    log_extra("seen", texts)
    log_metric("share", 0.25)
    log_extra("more", [",".join(sorted(kwargs))] * len(prompts))
    return [trainer_state.global_step + len(ids) if a else None for a, ids in zip(answer, completion_ids, strict=True)]


async def trl_async(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def verl_style(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "source": data_source, "info": sorted(extra_info)}


async def verl_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(solution_str == ground_truth) + 10 * len(kwargs)


def verl_batch_style(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [
        {"score": float(s == g), "n": len(solution_strs)} for s, g in zip(solution_strs, ground_truths, strict=True)
    ]


def openrlhf_style(queries, prompts, labels):
    import torch

    rewards = torch.tensor([float(q == p + a) for q, p, a in zip(queries, prompts, labels, strict=True)])
    return {
        "rewards": rewards,
        "scores": rewards / 2,
        "extra_logs": {"length": torch.tensor([len(q) for q in queries])},
    }


def ids_of_batches(completion_ids: list[list[int]]):
    return [float(len(ids)) for ids in completion_ids]


def ids_of_one(completion_ids: list[int]):
    return float(len(completion_ids))


def ids_of_which(completion_ids):
    return 0.0


def mixed(completions, completion):
    return 0.0


def unknown(text, gold):
    return 0.0


def multi_task(completions, task, answer: list[str | None]):
    return [None if a is None else 1.0 for a in answer]


def make_length_reward(limit: int) -> Callable:
    def length_reward(completions, **kwargs):
        return [float(len(c) <= limit) for c in completions]

    return length_reward


def twice(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


@twice
def decorated(completion, answer):
    return float(completion == answer)


class Judge:
    def __call__(self, completion, answer):
        return float(completion == answer)


judge = Judge()
partial = functools.partial(verl_style, bonus=1.0)
