"""vLLM in process, for real: needs an environment with vllm, named by GRPOCTL_VLLM_PYTHON (`make env-vllm`)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from addition import QUICKSTART, addition_prompts

from grpoctl.artifacts.artifact import open_artifact
from grpoctl.artifacts.tables import ROLLOUTS
from grpoctl.inputs.policies import BUILTIN

pytestmark = pytest.mark.integration
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
EAGER = ["--set", "runtime.enforce_eager=true"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("GRPOCTL_VLLM_PYTHON", "")
    assert Path(python).is_file(), "GRPOCTL_VLLM_PYTHON names no interpreter: `make env-vllm` makes one, then export it"
    return python


def grpoctl(python: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = subprocess.run(
        [python, "-m", "grpoctl", *arguments, "--json"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stderr[-3000:]
    return json.loads(result.stdout)


def write_prompts(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_agree_with_the_training_forward(vllm_python: str, tmp_path: Path, temperature: float) -> None:
    prompts = write_prompts(tmp_path / "p.parquet", addition_prompts(8))
    out = str(tmp_path / "rollouts")
    grpoctl(
        vllm_python, "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "8", "--max-new-tokens", "28",
        "--temperature", str(temperature), "--out", out, *EAGER,
    )  # fmt: skip
    table = open_artifact(out, table="rollouts").read()
    assert table.column_names == [column.name for column in ROLLOUTS.columns]
    assert set(table["status"].to_pylist()) == {"ok"}
    assert len(set(table["completion"].to_pylist()[:8])) > 1
    facts = grpoctl(
        sys.executable, "logprob", "--rollouts", out, "--policy", "builtin:tiny", "--out", str(tmp_path / "logprobs")
    )["facts"]
    assert facts["rollout_gap_max"] <= 1e-4


@pytest.mark.parametrize("group_size", [1, 64])
def test_group_sizes(vllm_python: str, tmp_path: Path, group_size: int) -> None:
    prompts = write_prompts(tmp_path / "p.parquet", addition_prompts(2))
    record = grpoctl(
        vllm_python, "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", str(group_size),
        "--max-new-tokens", "28", "--out", str(tmp_path / "r"), *EAGER,
    )  # fmt: skip
    assert record["rows"]["ok"] == 2 * group_size


def test_a_full_context_and_a_prompt_of_context_less_one(vllm_python: str, tmp_path: Path) -> None:
    texts = ["1" * 1023, "1" * 1000, "1"]  # every digit is a token of its own; the context is 1024
    prompts = write_prompts(tmp_path / "p.parquet", pa.table({"prompt": texts}))
    out = str(tmp_path / "r")
    grpoctl(
        vllm_python, "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "2", "--max-new-tokens", "40",
        "--set", "prompts.cap_to_context=true", "--out", out, *EAGER,
    )  # fmt: skip
    rows = open_artifact(out, table="rollouts").read().to_pylist()
    assert [len(row["prompt_ids"]) for row in rows[::2]] == [1023, 1000, 1]
    assert all(len(row["prompt_ids"]) + len(row["completion_ids"]) <= 1024 for row in rows)
    assert {len(row["completion_ids"]) for row in rows[:2]} == {1}


def test_stop_strings_and_end_tokens_stay_in_the_ids(vllm_python: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.parquet", addition_prompts(4))
    out = str(tmp_path / "r")
    grpoctl(
        vllm_python, "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "4", "--max-new-tokens", "28",
        "--set", "rollout.stop=['</answer>']", "--out", out, *EAGER,
    )  # fmt: skip
    rows = open_artifact(out, table="rollouts").read().to_pylist()
    answered = [row for row in rows if row["completion_ids"][-1] == 319]  # the tag is one token
    assert answered
    assert all("</answer>" not in row["completion"] and row["finish_reason"] == "stop" for row in answered)
    assert all(row["completion_ids"][-1] in (1, 319) for row in rows if row["finish_reason"] == "stop")


OPINIONATED = {
    "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 24, "suppress_tokens": [316, 318],
    "temperature": 0.2, "top_k": 3, "top_p": 0.3, "min_p": 0.2, "do_sample": True, "max_new_tokens": 2,
}  # fmt: skip
"""A generation_config.json that would change every draw."""


def opinionated(folder: Path) -> str:
    """Return a copy of the built-in policy with a generation_config.json of its own."""
    shutil.copytree(BUILTIN / "tiny", folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **OPINIONATED}))
    return str(folder)


@pytest.mark.parametrize("stop", [[], ["=<"], ["<|im_end|>"], ["</think>"]])
def test_a_model_s_own_generation_config_changes_no_draw(vllm_python: str, tmp_path: Path, stop: list[str]) -> None:
    prompts = write_prompts(tmp_path / "p.parquet", addition_prompts(4))
    own = opinionated(tmp_path / "own")
    drawn = {}
    for policy in ("builtin:tiny", own):
        out = str(tmp_path / f"r-{len(drawn)}")
        grpoctl(
            vllm_python, "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "4", "--max-new-tokens", "28",
            "--policy", policy, "--set", f"rollout.stop={json.dumps(stop)}", "--out", out, *EAGER,
        )  # fmt: skip
        drawn[policy] = open_artifact(out, table="rollouts").read()["completion_ids"].to_pylist()
        lines = ["logprob", "--rollouts", out, "--policy", policy, "--out", f"{out}-l"]
        assert grpoctl(sys.executable, *lines)["facts"]["rollout_gap_max"] <= 1e-4
    assert drawn[own] == drawn["builtin:tiny"]


def test_a_warm_engine_samples_from_the_new_weights(vllm_python: str, tmp_path: Path) -> None:
    """Three iterations in one engine; every later rollout must match the recomputed log-probabilities of its policy."""
    record = grpoctl(
        sys.executable, "run", QUICKSTART, "--run-dir", str(tmp_path / "run"), "--iterations", "3",
        "--set", "rollout.engine=vllm", "--set", f"runtime.python={{rollout: {vllm_python}}}",
        "--set", "update.lr=1e-3", *EAGER,
    )  # fmt: skip
    assert [row["rollout_gap_max"] < 2e-4 for row in record["metrics"]] == [True, True, True]


def test_a_killed_engine_loses_one_shard_at_most(vllm_python: str, tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path / "p.parquet", addition_prompts(160)
    )  # far more than is sampled before the signal comes
    command = [
        vllm_python, "-m", "grpoctl", "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "16",
        "--max-new-tokens", "28", "--set", "rollout.prompts_per_shard=2", "--out", str(tmp_path / "r"), *EAGER,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    shards = tmp_path / "r/_shards"
    while process.poll() is None and not (shards.is_dir() and len(list(shards.iterdir())) >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    assert 3 <= len(before) < 80
    assert not (tmp_path / "r/_MANIFEST.json").exists()
    assert subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0
    assert all((shards / name).read_bytes() == data for name, data in before.items())
    assert open_artifact(str(tmp_path / "r"), table="rollouts").manifest.rows.ok == 160 * 16


def test_a_dead_interpreter_is_try_again(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    record = grpoctl(
        sys.executable, "run", QUICKSTART, "--run-dir", str(tmp_path / "run"), "--iterations", "1",
        "--set", f"runtime.python={{rollout: {fake}}}", code=75,
    )  # fmt: skip
    assert "ended with status 3" in record["error"]
    shutil.rmtree(tmp_path / "run")


def test_a_hanging_engine_ends_the_stage_with_try_again_and_a_rerun_completes(vllm_python: str, tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path / "p.parquet", addition_prompts(160)
    )  # far more than is sampled before the signal comes
    command = [
        vllm_python, "-m", "grpoctl", "rollout", "--engine", "vllm", "--prompts", prompts, "--group-size", "16",
        "--max-new-tokens", "28", "--set", "rollout.prompts_per_shard=2", "--out", str(tmp_path / "r"), *EAGER,
    ]  # fmt: skip
    apart = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the engine in a process that can be frozen
    process = subprocess.Popen(
        [*command, "--set", "runtime.engine_timeout_seconds=5"], env=apart, stderr=subprocess.PIPE, text=True
    )
    shards = tmp_path / "r/_shards"
    while process.poll() is None and not (shards.is_dir() and list(shards.iterdir())):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    frozen = [int(pid) for pid in children if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]
    assert frozen
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 75, told[-3000:]
    assert "did nothing for 5 s (runtime.engine_timeout_seconds): it hangs" in told
    while any(Path(f"/proc/{pid}").exists() for pid in frozen):
        time.sleep(0.05)
    assert not (tmp_path / "r/_MANIFEST.json").exists() and list(shards.iterdir())
    assert subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "engine",
    [
        ["--engine", "torch", "--set", "runtime.num_processes=2"],
        ["--engine", "deepspeed", "--set", "runtime.num_processes=2", "--set", "runtime.deepspeed.zero_stage=3"],
        [
            "--engine",
            "megatron",
            "--set",
            "runtime.num_processes=3",
            "--set",
            "runtime.megatron.tensor_parallel_size=3",
        ],
    ],
    ids=["FSDP2", "ZeRO 3", "Megatron TP 3"],
)
def test_vllm_samples_from_what_a_training_engine_exported(
    vllm_python: str, small_run: Path, tmp_path: Path, engine: list[str]
) -> None:
    folder = small_run / "iter-000000"
    inputs = [word for name in ("rollouts", "scores", "logprobs") for word in (f"--{name}", str(folder / name))]
    update = str(tmp_path / "update")
    grpoctl(sys.executable, "update", *inputs, "--lr", "1e-3", "--out", update, *engine)
    sampling = ["--policy", update, "--limit", "8", "--group-size", "4", "--max-new-tokens", "28"]
    grpoctl(vllm_python, "rollout", "--engine", "vllm", *sampling, "--out", str(tmp_path / "r"), *EAGER)
    words = ["--rollouts", str(tmp_path / "r"), "--policy", update, "--out", str(tmp_path / "l")]
    assert grpoctl(sys.executable, "logprob", *words)["facts"]["rollout_gap_max"] < 2e-4


def test_a_warm_engine_keeps_the_base_and_is_given_each_new_policys_adapters(vllm_python: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    record = grpoctl(
        sys.executable, "run", QUICKSTART, "--run-dir", str(run_dir), "--iterations", "4",
        "--set", "rollout.engine=vllm", "--set", f"runtime.python={{rollout: {vllm_python}}}",
        "--set", "update.lora.rank=4", "--set", "update.lr=1e-2", "--set", "sync.adapters=beside",
        "--set", "runtime.vllm_adapters=true", *EAGER,
    )  # fmt: skip
    assert [row["rollout_gap_max"] < 5e-4 for row in record["metrics"]] == [True] * 4
    published = run_dir / "policies/v000003"
    assert {path.name for path in (published / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    engine = open_artifact(str(run_dir / "iter-000003/rollouts"), table="rollouts").manifest.sampling
    assert engine is not None and engine.engine.startswith("vllm")
    (published / "adapter/adapter_model.safetensors").unlink()  # other adapters than the policy's don't pass for it
    shutil.copy(run_dir / "policies/v000001/adapter/adapter_model.safetensors", published / "adapter")
    sampling = ["--policy", str(published), "--limit", "4", "--group-size", "4", "--max-new-tokens", "28"]
    refused = grpoctl(
        vllm_python, "rollout", "--engine", "vllm", *sampling, "--out", str(tmp_path / "r"), *EAGER,
        "--set", "runtime.vllm_adapters=true", code=3,
    )  # fmt: skip
    assert "adapter/ differs from the digest in grpoctl_policy.json" in refused["error"]
