"""The reward model from the command line: trained on pairs, scoring rollouts, and as the only reward of a run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command_line import assert_refused, done, ended, grpoctl, manifest, rows, start, tree
from damage import edit_json, flip_bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForSequenceClassification

from grpoctl.algorithms.advantages import advantages
from grpoctl.inputs.policies import BUILTIN

TINY = BUILTIN / "tiny"
HELD_OUT_TARGET = 0.95


def working(left: int, right: int) -> str:
    (left_tens, left_units), (right_tens, right_units) = divmod(left, 10), divmod(right, 10)
    units = left_units + right_units
    carried = "+1" if units > 9 else ""
    tens = left_tens + right_tens + units // 10
    return f"<think>{left_units}+{right_units}={units},{left_tens}+{right_tens}{carried}={tens}</think>"


def addition_pairs(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """A right answer with its working against a wrong guess, the sum without tags, or a bare guess."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        left, right = generator.randrange(100), generator.randrange(100)
        guess = left + right + generator.choice([-3, -2, -1, 1, 2, 3])
        good = f"{working(left, right)}<answer>{left + right}</answer>"
        bad = generator.choice([f"<answer>{guess}</answer>", f"{working(left, right)}{left + right}", str(guess)])
        prompt = [{"role": "user", "content": f"What is {left}+{right}?"}]
        pairs.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return pairs


