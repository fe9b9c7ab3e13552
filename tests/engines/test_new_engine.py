"""An engine is a value: a package that exists in this test alone brings a sampler and a trainer by its entry points."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import manifest, rows

PACKAGE = """
import numpy as np
from grpoctl.engines.base import Sample
from grpoctl.engines.registry import SamplingEngine, TrainingEngine
from grpoctl.engines.torch.engine import load, make_trainer
from grpoctl.errors import UsageError


class Echo:
    name = "echo 1.0"
    reproducible = True

    def sample(self, requests, settings):
        ids = np.array([1], np.int32)
        return [Sample(completion_ids=ids, logprobs=np.zeros(1, np.float32), finish_reason="stop") for _ in requests]


class sampling:
    ENGINE = SamplingEngine(sampler=lambda job, policy, warm: Echo())


def refuse(update, runtime):
    if update.weight_decay:
        raise UsageError("update.weight_decay: engine mirror doesn't have it")


class training:
    ENGINE = TrainingEngine(load=load, trainer=make_trainer, forward="mirror", refuse=refuse)
"""
ENTRY_POINTS = """
[grpoctl.sampling_engines]
echo = mirror_sampling

[grpoctl.training_engines]
mirror = mirror_training
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder on the path as pip leaves one: modules, and the package's entry points."""
    site = tmp_path / "site"
    (site / "mirror-1.0.dist-info").mkdir(parents=True)
    (site / "mirror-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mirror\nVersion: 1.0\n")
    (site / "mirror-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "mirror.py").write_text(PACKAGE)
    for kind in ("sampling", "training"):
        (site / f"mirror_{kind}.py").write_text(f"from mirror import {kind}\nENGINE = {kind}.ENGINE\n")
    return site


def grpoctl(package: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpoctl", *map(str, words)],
        env={**os.environ, "PYTHONPATH": f"{package}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_sampler_samples(package: Path, empty: Path) -> None:
    result = grpoctl(package, "rollout", "--engine", "echo", "--limit", 2, "--group-size", 2)
    assert result.returncode == 0, result.stderr
    assert [row["completion_ids"] for row in rows("rollouts")] == [[1]] * 4
    assert manifest("rollouts")["sampling"]["engine"] == "echo 1.0"
    assert "hf|vllm|server|echo" in grpoctl(package, "rollout", "--help").stdout


def test_its_trainer_trains_recomputes_and_refuses(package: Path, work: Path) -> None:
    given = (
        "--rollouts",
        "rollouts",
        "--scores",
        "scores",
        "--logprobs",
        "mirrored",
        "--lr",
        "1e-4",
        "--engine",
        "mirror",
    )
    result = grpoctl(package, "logprob", "--policy", "builtin:tiny", "--engine", "mirror", "--out", "mirrored")
    assert result.returncode == 0, result.stderr
    result = grpoctl(package, "update", *given, "--out", "new")
    assert result.returncode == 0, result.stderr
    assert manifest("new")["stats"]["first_ratio_max_gap"] == 0.0
    refused = grpoctl(package, "update", *given, "--out", "newer", "--set", "update.weight_decay=0.1")
    assert refused.returncode == 2 and "engine mirror doesn't have it" in refused.stderr


def test_without_the_package_its_names_are_unknown(empty: Path) -> None:
    result = grpoctl(Path("nowhere"), "rollout", "--engine", "echo")
    assert result.returncode == 2
    assert "--engine: rollout.engine: found 'echo', expected 'hf', 'vllm' or 'server'" in result.stderr
