"""A built-in reward's identity stands in every fingerprint of scores: it changes when a verdict can, and only then."""

import ast
import hashlib
from pathlib import Path

import pytest

import grpoctl.rewards.builtin
from grpoctl.rewards.builtin.registry import BUILTINS

FOLDER = Path(grpoctl.rewards.builtin.__file__).parent
CODE = {
    "answer": "ec96e0e156df635bb45679fc85d3ebd61df76a80f7029aaafa9a74dbe351414f",
    "gsm8k": "254a9034298c2b775a88da19946da32bc386d033ef2086a0d7158d7f127933dd",
    "length": "de07960cafebce8f43aaa0db94cf3de31c78af6767fbac77f508d3e01790857b",
    "math_answer": "ec747a7772bf0b1e314228d66393f3608ce89e8957fc29a264b3681c9d87ed46",
    "programs": "3a4f2bb2e9a66978af7d6ae5ab0f2b817526c3d6514612d6fe3a33d49ec0d3a9",
    "repetition": "c7ba237d219a32297bb3d76ce7f352ec59bb05a9b3a353b2ca1a9b196a6e77b0",
}
"""sha256 of each file's code without imports, docstrings and comments."""


def code_digest(path: Path) -> str:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[:] = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


@pytest.mark.parametrize("name", sorted(CODE))
def test_a_change_of_the_code_is_noticed(name: str) -> None:
    assert code_digest(FOLDER / f"{name}.py") == CODE[name], (
        f"{name}.py has changed: if a verdict can change by it, give it a new identity in registry.py; then note its digest"
    )


def test_every_file_with_verdicts_is_watched() -> None:
    files = {Path(builtin.make.__code__.co_filename).stem for builtin in BUILTINS.values()}
    assert files == set(CODE)
