"""From the command to the formula a reader passes at most ten frames of ours."""

import sys
from pathlib import Path

import pytest
from command_line import done

import grpoctl
from grpoctl.stages.update import step

PACKAGE = str(Path(grpoctl.__file__).parent)


def frames() -> list[str]:
    """Return our functions on the stack, the outermost first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)
        frame = frame.f_back
    return found[::-1]


def test_the_policy_loss_is_ten_frames_below_its_command(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    formula = step.policy_loss
    monkeypatch.setattr(step, "policy_loss", lambda *a, **k: (seen.append(frames()), formula(*a, **k))[1])
    done("update", "--logprobs", "logprobs", "--lr", "1e-4", "--out", "new")
    assert len(seen[0]) + 1 <= 10, seen[0]  # with `main`, which a test has in this process's stead
