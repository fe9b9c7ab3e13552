"""A reward for programs: the completion's last ```python block must pass the row's tests, inside a sandbox."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from grpoctl.processes.sandbox import require_sandbox, run_python
from grpoctl.rewards.builtin.options import require_bool, require_column, require_positive_int, require_positive_number
from grpoctl.rewards.columns import value_at
from grpoctl.rewards.sample import RewardSample

_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One test: statements to run after the program, or an input with the output it must print."""

    statements: str = ""
    stdin: str = ""
    stdout: str | None = None


def code(
    *, column: str = "tests", partial: bool = False, timeout_seconds: float = 10.0, memory_mb: int = 1024
) -> Callable[[RewardSample], dict[str, Any]]:
    """Return a reward of 1.0 where the program passes all tests, else 0.0 (or the fraction passed).

    Args:
        column: the tests: Python statements as text or a list of texts (`assert f(1) == 2`), or input/output pairs as a
            list of `{"input": …, "output": …}` or as `{"inputs": […], "outputs": […]}`; JSON text of these is read as such.
        partial: the reward is the fraction of tests passed.
        timeout_seconds: for all of a row's tests together; what has not ended by then failed.
        memory_mb: address space of the program, in MiB.
    """
    require_column("code", "column", column)
    require_bool("code", "partial", partial)
    require_positive_number("code", "timeout_seconds", timeout_seconds)
    require_positive_int("code", "memory_mb", memory_mb)
    require_sandbox()

    def reward(sample: RewardSample) -> dict[str, Any]:
        tests = _tests(value_at(sample.source, column))
        program = last_program(sample.completion)
        failures = ["no ```python block"] if program is None else []
        num_passed = 0
        give_up = time.monotonic() + timeout_seconds
        for test in tests if program else []:
            failed = _failure(program or "", test, give_up - time.monotonic(), memory_mb * 1024 * 1024)
            num_passed += not failed
            failures += [failed] if failed else []
            if failed and not partial:
                break
        score = num_passed / len(tests) if partial else float(num_passed == len(tests))
        return {"score": score, "num_passed": num_passed, "num_tests": len(tests), "failure": "".join(failures[:1])}

    return reward


def last_program(completion: str) -> str | None:
    """Return the last fenced Python block of a completion; None without one."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else None


def _failure(program: str, test: _Test, timeout_seconds: float, memory_bytes: int) -> str:
    """Run one test; return why it failed, or an empty text."""
    if timeout_seconds <= 0:
        return "no time left for this test"
    source = f"{program}\n\n{test.statements}\n"
    result = run_python(source, stdin=test.stdin, timeout_seconds=timeout_seconds, memory_bytes=memory_bytes)
    if not result.finished and (test.stdout is None or result.exit_code != 0):
        return result.error[-300:] or "ended early"
    if test.stdout is not None and _lines(result.output) != _lines(test.stdout):
        return f"printed {result.output[:100]!r}, expected {test.stdout[:100]!r}"
    return ""


def _lines(text: str) -> list[str]:
    """Return a text's lines without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(value: Any) -> list[_Test]:
    """Read a row's tests.

    Raises:
        ValueError: there is none, or the value has none of the known forms.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return [_Test(statements=value)]
        value = cast("Any", parsed) if isinstance(parsed, (list, dict)) else [value]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value)
        value = [{"input": i, "output": o} for i, o in zip(pairs["inputs"], pairs["outputs"], strict=True)]
    tests = [_test(item) for item in value]
    if not tests:
        raise ValueError("the row has no tests; expected at least one")
    return tests


def _test(item: Any) -> _Test:
    if isinstance(item, str):
        return _Test(statements=item)
    fields = cast("Mapping[str, Any]", item)
    if isinstance(item, Mapping) and {"input", "output"} <= set(fields):
        return _Test(stdin=str(fields["input"]), stdout=str(fields["output"]))
    raise ValueError(f"a test is {item!r:.80}; expected Python statements or {{'input': …, 'output': …}}")
