"""A small pipeline file that tests edit."""

from pathlib import Path

import pytest
from command_line import Outcome, grpoctl

PIPELINE = """\
name: test
run_dir: run
iterations: 2
seed: 17
prompts: {path: "builtin:addition", id_column: prompt_id}
rollout: {group_size: 4, prompts_per_iteration: 4, max_new_tokens: 28}
score: {rewards: [{ref: reward.py:by_length}]}
update:
  lr: 1e-4
runtime: {num_threads: 1}
"""
REWARD = "def by_length(completion):\n    return float(len(completion) % 5)\n"


@pytest.fixture
def small_pipeline(empty: Path) -> Path:
    """A pipeline file of two small iterations."""
    (empty / "reward.py").write_text(REWARD)
    (empty / "p.yaml").write_text(PIPELINE)
    return empty / "p.yaml"


def edited(pipeline: Path, old: str, new: str) -> None:
    """Change a text that must be there."""
    text = pipeline.read_text()
    assert old in text
    pipeline.write_text(text.replace(old, new))


def run(*more: object) -> Outcome:
    """Run it."""
    return grpoctl("run", "p.yaml", *more)
