"""Every training engine against the single-process one, and states that continue on another engine and world size.

Needs deepspeed in this environment; processes talk over gloo, so a CPU is enough.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_of import below, is_running, wait_until
from safetensors.torch import load_file

from benchmarks import parity
from grpoctl.artifacts.artifact import read_manifest
from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.deepspeed.adam import deepspeed_adam

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return parity.table()


def test_float32_engines_equal_the_single_process_one(rows: list[dict[str, Any]]) -> None:
    exact = [row for row in rows if row["dtype"] == "float32"]
    assert {(row["engine"], row["stage"], row["num_processes"]) for row in exact} == {
        (engine, stage, count)
        for count in (1, 2)
        for engine, stage in (("torch", None), *(("deepspeed", stage) for stage in range(4)))
    } | {("megatron", None, count) for count in (1, 2, 4)}
    for row in exact:
        for name in ("loss", "gradient", "norm", "weights"):
            assert row[name] <= 1e-5, (parity.line(row), name)
        assert row["strict"] <= 1e-4, parity.line(row)


def test_bfloat16_engines_stay_within_their_band(rows: list[dict[str, Any]]) -> None:
    """Against bfloat16 on one process another cut of the batch shows in the last bits of bfloat16; see the docs."""
    for row in (row for row in rows if row["dtype"] == "bfloat16"):
        assert row["loss"] <= 3e-2 and row["gradient"] <= 3e-2 and row["norm"] <= 1e-2, parity.line(row)
        assert row["weights"] <= 1e-3, parity.line(row)
        assert row["against_float32"]["norm"] <= 0.1, parity.line(row)


def launch(count: int, *command: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*launcher, *command], check=True, env=ENVIRONMENT, cwd=ROOT)


def test_a_state_continues_exactly_and_on_another_engine_and_world_size(tmp_path: Path) -> None:
    worker = str(Path(__file__).parent / "resume_worker.py")
    for count in (1, 2, 1):
        launch(count, worker, str(tmp_path))
    found = {}
    for count in (1, 2):
        found |= json.loads((tmp_path / f"found-{count}.json").read_text())
    assert len(found) == 6 * (6 + 1 + 1) + 6 * (12 + 1)  # on two processes from one and from its own, on one from all
    for name, difference in found.items():
        before, _, after = name.partition(" → ")
        assert difference <= (0.0 if before == after else 1e-6), name


def test_deepspeeds_own_adam_continues_to_the_same_bits_from_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel multiplies βᵗ up from call to call, which a resumed process can't repeat."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    settings = OptimizerSettings(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_clip=None)
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(31, 10, 30, generator=generator)

    def trained(resume_at: int | None) -> torch.Tensor:
        weight = torch.nn.Parameter(start.clone())
        adam = deepspeed_adam([weight], settings, on_cpu=True)
        for number, gradient in enumerate(gradients):
            if number == resume_at:
                held = dict(adam.state[weight])
                adam = deepspeed_adam([weight], settings, on_cpu=True)
                adam.state[weight] = held
            adam.param_groups[0]["lr"] = 1e-2
            weight.grad = gradient.clone()
            adam.step()
        return weight.detach()

    straight = trained(None)
    assert [number for number in range(1, 30) if not torch.equal(trained(number), straight)] == []


@pytest.fixture
def arguments(small_run: Path) -> list[str]:
    folder = small_run / "iter-000000"
    inputs = [word for name in ("rollouts", "scores", "logprobs") for word in (f"--{name}", str(folder / name))]
    return ["update", *inputs, "--lr", "1e-3", "--set", "update.mini_batch_size=16", "--set", "update.adam_eps=1e-6"]


def grpoctl(*words: str, code: int = 0, launcher: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    result = subprocess.run(
        [*launcher, "-m", "grpoctl", *words, "--json"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_torchrun_and_deepspeed_launch_what_grpoctl_launches(arguments: list[str], tmp_path: Path) -> None:
    own = grpoctl(*arguments, "--out", str(tmp_path / "own"), "--set", "runtime.num_processes=2")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    by_torchrun = grpoctl(*arguments, "--out", str(tmp_path / "torchrun"), launcher=torchrun)
    assert by_torchrun["content_digest"] == own["content_digest"]
    zero = [*arguments, "--engine", "deepspeed", "--set", "runtime.deepspeed.zero_stage=1"]
    own = grpoctl(*zero, "--out", str(tmp_path / "zero"), "--set", "runtime.num_processes=2")
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--no_local_rank",
        "--num_accelerators",
        "2",
        "--module",
        "grpoctl",
        *zero,
    ]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "deepspeed"), "--result-file", str(tmp_path / "result.json")],
        env={**ENVIRONMENT, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "result.json").read_text())["content_digest"] == own["content_digest"]


def test_a_kill_while_saving_leaves_no_artifact_and_the_rerun_is_exact(arguments: list[str], tmp_path: Path) -> None:
    two = ["--set", "runtime.num_processes=2"]
    clean = grpoctl(*arguments, *two, "--out", str(tmp_path / "clean"))
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-m", "grpoctl", *arguments, *two, "--out", str(out)], env=ENVIRONMENT)
    give_up = time.monotonic() + 300
    while not list(out.glob(".tmp-update-*")):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.001)
    started = below(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in started), "the end of the ranks")
    assert read_manifest(str(out)) is None
    again = grpoctl(*arguments, *two, "--out", str(out))
    assert again["content_digest"] == clean["content_digest"]


def test_zero_3_starts_at_a_ratio_of_exactly_1_in_bfloat16(
    small_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    """Its own linear layer adds the bias apart, which bfloat16 rounds once more."""
    half = ["--set", "logprob.dtype=bfloat16", "--out", str(tmp_path / "half")]
    policies = ["--policy", "builtin:tiny", "--reference", "builtin:tiny"]
    grpoctl("logprob", "--rollouts", str(small_run / "iter-000000/rollouts"), *policies, *half)
    words = [str(tmp_path / "half") if word.endswith("/logprobs") else word for word in arguments]
    zero = ["--engine", "deepspeed", "--set", "runtime.deepspeed.zero_stage=3", "--set", "update.dtype=bfloat16"]
    record = grpoctl(*words, *zero, "--out", str(tmp_path / "a"), "--set", "runtime.num_processes=2")
    assert record["facts"]["first_ratio_max_gap"] == 0.0


def test_a_kernel_that_does_not_compile_is_told_with_the_way_out(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "PATH", str(tmp_path))
    own = ["--engine", "deepspeed", "--set", "runtime.deepspeed.optimizer=deepspeed", "--set", "runtime.device=cpu"]
    record = grpoctl(*arguments, *own, "--out", str(tmp_path / "a"), code=2)
    assert "pip install ninja" in record["error"]


@pytest.mark.parametrize("setting", [["--engine", "torch"], ["--engine", "deepspeed"]])
def test_a_gate_keeps_its_exit_code_and_message(arguments: list[str], tmp_path: Path, setting: list[str]) -> None:
    two = [*setting, "--set", "runtime.num_processes=2", "--set", "update.max_grad_norm=1e-6"]
    record = grpoctl(*arguments, *two, "--out", str(tmp_path / "a"), code=4)
    assert "grad_norm is" in record["error"] and record["exit_code"] == 4
    assert read_manifest(str(tmp_path / "a")) is None


def test_a_signal_to_the_starter_stops_all_processes(arguments: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpoctl",
        *arguments,
        "--set",
        "runtime.num_processes=2",
        "--set",
        "update.epochs=500",
    ]
    command += ["--out", str(tmp_path / "a")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE)
    wait_until(lambda: len(below(process.pid)) >= 4 or process.poll() is not None, "both ranks with their guardians")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 143, errors.decode()[-2000:]
    assert read_manifest(str(tmp_path / "a")) is None


@pytest.mark.parametrize("setting", ["engine=torch", "engine=deepspeed"])
def test_adapters_train_alike_on_two_processes(arguments: list[str], tmp_path: Path, setting: str) -> None:
    lora = [*arguments, "--set", "update.lora.rank=4"]
    grpoctl(*lora, "--out", str(tmp_path / "one"))
    grpoctl(*lora, "--out", str(tmp_path / "two"), "--set", "runtime.num_processes=2", "--set", f"update.{setting}")
    one, two = (load_file(str(tmp_path / name / "adapter/adapter_model.safetensors")) for name in ("one", "two"))
    assert set(one) == set(two)
    moved = sum(float((one[name] - two[name]).double().square().sum()) for name in one)
    assert (moved / sum(float(value.double().square().sum()) for value in one.values())) ** 0.5 < 1e-5
    assert all(torch.isfinite(value).all() for value in two.values())
