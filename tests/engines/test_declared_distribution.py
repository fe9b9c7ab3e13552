"""A sampler draws from the declared distribution and nothing else, whatever the model's own folder says.

The proof is the trainer's: every kept log-probability is recomputed by the training framework, which knows of none of it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, done, manifest, rows, write_prompts
from damage import TINY

SAMPLING = ("--group-size", 4, "--limit", 4, "--max-new-tokens", 28, "--seed", 3)
OF_A_MODEL: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "encoder's penalty": {"encoder_repetition_penalty": 1.5},
    "n-gram ban": {"no_repeat_ngram_size": 1},
    "least length": {"min_length": 40, "min_new_tokens": 24},
    "suppressed": {"suppress_tokens": [1, 316, 317, 318, 319], "begin_suppress_tokens": [316, 318]},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 9},
    "banned words": {"bad_words_ids": [[316], [318]]},
    "biased words": {"sequence_bias": [[[316], -8.0]]},
    "time limit": {"max_time": 1e-6},
    "own sampling": {"do_sample": True, "temperature": 0.2, "top_k": 3, "top_p": 0.3, "min_p": 0.2, "typical_p": 0.5},
    "cut-offs": {"epsilon_cutoff": 0.3, "eta_cutoff": 0.3},
    "length decay": {"exponential_decay_length_penalty": [1, 1.5]},
    "beams": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "guidance": {"guidance_scale": 2.0},
    "own limit": {"max_new_tokens": 2, "max_length": 3},
    "own stop": {"stop_strings": ["<answer>"]},
    "several at once": {
        "do_sample": True,
        "num_return_sequences": 2,
        "prompt_lookup_num_tokens": 3,
        "renormalize_logits": True,
    },
}


def model(folder: str, **generation: Any) -> str:
    shutil.copytree(TINY, folder)
    path = Path(folder) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    return folder


def sampled(policy: str, out: str, *more: object) -> Outcome:
    return done("rollout", "--policy", policy, *SAMPLING, "--out", out, *more)


def drawn(out: str) -> list[tuple[list[int], list[float], str]]:
    return [(row["completion_ids"], row["rollout_logprobs"], row["finish_reason"]) for row in rows(out)]


def gap(policy: str, rollouts: str) -> float:
    """Return the largest difference between kept and recomputed log-probabilities, nats."""
    done("logprob", "--rollouts", rollouts, "--policy", policy, "--out", f"{rollouts}-logprobs")
    return manifest(f"{rollouts}-logprobs")["stats"]["rollout_gap_max"]


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_model_s_own_generation_config_changes_no_draw(empty: Path, name: str) -> None:
    sampled(model("plain"), "expected")
    told = sampled(model("own", **OF_A_MODEL[name]), "found")
    assert drawn("found") == drawn("expected")
    assert "generation_config.json isn't applied" in told.err
    assert next(iter({*OF_A_MODEL[name]} - {"do_sample"})) in told.err


def test_only_its_end_tokens_are_taken(empty: Path) -> None:
    sampled(model("plain"), "expected")
    told = sampled(model("own", eos_token_id=[1, 319]), "found")
    assert "isn't applied" not in told.err
    assert any(ids[-1] == 319 for ids, _, _ in drawn("found"))
    for (ids, logprobs, _), (whole, others, _) in zip(drawn("found"), drawn("expected"), strict=True):
        cut = next((i + 1 for i, token in enumerate(whole) if token in (1, 319)), len(whole))
        assert (ids, logprobs) == (whole[:cut], others[:cut])


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("stop", ["=<", "?\\n<|im_end|>", "<|im_end|>\\n<|im_start|>assistant\\n<", "\\n<"])
def test_a_stop_string_that_the_prompt_begins_ends_nothing(empty: Path, stop: str, pad: int) -> None:
    """An engine that looks at prompt and completion together stops at the first token; what it pads isn't sampled."""
    policy = model("plain", pad_token_id=pad)
    write_prompts("p.parquet", {"prompt": ["What is 3+4?\n", "12+13=", "5+8="]})
    stops = ("--prompts", "p.parquet", "--set", f"rollout.stop={json.dumps([json.loads(json.dumps(stop))])}")
    sampled(policy, "plain-rows", "--prompts", "p.parquet")
    sampled(policy, "found", *stops)
    assert gap(policy, "found") < 1e-4
    for row, whole in zip(rows("found"), rows("plain-rows"), strict=True):
        if stop not in whole["completion"]:
            assert row["completion_ids"] == whole["completion_ids"]


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("stop", ["</think>", "=", "1", ",", "<answer>8", "0<"])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(empty: Path, stop: str, pad: int) -> None:
    policy = model("plain", pad_token_id=pad)
    sampled(policy, "whole")
    sampled(policy, "found", "--set", f"rollout.stop={json.dumps([stop])}")
    assert gap(policy, "found") < 1e-4
    for row, whole in zip(rows("found"), rows("whole"), strict=True):
        kept = len(row["completion_ids"])
        assert row["completion_ids"] == whole["completion_ids"][:kept]
        assert stop not in row["completion"]
        if stop in whole["completion"]:
            assert row["completion"] == whole["completion"].partition(stop)[0]
            assert row["finish_reason"] == "stop"
        else:
            assert kept == len(whole["completion_ids"])


def test_a_stop_string_that_is_a_special_token_ends_a_completion(empty: Path) -> None:
    """Special tokens have no text in a completion, so such a string becomes the token's id, on every engine alike."""
    policy = model("plain", eos_token_id=0)  # nothing ends by itself
    sampled(policy, "found", "--set", 'rollout.stop=["<|im_end|>"]', "--set", "rollout.max_truncated_ratio=1")
    ended = [row for row in rows("found") if row["finish_reason"] == "stop"]
    assert ended and all(row["completion_ids"][-1] == 1 and 1 not in row["completion_ids"][:-1] for row in ended)
    assert gap(policy, "found") < 1e-4
