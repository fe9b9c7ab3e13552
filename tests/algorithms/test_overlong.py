"""The soft overlong penalty."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from grpoctl.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (17, -1.0), (400, -1.0)]
)
def test_penalty_follows_the_line_of_the_paper(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=16, buffer_tokens=4) == expected


def test_no_penalty_is_positive_zero() -> None:
    assert math.copysign(1.0, overlong_penalty(3, max_tokens=16, buffer_tokens=4)) == 1.0
    assert math.copysign(1.0, overlong_penalty(12, max_tokens=16, buffer_tokens=4)) == 1.0


@quick(100)
@given(st.integers(1, 500), st.data())
def test_penalty_is_the_papers_three_cases_and_never_rises_with_length(max_tokens: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, max_tokens))
    penalties = [overlong_penalty(n, max_tokens=max_tokens, buffer_tokens=buffer) for n in range(max_tokens + 3)]
    for length, penalty in enumerate(penalties):
        if length <= max_tokens - buffer:
            assert penalty == 0
        elif length <= max_tokens:
            assert penalty == ((max_tokens - buffer) - length) / buffer
        else:
            assert penalty == -1
    assert penalties == sorted(penalties, reverse=True)


@pytest.mark.parametrize("buffer_tokens", [0, -1, 17])
def test_a_buffer_outside_the_limit_is_refused(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"buffer_tokens must be within 1 … max_tokens \(16\), got"):
        overlong_penalty(3, max_tokens=16, buffer_tokens=buffer_tokens)
