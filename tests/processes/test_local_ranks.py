"""Stages shared by two processes: the same numbers, the same files, one voice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpoctl.artifacts.artifact import read_manifest
from grpoctl.inputs.policies import BUILTIN

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
TWO = ["--set", "runtime.num_processes=2"]


def grpoctl(*words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    result = subprocess.run(
        [sys.executable, "-m", "grpoctl", *words, "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr[-3000:]
    return json.loads(result.stdout), result.stderr


def test_logprob_on_two_processes_is_bit_identical(small_run: Path, tmp_path: Path) -> None:
    folder = small_run / "iter-000000"
    words = ["--rollouts", str(folder / "rollouts"), "--policy", "builtin:tiny", "--reference", "builtin:tiny"]
    record, _ = grpoctl("logprob", *words, "--set", "logprob.entropy=true", "--out", str(tmp_path / "a"), *TWO)
    one = read_manifest(str(folder / "logprobs"))
    assert one is not None and record["content_digest"] == one.manifest.content_digest


@pytest.mark.slow
def test_update_on_two_processes_takes_the_same_steps(small_run: Path, tmp_path: Path) -> None:
    folder = small_run / "iter-000000"
    inputs = [word for name in ("rollouts", "scores", "logprobs") for word in (f"--{name}", str(folder / name))]
    words = ["update", *inputs, "--lr", "1e-3", "--set", "update.mini_batch_size=16", "--set", "update.adam_eps=1e-6"]
    (one, _), (two, told) = (
        grpoctl(*words, "--out", str(tmp_path / name), *more) for name, more in (("1", []), ("2", TWO))
    )
    assert one["fingerprint"] == two["fingerprint"]
    assert two["facts"]["first_ratio_max_gap"] == 0.0
    assert two["facts"]["loss"] == pytest.approx(one["facts"]["loss"], rel=1e-5)
    assert told.count("builtin:tiny") == 1  # the first process alone speaks
    for file in ("policy/model.safetensors", "trainer_state/optimizer.safetensors"):
        ours, theirs = (load_file(str(tmp_path / name / file)) for name in ("1", "2"))
        assert set(ours) == set(theirs)
        moved = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
        assert (moved / sum(float(value.double().square().sum()) for value in ours.values())) ** 0.5 < 1e-5
        assert all(torch.isfinite(value).all() for value in theirs.values())


def test_a_refused_input_has_one_message_and_its_exit_code(small_run: Path, tmp_path: Path) -> None:
    rollouts = str(small_run / "iter-000000/rollouts")
    record, told = grpoctl("update", "--rollouts", rollouts, "--scores", rollouts, "--out", str(tmp_path), *TWO, code=3)
    assert record["exit_code"] == 3
    assert told.count("error:") == 1


def refused_policy(folder: Path, kind: str) -> None:
    """Write a policy with the built-in tokenizer that is refused: a tensor is missing, or logits are scaled."""
    tiny = BUILTIN / "tiny"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if kind == "missing":
        tensors = load_file(str(tiny / "model.safetensors"))
        del tensors["model.norm.weight"]
        save_file(tensors, str(folder / "model.safetensors"))
        return
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=0.05, max_position_embeddings=1024, eos_token_id=1, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    GraniteForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "message"), [("missing", "1 tensors don't fit the model"), ("scaled", "scale or cap logits")]
)
def test_a_model_is_refused_on_two_processes_as_on_one(
    small_run: Path, tmp_path: Path, kind: str, message: str
) -> None:
    refused_policy(tmp_path / "model", kind)
    words = ["--rollouts", str(small_run / "iter-000000/rollouts"), "--reference", str(tmp_path / "model")]
    (one, _), (two, told) = (
        grpoctl("logprob", *words, "--out", str(tmp_path / name), *more, code=3)
        for name, more in (("1", []), ("2", TWO))
    )
    assert message in one["error"] and one["error"] == two["error"]
    assert told.count("error:") == 1


@pytest.mark.parametrize("stage", ["rollout", "score", "sync"])
def test_other_stages_refuse_to_be_launched_as_a_group(stage: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "grpoctl", stage],
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert f"{stage} runs as one process; only logprob and update are started by torchrun" in result.stderr


def test_a_process_that_aborts_while_exiting_has_done_its_work(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\nif os.environ.get('RANK') == '1':\n    atexit.register(os.abort)\n"
    )
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    words = ["--rollouts", str(small_run / "iter-000000/rollouts"), "--policy", "builtin:tiny"]
    record, _ = grpoctl("logprob", *words, "--out", str(tmp_path / "l"), *TWO)
    assert record["state"] == "done"
