"""Every command in the README runs, in order, and prints what the README shows (numbers may differ)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Return (command, lines shown) of every console block."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip():
                found[-1][1].append(line)
    return found


def masked(text: str) -> str:
    return re.sub(r"-?\d[\d.,e+-]*", "#", " ".join(text.split()))


def check_output(shown: list[str], output: str) -> None:
    actual = [masked(line) for line in output.splitlines()]
    for line in shown:
        prefix, ellipsis, _ = line.partition("…")
        wanted = masked(prefix)
        if ellipsis:
            assert any(candidate.startswith(wanted) for candidate in actual), f"{line!r} not in\n{output}"
        else:
            assert wanted in actual, f"{line!r} not in\n{output}"


@pytest.mark.slow
def test_every_command_of_the_readme_does_what_it_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = 0
    for command, shown in commands():
        if command.startswith("make "):
            continue  # `make test` is this very suite; `make demo` has a test of its own
        result = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        check_output(shown, result.stdout)
        ran += 1
    assert ran >= 15


def test_the_two_make_targets_exist() -> None:
    targets = (ROOT / "Makefile").read_text()
    for command, _ in commands():
        if command.startswith("make "):
            assert f"\n{command.removeprefix('make ')}:" in targets


@pytest.mark.slow
def test_make_demo_shows_a_rising_reward(tmp_path: Path) -> None:
    venv = Path(sys.prefix)
    assert (venv / ".installed").exists(), f"{venv} was not made by make: run the suite with `make test`"
    shutil.copytree(ROOT, tmp_path / "clone", ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "models"))
    for stamp in (venv / ".installed",):
        os.utime(stamp)  # the copy's files are newer than the stamp
    result = subprocess.run(
        ["make", "demo", f"VENV={venv}"],
        cwd=tmp_path / "clone",
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rewards = [float(line.split()[3]) for line in result.stdout.splitlines() if line.startswith("iter ")]
    assert len(rewards) == 20
    assert rewards[-1] > rewards[0] + 0.5
    assert "mean reward by iteration" in result.stdout
    assert "artifacts: runs/quickstart" in result.stdout


def test_links_in_readme_and_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
