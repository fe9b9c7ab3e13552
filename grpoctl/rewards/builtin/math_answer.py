"""A reward by mathematical equality: LaTeX, fractions, units, `\\boxed{}` and `####`, judged by math-verify.

Runs in a child only: math-verify's own timeouts need a main thread, and sympy can still hang past them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, cast

from grpoctl.errors import UsageError
from grpoctl.rewards.builtin.answer import reference_text
from grpoctl.rewards.builtin.options import require_column
from grpoctl.rewards.columns import value_at
from grpoctl.rewards.sample import RewardSample


def math(*, column: str = "answer") -> Callable[[RewardSample], float | None]:
    r"""Return a reward of 1.0 where the completion's final expression equals the reference's, else 0.0.

    The completion's expression is what follows its last `####`, else its last `\boxed{}`, else its last formula or number. A
    reference that math-verify cannot read is unscorable (None).

    Args:
        column: the reference's column: an expression with or without `$`, or a solution with `####` or `\boxed{}`.
    """
    require_column("math", "column", column)
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError('reward math: math-verify is not installed; run: pip install "grpoctl[math]"')

    def reward(sample: RewardSample) -> float | None:
        reference = _reference(reference_text(value_at(sample.source, column)))
        completion = _final(sample.completion)
        if reference.count("\\boxed") < 2:  # math-verify reads several boxes as a set
            completion = completion[max(0, completion.rfind("\\boxed")) :]
        return _equality(reference, completion)

    return reward


def _equality(reference: str, completion: str) -> float | None:
    from math_verify import (  # pyright: ignore[reportMissingImports]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    readers: list[Any] = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    gold = cast("list[Any]", parse(reference, extraction_config=readers))
    if not gold:
        return None
    return float(verify(gold, cast("list[Any]", parse(completion, extraction_config=readers))))


def _reference(text: str) -> str:
    """Return a reference with the marks that math-verify looks for around a formula."""
    text = _final(text)
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _final(text: str) -> str:
    """Return the line after the last `####` as a formula; the text itself without one."""
    _, marker, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    if not marker or not lines:
        return text
    return lines[0] if "$" in lines[0] or "\\boxed" in lines[0] else f"${lines[0]}$"
