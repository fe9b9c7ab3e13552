"""Every recorded case of verl 0.9.1 and TRL 1.16.0 against our formulas.

Float64 within 1e-12, float32 within 1e-6 (see `golden_cases.gap`), gradients included. A case ends in one of three ways,
all counted in the summary at the end of the run: it matches; it differs on purpose, by a rule whose condition is read
off the case's numbers and which asserts our own value; or its method is in `METHODS_NOT_HERE`. All else fails.
Set GRPOCTL_GOLDEN to a folder with files of the same format to run other cases.
"""

from __future__ import annotations

from collections.abc import Callable

import golden_advantages
import golden_aggregation
import golden_correction
import golden_kl
import golden_trl_losses
import golden_verl_losses
import pytest
from golden_cases import FOLDER, Case, Outcome, load_cases

HANDLERS: dict[tuple[str, str], Callable[[Case], Outcome]] = {
    **golden_advantages.HANDLERS,
    **golden_aggregation.HANDLERS,
    **golden_correction.HANDLERS,
    **golden_kl.HANDLERS,
    **golden_trl_losses.HANDLERS,
    **golden_verl_losses.HANDLERS,
}
METHODS_NOT_HERE = {
    **golden_advantages.METHODS_NOT_HERE,
    **golden_aggregation.METHODS_NOT_HERE,
    **golden_trl_losses.METHODS_NOT_HERE,
    **golden_verl_losses.METHODS_NOT_HERE,
    **golden_correction.METHODS_NOT_HERE,
}
CASES = load_cases()


def key_of(case: Case) -> tuple[str, str]:
    """Return the handler's key; TRL's one generation function was recorded for two families."""
    if case.package == "trl" and case.function == "_generate_and_score_completions":
        return case.package, case.family
    return case.package, case.function


def test_the_folder_holds_cases() -> None:
    assert CASES, f"no *.json with cases in {FOLDER}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_case(case: Case, record_outcome: Callable[[Outcome], None]) -> None:
    handler = HANDLERS.get(key_of(case))
    assert handler is not None, f"no handler for {case.package} {case.function}: unknown method"
    outcome = handler(case)
    if outcome.kind == "absent":
        assert outcome.reason in METHODS_NOT_HERE, f"{outcome.reason} is not in the list of methods that don't exist"
    record_outcome(outcome)