def write(path: Path, pairs: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(pairs), path)
    return path


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A reward model of 25 steps × 32 pairs, and what the command printed. Read only."""
    folder = tmp_path_factory.mktemp("reward-model")
    pairs = write(folder / "pairs.parquet", addition_pairs(1000))
    outcome = done(
        "reward-model", "train", "--preferences", pairs, "--base", "builtin:tiny", "--out", folder / "rm",
        "--lr", "1e-3", "--holdout-fraction", "0.2", "--json", "--set", "runtime.num_threads=1",
    )  # fmt: skip
    assert "step 25/25  loss " in outcome.err
    return folder / "rm", outcome.record


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 prompts × 4 completions. Read only."""
    out = tmp_path_factory.mktemp("rollouts") / "rollouts"
    done("rollout", "--prompts", "builtin:addition", "--limit", 6, "--group-size", 4, "--max-new-tokens", 28,
         "--policy", "builtin:tiny", "--out", out)  # fmt: skip
    return out


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A file of 12 pairs."""
    return write(tmp_path / "few.parquet", addition_pairs(12))


def train(*arguments: object) -> Any:
    return grpoctl("reward-model", "train", "--base", "builtin:tiny", "--batch-size", 4, *arguments)


def test_easy_pairs_are_learned_in_seconds(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, record = trained
    facts = record["facts"]
    assert (record["state"], facts["num_pairs"] + facts["num_held_out"], facts["num_steps"]) == ("done", 1000, 25)
    assert facts["held_out_accuracy"] >= HELD_OUT_TARGET
    assert facts["seconds"] < 60
    written = json.loads((folder / "grpoctl_reward_model.json").read_text())
    assert written["held_out_accuracy"] == facts["held_out_accuracy"]
    assert written["template"] == "messages"
    assert list(facts["loss"])[-1] == "25"
    assert facts["loss"]["25"] < 0.1 < next(iter(facts["loss"].values()))


def test_the_held_out_accuracy_is_that_of_the_written_model(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    fresh_pairs = addition_pairs(100, seed=99)
    folder, _ = trained
    both = [
        {"prompt": pair["prompt"], "completion": pair[side]} for pair in fresh_pairs for side in ("chosen", "rejected")
    ]
    scores = scores_by_hand(folder, both)
    assert np.mean(scores[::2] > scores[1::2]) >= HELD_OUT_TARGET


def scores_by_hand(folder: Path, samples: list[dict[str, Any]]) -> np.ndarray:
    """Score through transformers alone, a row at a time and unpadded."""
    from transformers import AutoModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = load_file(str(folder / "value_head.safetensors"))["value_head.weight"][0]
    result = []
    for sample in samples:
        turns = [*sample["prompt"], {"role": "assistant", "content": sample["completion"]}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            result.append(float(backbone(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] @ head))
    return np.array(result)


def test_the_folder_holds_the_base_s_tokenizer_unchanged(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, record = trained
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (TINY / name).read_bytes()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2Model"]
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".tmp")]
    written = json.loads((folder / "grpoctl_reward_model.json").read_text())
    assert record["facts"]["weights_digest"] == written["weights_digest"]


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(few: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train("--preferences", few, "--out", tmp_path / name, "--seed", seed).code == 0
    a, b, c = (tree(tmp_path / name) for name in "abc")
    assert a["model.safetensors"] == b["model.safetensors"] != c["model.safetensors"]
    assert a["value_head.safetensors"] == b["value_head.safetensors"] != c["value_head.safetensors"]


def test_the_same_inputs_again_are_done_already_and_others_a_conflict(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "rm"
    first = done("reward-model", "train", "--preferences", few, "--out", out, "--json").record
    before = tree(out)
    again = done("reward-model", "train", "--preferences", few, "--out", out, "--json", "--micro-batch-tokens", 64)
    assert again.record == {**first, "state": "already_done"}
    assert "already done" in done("reward-model", "train", "--preferences", few, "--out", out).out
    other = write(tmp_path / "other.parquet", addition_pairs(13))
    outcome = grpoctl("reward-model", "train", "--preferences", other, "--out", out, "--lr", "1e-4", "--head-only")
    assert_refused(
        outcome, 5, where=str(out), found="preferences: ", lr="reward_model.lr: 1e-05 → 0.0001",
        head="reward_model.head_only: false → true", todo="choose another --out",
    )  # fmt: skip
    assert tree(out) == before


def test_other_files_at_out_are_never_touched(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    shutil.copytree(TINY, out)
    before = tree(out)
    outcome = train("--preferences", few, "--out", out)
    assert_refused(outcome, 5, where=str(out), found="no grpoctl_reward_model.json", todo="choose another --out")
    assert tree(out) == before


def test_a_remote_folder_is_written_and_read_back(
    few: Path, tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPOCTL_CACHE", str(tmp_path / "cache"))
    for state in ("done", "already_done"):
        outcome = train("--preferences", few, "--out", "memory://models/rm", "--json")
        assert (outcome.code, outcome.record["state"]) == (0, state)
    assert (
        done("score", "--rollouts", rollouts, "--reward-model", "memory://models/rm", "--out", tmp_path / "s").code == 0
    )


def test_an_output_that_cannot_be_written_is_refused_before_training(few: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = train("--preferences", few, "--out", tmp_path / "file")
    assert_refused(outcome, 5, found="is a file", todo="choose another --out")
    outcome = train("--preferences", few, "--out", tmp_path / "file" / "rm")
    assert_refused(outcome, 3, where=str(tmp_path / "file" / "rm"), found="is a file, expected a folder")
    assert "step 1" not in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_dry_run_writes_nothing(few: Path, tmp_path: Path) -> None:
    outcome = done("reward-model", "train", "--preferences", few, "--out", tmp_path / "rm", "--dry-run", "--json")
    assert outcome.record["state"] == "planned"
    assert outcome.record["facts"]["num_steps"] == 1
    assert not (tmp_path / "rm").exists()


def test_pairs_of_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(5)]
    pairs = [{"prompt": prompts[i % 5], "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    facts = done(
        "reward-model", "train", "--preferences", write(tmp_path / "p.parquet", pairs), "--out", tmp_path / "rm",
        "--json", "--dry-run", "--holdout-fraction", "0.25",
    ).record["facts"]  # fmt: skip
    assert (facts["num_pairs"], facts["num_held_out"]) == (24, 16)


USER = [{"role": "user", "content": "2+2?"}]
LAYOUTS = {
    "messages": {"prompt": USER, "chosen": answer("4"), "rejected": answer("5")},
    "text answers to messages": {"prompt": USER, "chosen": "4", "rejected": "5"},
    "text prompt, message answers": {"prompt": "2+2?", "chosen": answer("4"), "rejected": answer("5")},
    "whole conversations": {"chosen": USER + answer("4"), "rejected": USER + answer("5")},
    "whole conversations beside the prompt": {
        "prompt": "2+2?", "chosen": USER + answer("4"), "rejected": USER + answer("5"),
    },
    "messages as JSON": {"prompt": json.dumps(USER), "chosen": json.dumps(answer("4")), "rejected": json.dumps(answer("5"))},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_conversation_reads_the_same(layout: str, tmp_path: Path) -> None:
    from grpoctl.inputs.preferences import load_preferences
    from grpoctl.settings.fields import RewardModelConfig

    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(LAYOUTS[layout]) + "\n")
    found = load_preferences(str(file), RewardModelConfig())
    assert found.format == "messages"
    assert [(pair.chosen, pair.rejected) for pair in found.pairs] == [(USER + answer("4"), USER + answer("5"))]


@pytest.mark.parametrize("row", [
    {"prompt": "Q: 2+2? A:", "chosen": " 4", "rejected": " 5"},
    {"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"},
])  # fmt: skip
def test_text_is_joined(row: dict[str, str], tmp_path: Path) -> None:
    from grpoctl.inputs.preferences import load_preferences
    from grpoctl.settings.fields import RewardModelConfig

    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    found = load_preferences(str(file), RewardModelConfig())
    assert found.format == "text"
    assert [(pair.chosen, pair.rejected) for pair in found.pairs] == [("Q: 2+2? A: 4", "Q: 2+2? A: 5")]


GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}
NO_CONTENT = [{"role": "user"}]
BAD_FILES = {
    "no chosen": (
        [{"prompt": "p", "good": "a", "rejected": "b"}],
        r"no column 'chosen', found prompt, good, rejected; .*reward_model.chosen_column",
    ),
    "null": ([GOOD, {**GOOD, "rejected": None}], r"rejected is null in 1 rows: \[1\]; remove or fill"),
    "all the same": (
        [{**GOOD, "rejected": "a"}] * 3,
        "chosen equals rejected in all 3 rows; there is nothing to learn",
    ),
    "a number": ([{**GOOD, "chosen": 3, "rejected": 4}], "row 0: chosen: found int, expected text or a message list"),
    "kinds mixed": ([{**GOOD, "chosen": answer("a")}], "row 0: one answer is text, the other a message list"),
    "no content": (
        [{"prompt": "p", "chosen": NO_CONTENT, "rejected": NO_CONTENT}],
        r"row 0: chosen\[0\]: found .*expected a message with role and content",
    ),
    "no answer": (
        [{"chosen": USER, "rejected": USER}],
        "row 0: chosen: the last turn is the user's, expected the assistant's",
    ),
    "no prompt": (
        [{"chosen": answer("a"), "rejected": answer("b")}],
        "row 0: chosen: begins with the assistant's turn .*add the prompt",
    ),
    "empty text": ([{"chosen": "", "rejected": "b"}], "row 0: an empty text has no token"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_holds_no_pairs_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[case]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    assert_refused(train("--preferences", file, "--out", tmp_path / "rm"), 3, where=str(file), found=message)
    assert not (tmp_path / "rm").exists()


def test_an_empty_file_or_none_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert_refused(train("--preferences", tmp_path / "empty.jsonl", "--out", tmp_path / "rm"), 3, found="0 bytes")
    pq.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), tmp_path / "none.parquet")
    assert_refused(train("--preferences", tmp_path / "none.parquet", "--out", tmp_path / "rm"), 3, found="no rows")
    assert_refused(train("--preferences", tmp_path / "not-there", "--out", tmp_path / "rm"), 3, found="not found")
    assert_refused(train("--out", tmp_path / "rm"), 2, todo="name the file of pairs with --preferences")


def test_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    pairs = [*addition_pairs(9), {"prompt": USER, "chosen": "4", "rejected": "4"}]
    outcome = train(
        "--preferences", write(tmp_path / "p.parquet", pairs), "--out", tmp_path / "rm", "--dry-run", "--json"
    )
    assert "chosen equals rejected in 1 of 10 rows; left out" in outcome.err
    assert outcome.record["facts"]["num_pairs"] + outcome.record["facts"]["num_held_out"] == 9


def test_long_pairs_are_refused_by_row_or_left_out(tmp_path: Path) -> None:
    pairs = [*addition_pairs(8), {"prompt": USER, "chosen": "4" * 1100, "rejected": "5"}]
    arguments = ("--preferences", write(tmp_path / "p.parquet", pairs), "--out", tmp_path / "rm", "--dry-run")
    assert_refused(
        train(*arguments),
        3,
        found=r"1 pairs are longer than 1024 tokens \(rows \[8\]\)",
        todo="reward_model.overlong=skip",
    )
    assert_refused(
        train(*arguments, "--max-tokens", 20), 3, found=r"9 pairs are longer than 20 tokens .*raise --max-tokens"
    )
    outcome = train(*arguments, "--set", "reward_model.overlong=skip", "--json")
    assert outcome.record["facts"]["num_skipped"] == 1
    assert "1 pairs are longer than 1024 tokens; left out" in outcome.err


def test_one_prompt_alone_leaves_nothing_to_hold_out(tmp_path: Path) -> None:
    pairs = [{"prompt": USER, "chosen": "4", "rejected": str(i)} for i in range(5, 9)]
    outcome = train("--preferences", write(tmp_path / "p.parquet", pairs), "--out", tmp_path / "rm", "--json")
    assert outcome.record["facts"]["held_out_accuracy"] is None
    assert "too few prompts to hold any out" in outcome.err


def test_training_that_explodes_is_a_gate(few: Path, tmp_path: Path) -> None:
    outcome = train("--preferences", few, "--out", tmp_path / "rm", "--lr", "1e30", "--epochs", 3)
    assert_refused(outcome, 4, found="step .: loss", todo="lower --lr")
    assert not (tmp_path / "rm").exists()


def test_a_reward_model_is_no_base_and_a_policy_no_reward_model(
    trained: tuple[Path, dict[str, Any]], few: Path, rollouts: Path, tmp_path: Path
) -> None:
    outcome = grpoctl("reward-model", "train", "--preferences", few, "--base", trained[0], "--out", tmp_path / "rm")
    assert_refused(outcome, 3, found="is a reward model already", todo="name a language model")
    arguments = ("--rollouts", rollouts, "--out", tmp_path / "s", "--dry-run")
    outcome = grpoctl("score", "--reward-model", "builtin:tiny", *arguments)
    assert_refused(outcome, 3, found="no value head: .*Qwen2ForCausalLM", todo="grpoctl reward-model train")


def test_rows_get_the_reward_model_s_score(
    trained: tuple[Path, dict[str, Any]], rollouts: Path, tmp_path: Path
) -> None:
    folder, _ = trained
    record = done("score", "--rollouts", rollouts, "--reward-model", folder, "--out", tmp_path / "s", "--json").record
    sampled, scored = rows(rollouts), rows(tmp_path / "s")
    samples = [{"prompt": json.loads(row["prompt"]), "completion": row["completion"]} for row in sampled]
    expected = scores_by_hand(folder, samples)
    found = np.array([row["reward"] for row in scored])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert [row["rewards"] for row in scored] == [{"reward_model": value} for value in found]
    groups = np.unique([row["group_id"] for row in scored], return_inverse=True)[1]
    np.testing.assert_allclose(
        [row["advantage"] for row in scored], advantages(found, groups, method="grpo"), rtol=1e-9
    )
    assert record["facts"]["rewards"] == {"reward_model": pytest.approx(found.mean())}
    definition = manifest(tmp_path / "s")["definition"]["reward_model"]
    written = json.loads((folder / "grpoctl_reward_model.json").read_text())
    assert definition["weights_digest"] == written["weights_digest"]
    assert definition["tokenizer_digest"] == written["tokenizer_digest"]
    assert definition["reads"].startswith("the reward model's chat template over the prompt's turns")


def test_it_adds_to_other_rewards_with_its_weight(
    trained: tuple[Path, dict[str, Any]], rollouts: Path, tmp_path: Path
) -> None:
    arguments = ("score", "--rollouts", rollouts, "--reward-model", trained[0], "--out", tmp_path / "s")
    done(*arguments, "--reward", "accuracy", "--set", "score.reward_model_weight=0.25")
    for row in rows(tmp_path / "s"):
        assert row["reward"] == pytest.approx(row["rewards"]["accuracy"] + 0.25 * row["rewards"]["reward_model"])
    moved = tmp_path / "elsewhere"
    shutil.copytree(trained[0], moved)
    again = ("score", "--rollouts", rollouts, "--reward-model", moved, "--out", tmp_path / "s", "--reward", "accuracy")
    assert (
        "already done" in done(*again, "--set", "score.reward_model_weight=0.25").out
    )  # known by digest, not by place
    assert_refused(grpoctl(*again), 5, found="score.reward_model_weight: 0.25 → 1")
    without = grpoctl("score", "--rollouts", rollouts, "--reward", "accuracy", "--out", tmp_path / "s")
    assert_refused(without, 5, found="reward_model: ")


def test_micro_batches_change_no_score(trained: tuple[Path, dict[str, Any]], rollouts: Path, tmp_path: Path) -> None:
    digests = [
        done("score", "--rollouts", rollouts, "--reward-model", trained[0], "--out", tmp_path / str(budget), "--json",
             "--set", f"runtime.micro_batch_tokens={budget}").record["content_digest"]
        for budget in (1, 500, 50_000)
    ]  # fmt: skip
    assert len(set(digests)) == 1


def test_text_rollouts_meet_a_model_of_conversations_as_a_user_s_turn(
    trained: tuple[Path, dict[str, Any]], few: Path, rollouts: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["What is 1+2?", "What is 30+4?"]}), tmp_path / "text.parquet")
    done("rollout", "--prompts", tmp_path / "text.parquet", "--group-size", 2, "--max-new-tokens", 8, "--policy",
         "builtin:tiny", "--out", tmp_path / "ro")  # fmt: skip
    done("score", "--rollouts", tmp_path / "ro", "--reward-model", trained[0], "--out", tmp_path / "s")
    samples = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "completion": row["completion"]}
        for row in rows(tmp_path / "ro")
    ]
    found = [row["reward"] for row in rows(tmp_path / "s")]
    np.testing.assert_allclose(found, scores_by_hand(trained[0], samples), rtol=0, atol=1e-4)
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "x"} for i in range(9)]
    assert train("--preferences", write(tmp_path / "p.parquet", pairs), "--out", tmp_path / "text-rm").code == 0
    done("score", "--rollouts", tmp_path / "ro", "--reward-model", tmp_path / "text-rm", "--out", tmp_path / "t")
    assert (
        manifest(tmp_path / "t")["definition"]["reward_model"]["reads"] == "prompt and completion joined, as plain text"
    )
    outcome = grpoctl("score", "--rollouts", rollouts, "--reward-model", tmp_path / "text-rm", "--out", tmp_path / "u")
    assert_refused(outcome, 3, found="was trained on plain text, but these prompts are messages")


def test_a_published_reward_model_scores_rollouts(rollouts: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Qwen2ForSequenceClassification.from_pretrained(TINY, dtype=torch.float32, num_labels=1)
    model.save_pretrained(tmp_path / "published")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "published")
    done("score", "--rollouts", rollouts, "--reward-model", tmp_path / "published", "--out", tmp_path / "s")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "published")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "published", dtype=torch.float32)
    for sampled, scored in zip(rows(rollouts), rows(tmp_path / "s"), strict=True):
        turns = [*json.loads(sampled["prompt"]), {"role": "assistant", "content": sampled["completion"]}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            assert scored["reward"] == pytest.approx(float(theirs(torch.tensor([ids])).logits[0, 0]), abs=1e-5)


@pytest.fixture
def copied(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(trained[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_damaged_reward_model_is_refused_before_it_scores(copied: Path, rollouts: Path, tmp_path: Path) -> None:
    def refused(**parts: str) -> None:
        outcome = grpoctl("score", "--rollouts", rollouts, "--reward-model", copied, "--out", tmp_path / "s")
        assert_refused(outcome, 3, where=str(copied), **parts)
        assert not (tmp_path / "s" / "_MANIFEST.json").exists()

    head, record = copied / "value_head.safetensors", copied / "grpoctl_reward_model.json"
    kept = head.read_bytes(), record.read_bytes()
    flip_bit(head, len(kept[0]) - 3)
    refused(found="weights differ from the digest in grpoctl_reward_model.json")
    head.unlink()
    refused(found="value_head.safetensors is missing and the head would be random", todo="copy the whole folder")
    head.write_bytes(kept[0])
    record.unlink()
    refused(found="has a value head but no grpoctl_reward_model.json", todo="rerun its training")
    record.write_text("{}")
    refused(found="grpoctl_reward_model.json is damaged")
    record.write_bytes(kept[1])
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    refused(found="tokenizer differ from the digest")


def test_equal_scores_are_a_gate_and_nan_is_never_a_reward(
    trained: tuple[Path, dict[str, Any]], copied: Path, rollouts: Path, tmp_path: Path
) -> None:
    def with_head(value: float) -> None:
        save_file({"value_head.weight": torch.full((1, 96), value)}, str(copied / "value_head.safetensors"))
        from grpoctl.inputs.policies import weights_digest

        edit_json(
            copied / "grpoctl_reward_model.json", lambda record: record.update(weights_digest=weights_digest(copied))
        )

    arguments = ("score", "--rollouts", rollouts, "--reward-model", copied, "--out")
    with_head(0.0)
    assert_refused(grpoctl(*arguments, tmp_path / "equal"), 4, found="all 24 rewards are 0.0; is the scorer alive")
    with_head(float("nan"))
    outcome = grpoctl(*arguments, tmp_path / "nan", "--set", "score.incomplete_budget=1")
    assert_refused(outcome, 6, found="rewards failed for 24 of 24 rows.*reward_model: the reward model returned nan")


def test_texts_beyond_its_context_are_refused_by_id(copied: Path, rollouts: Path, tmp_path: Path) -> None:
    edit_json(copied / "config.json", lambda config: config.update(max_position_embeddings=32))
    outcome = grpoctl("score", "--rollouts", rollouts, "--reward-model", copied, "--out", tmp_path / "s")
    assert_refused(
        outcome, 3, where=str(rollouts), found="texts are longer than the reward model's context of 32 tokens",
        ids=rows(rollouts)[0]["sample_id"].split("@")[0], todo="shorten prompts or rollout.max_new_tokens",
    )  # fmt: skip


def test_a_reward_may_not_take_its_name(trained: tuple[Path, dict[str, Any]], rollouts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward_model(completion, answer):\n    return 1.0\n")
    outcome = grpoctl("score", "--rollouts", rollouts, "--reward-model", trained[0], "--reward",
                      f"{tmp_path}/mine.py:reward_model", "--out", tmp_path / "s")  # fmt: skip
    assert_refused(outcome, 2, found="one is named 'reward_model'", todo="give it another `name:`")


def test_a_run_on_the_reward_model_alone_raises_its_mean_score(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(f"""
name: reward-model
run_dir: {tmp_path}/run
iterations: 6
seed: 5
policy: builtin:tiny
prompts: {{path: "builtin:addition", id_column: prompt_id}}
rollout: {{group_size: 8, prompts_per_iteration: 16, max_new_tokens: 28}}
score: {{reward_model: {trained[0]}}}
update: {{mini_batch_size: 32, lr: 2e-4, warmup_steps: 2}}
runtime: {{num_threads: 1}}
""")
    metrics = done("run", pipeline, "--json").record["metrics"]
    means = [row["reward_mean"] for row in metrics]
    assert len(means) == 6
    assert min(means[-2:]) > means[0] + metrics[0]["reward_std"]
    assert all(row["rewards"] == {"reward_model": row["reward_mean"]} for row in metrics)


def test_the_installed_command_trains_in_a_process_of_its_own(few: Path, tmp_path: Path) -> None:
    outcome = ended(start("reward-model", "train", "--preferences", few, "--out", tmp_path / "rm", "--json"))
    assert outcome.code == 0, outcome.err
    assert outcome.record["state"] == "done"
    assert "no --base: using the built-in tiny policy" in outcome.err
