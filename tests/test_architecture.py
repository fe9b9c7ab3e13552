"""Imports point strictly down, heavy packages stay where a stage runs, and `grpoctl --help` needs none of them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpoctl"
FLOORS = {
    "grpoctl": 0, "errors": 0, "extras": 1,
    "processes": 1, "algorithms": 1,
    "settings": 2,
    "artifacts": 3,
    "inputs": 4,
    "engines": 5, "rewards": 5,
    "stages": 6, "builtin": 6,
    "pipeline": 7,
    "cli": 8,
    "__main__": 9,
}
HEAVY = {"torch", "transformers", "vllm", "sglang", "deepspeed", "peft"}
HEAVY_AT_IMPORT = {"engines", "algorithms", "stages/update_step.py"}  # modules that only run with torch at hand


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in SCRIPTS]


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "grpoctl" if first == "__init__" else first


def imported(path: Path, *, top_level_only: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in FLOORS, f"{path}: on which floor does it live?"
    for name in imported(path):
        if not name.startswith("grpoctl.") or name == "grpoctl":
            continue
        other = name.split(".")[1]
        if other != unit and (unit, other) not in LAZY:
            assert FLOORS[other] < FLOORS[unit], f"{path} (floor {FLOORS[unit]}) imports {name} (floor {FLOORS[other]})"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_where_they_run(path: Path) -> None:
    if any(str(path.relative_to(PACKAGE)).startswith(place) for place in HEAVY_AT_IMPORT):
        return
    heavy = {name.split(".")[0] for name in imported(path, top_level_only=True)} & HEAVY
    assert not heavy, f"{path}: imports {heavy} at import time"


def loaded_modules(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in output.splitlines()}


def test_help_imports_none_of_torch_pyarrow_pydantic() -> None:
    code = "sys.argv = ['grpoctl', '--help']\nfrom grpoctl.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    assert not loaded_modules(code) & {"torch", "pyarrow", "pydantic", "transformers", "numpy"}


def test_scoring_needs_no_torch() -> None:
    assert not loaded_modules("import grpoctl.stages.score, grpoctl.cli.reward") & HEAVY


def test_pipelines_and_settings_need_no_torch() -> None:
    assert (
        not loaded_modules(
            "import grpoctl.settings.load, grpoctl.cli.commands, grpoctl.artifacts.artifact, grpoctl.inputs.policies"
        )
        & HEAVY
    )


def test_files_hold_one_idea() -> None:
    long = {str(path): count for path in modules() if (count := len(path.read_text().splitlines())) > 430}
    assert not long, f"split these: {long}"
