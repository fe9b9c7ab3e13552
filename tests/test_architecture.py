"""Imports point strictly down, heavy packages stay where a stage runs, and `grpoctl --help` needs none of them."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpoctl"
FLOORS = {
    "__main__": 9,
    "cli": 8,
    "pipeline": 7,
    "stages": 6,
    "builtin": 6,
    "engines": 5,
    "rewards": 5,
    "inputs": 4,
    "artifacts": 3,
    "settings": 2,
    "processes": 1,
    "algorithms": 1,
    "extras": 1,
    "errors": 0,
    "grpoctl": 0,
}
"""From the top down; a module imports from floors below its own and from its own folder."""
HEAVY = {"torch", "transformers", "vllm", "sglang", "deepspeed", "peft"}
HEAVY_AT_IMPORT = {"engines", "algorithms", "stages/update/step.py"}
"""What only runs with torch at hand; an engine's record, which is read before, isn't among it."""
LIGHT_FILES = {"engine.py", "registry.py", "warm.py", "base.py", "proof.py", "tokenizer.py"}
MODULES = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "grpoctl" if first == "__init__" else first


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@every_module
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in FLOORS, f"{path}: on which floor does it live?"
    for name in imported(path):
        if not name.startswith("grpoctl.") or name == "grpoctl.__version__":
            continue
        other = name.split(".")[1]
        if other != unit:
            assert FLOORS[other] < FLOORS[unit], f"{path} (floor {FLOORS[unit]}) imports {name} (floor {FLOORS[other]})"


def test_no_imports_at_load_time_form_a_circle() -> None:
    names = {name_of(path) for path in MODULES}
    graph = {
        name_of(path): {name for name in imported(path, top_level_only=True) if name in names} - {name_of(path)}
        for path in MODULES
    }
    assert list(TopologicalSorter(graph).static_order())


@every_module
def test_heavy_packages_are_imported_where_they_run(path: Path) -> None:
    place = str(path.relative_to(PACKAGE))
    if path.name not in LIGHT_FILES and any(place.startswith(heavy) for heavy in HEAVY_AT_IMPORT):
        return
    heavy = {name.split(".")[0] for name in imported(path, top_level_only=True)} & HEAVY
    assert not heavy, f"{path}: imports {heavy} at import time"


def test_no_file_bears_the_name_of_a_module_of_python() -> None:
    """A folder of ours can stand on a process's path, where such a file would hide Python's own."""
    taken = [str(path) for path in MODULES if path.stem in sys.stdlib_module_names and path.stem[:2] != "__"]
    assert not taken, taken


@pytest.mark.parametrize("word", ["megatron", "deepspeed", "vllm"])
def test_no_stage_compares_the_name_of_an_engine(word: str) -> None:
    for folder in ("stages", "pipeline", "cli", "processes"):
        for path in (PACKAGE / folder).rglob("*.py"):
            compared = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Compare)
                and any(isinstance(part, ast.Constant) and part.value == word for part in ast.walk(node))
            ]
            assert not compared, f"{path}:{compared[0].lineno}"


def loaded_modules(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in output.splitlines()}


def test_help_imports_none_of_torch_pyarrow_pydantic() -> None:
    code = "sys.argv = ['grpoctl', '--help']\nfrom grpoctl.cli.main import build\n"
    code += "try: build(None)()\nexcept SystemExit: pass"
    assert not loaded_modules(code) & {"torch", "pyarrow", "pydantic", "transformers", "numpy"}


@pytest.mark.parametrize(
    "modules",
    [
        "grpoctl.stages.score.stage, grpoctl.cli.reward",
        "grpoctl.settings.load, grpoctl.cli.run, grpoctl.artifacts.writer, grpoctl.inputs.policies",
        "grpoctl.pipeline.run, grpoctl.stages.rollout, grpoctl.stages.logprob, grpoctl.stages.update.stage",
        "grpoctl.stages.sync.stage, grpoctl.stages.reward_model.stage",
        "grpoctl.engines.torch.engine, grpoctl.engines.deepspeed.engine, grpoctl.engines.megatron.engine",
        "grpoctl.engines.hf.engine, grpoctl.engines.vllm.engine, grpoctl.engines.servers.engine",
    ],
)
def test_what_is_read_before_a_stage_computes_needs_no_torch(modules: str) -> None:
    assert not loaded_modules(f"import {modules}") & HEAVY


def test_files_hold_one_idea() -> None:
    long = {str(path): count for path in MODULES if (count := len(path.read_text().splitlines())) > 430}
    assert not long, f"split these: {long}"
