"""Prompt files and tokenizers that can't be sampled from are refused before anything is sampled."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command_line import Outcome, assert_refused, done, grpoctl, is_committed, manifest, rows, tree, write_prompts
from damage import policy_copy, replace

USER = {"role": "user", "content": "What is 3+4?"}
BOS = "<|endoftext|>"


def rollout(prompts: Path | str, *more: object, policy: Path | str = "builtin:tiny") -> Outcome:
    given = ("--group-size", 2, "--max-new-tokens", 12, "--out", "rollouts")
    return grpoctl("rollout", "--prompts", prompts, "--policy", policy, *given, *more)


def assert_nothing_made() -> None:
    assert not Path("rollouts").exists()


def long_and_short(folder: Path) -> Path:
    texts = ["What is 1+1?", *("x" * (1100 + i) for i in range(7)), "What is 2+2?"]
    return write_prompts(folder / "p.parquet", {"prompt": texts, "id": [f"q{i}" for i in range(len(texts))]})


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_overlong_prompts_are_counted_and_named_before_sampling(empty: Path, dry: tuple[str, ...]) -> None:
    outcome = rollout(long_and_short(empty), "--set", "prompts.id_column=id", *dry)
    assert_refused(
        outcome, 3, where="p.parquet", found=r"\b7 prompts", expected="1023", todo="overlong.*skip.*truncate_left"
    )
    assert "['q1', 'q2', 'q3', 'q4', 'q5']" in outcome.error
    assert_nothing_made()


def test_overlong_prompts_are_skipped_on_request_and_counted(empty: Path) -> None:
    given = ("--set", "prompts.id_column=id", "--set", "prompts.overlong=skip", "--set", "rollout.prompts_per_shard=1")
    assert rollout(long_and_short(empty), *given).code == 0
    assert manifest("rollouts")["rows"] == {"input": 18, "ok": 4, "skipped": 14, "failed": 0}
    assert {row["prompt_id"] for row in rows("rollouts")} == {"q0", "q8"}


def test_skipping_every_prompt_is_refused(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["x" * 2000]})
    outcome = rollout(prompts, "--set", "prompts.overlong=skip")
    assert_refused(outcome, 3, where="p.parquet", found="no prompt", todo="overlong")
    assert_nothing_made()


def test_overlong_prompts_are_cut_on_the_left_on_request(empty: Path) -> None:
    assert rollout(long_and_short(empty), "--set", "prompts.overlong=truncate_left").code == 0
    lengths = [len(row["prompt_ids"]) for row in rows("rollouts")]
    assert lengths[2:16] == [1024 - 12] * 14
    assert lengths[0] < 20


def test_a_prompt_without_room_for_max_new_tokens_is_refused(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["What is 1+1?", "x" * 1018]})
    outcome = rollout(prompts)
    assert_refused(
        outcome, 3, where="p.parquet", found=r"1 prompt.*:1'", expected="1024", todo="max_new_tokens.*cap_to_context"
    )
    assert_nothing_made()


def test_cap_to_context_leaves_only_the_room_there_is(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["What is 1+1?", "x" * 1018]})
    assert rollout(prompts, "--set", "prompts.cap_to_context=true").code == 0
    assert all(len(row["prompt_ids"]) + len(row["completion_ids"]) <= 1024 for row in rows("rollouts"))


@pytest.mark.parametrize(
    ("text", "found", "todo"),
    [("", "empty", "allow_empty"), (" \n\t", "empty", "allow_empty"), (None, "null", "remove|fill|drop")],
)
def test_empty_and_null_prompts_are_refused_by_id(empty: Path, text: str | None, found: str, todo: str) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["ok?", text, "ok!"], "id": ["a", "b", "c"]})
    outcome = rollout(prompts, "--set", "prompts.id_column=id")
    assert_refused(outcome, 3, where="p.parquet", found=f"{found}.*'b'", todo=todo)
    assert_nothing_made()


def test_allow_empty_accepts_a_blank_prompt(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["ok?", " "]})
    assert rollout(prompts, "--set", "prompts.allow_empty=true").code == 0
    assert manifest("rollouts")["rows"]["ok"] == 4


def test_a_missing_prompt_column_names_the_columns_and_the_closest(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"promt": ["a"], "answer": ["b"]})
    assert_refused(
        rollout(prompts), 3, where="p.parquet", found="promt, answer", expected="'prompt'", todo="--prompt-column promt"
    )
    assert_nothing_made()


BAD_MESSAGES = [
    ([{"role": "system", "content": "s"}, USER, {"content": "c"}], r"prompt\[2\]\.role", "None", "text"),
    ([USER, {"role": "user"}], r"prompt\[1\]\.content", "None", "text"),
    ([USER, {"role": "assistant", "content": "7"}], r"prompt\[1\]\.role", "assistant", "user"),
    ([], "prompt", "empty list", "message"),
    ([{"role": "user", "content": " "}], "prompt", "empty", "allow_empty"),
]


@pytest.mark.parametrize(("messages", "where", "found", "expected"), BAD_MESSAGES)
def test_malformed_messages_are_refused_by_path(
    empty: Path, messages: list[Any], where: str, found: str, expected: str
) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    column = pa.array([[USER], messages], type=kind)
    prompts = write_prompts(empty / "p.parquet", {"prompt": column, "id": ["a", "b"]})
    outcome = rollout(prompts, "--set", "prompts.id_column=id")
    assert_refused(outcome, 3, where=rf"p\.parquet.*\bb\b.*{where}", found=found, expected=expected)
    assert_nothing_made()


@pytest.mark.parametrize("values", [[1, 2], [["a"], ["b"]], [{"text": "a"}, {"text": "b"}]])
def test_prompts_that_are_neither_text_nor_messages_are_refused(empty: Path, values: list[Any]) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": values})
    assert_refused(rollout(prompts), 3, where=r"p\.parquet.*:0.*prompt", found="int|str|dict", expected="message")
    assert_nothing_made()


def test_duplicate_ids_are_refused_and_listed(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["a", "b", "c"], "id": ["x", "y", "x"]})
    outcome = rollout(prompts, "--set", "prompts.id_column=id")
    assert_refused(outcome, 3, where=r"p\.parquet", found="more than once.*id.*'x'", todo="unique|id_column|remove")
    assert_nothing_made()


def test_equal_texts_under_different_ids_keep_their_own_groups_with_one_warning(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": ["a", "a", "a"], "id": ["x", "y", "z"]})
    outcome = rollout(prompts, "--set", "prompts.id_column=id")
    assert outcome.code == 0
    assert len([line for line in outcome.err.splitlines() if "repeat" in line]) == 1
    assert {row["group_id"] for row in rows("rollouts")} == {"x@0", "y@0", "z@0"}


def test_a_file_without_rows_is_refused(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": pa.array([], pa.string())})
    assert_refused(rollout(prompts), 3, where="p.parquet", found="no rows", expected="at least one")
    (empty / "p.jsonl").write_bytes(b"")
    assert_refused(rollout(empty / "p.jsonl"), 3, where="p.jsonl", found="0 bytes", expected="JSONL")
    assert_nothing_made()


def test_an_empty_file_among_others_is_legal_and_so_is_a_shard_without_rows(empty: Path) -> None:
    (empty / "p").mkdir()
    for name, texts in (("a", ["What is 1+1?"]), ("b", []), ("c", ["What is 2+2?", "x" * 1500])):
        write_prompts(empty / f"p/{name}.parquet", {"prompt": pa.array(texts, pa.string())})
    given = ("--set", "prompts.overlong=skip", "--set", "rollout.prompts_per_shard=1")
    assert rollout(empty / "p", *given).code == 0
    assert [shard["rows"] for shard in manifest("rollouts")["shards"]] == [2, 2, 0]
    done("score", "--rollouts", "rollouts", "--reward", "format", "--set", "score.fail_if_all_equal=never")
    done("logprob", "--rollouts", "rollouts", "--policy", "builtin:tiny")
    assert [shard["rows"] for shard in manifest("scores")["shards"]] == [2, 2, 0]
    assert [shard["rows"] for shard in manifest("logprobs")["shards"]] == [2, 2, 0]


def test_messages_need_a_chat_template(empty: Path) -> None:
    prompts = write_prompts(empty / "p.parquet", {"prompt": [[USER]]})
    policy = policy_copy(empty / "policy", template=None)
    outcome = rollout(prompts, policy=policy)
    assert_refused(
        outcome, 3, where="policy", found="no chat template", expected="messages", todo="chat_template.jinja"
    )
    assert_nothing_made()


def test_another_chat_template_than_the_rollouts_were_made_with_is_refused(work: Path) -> None:
    policy = policy_copy(work / "other", template="{{ messages[0].content }}")
    before = tree(work)
    outcome = grpoctl("logprob", "--rollouts", "rollouts", "--policy", policy, "--out", "new")
    assert_refused(
        outcome, 3, where="other", found="tokenizer", expected="rollouts", todo="one tokenizer and chat template"
    )
    assert tree(work) == before


def test_a_published_policy_with_an_edited_template_is_refused(work: Path) -> None:
    replace(work / "policies/v000001/chat_template.jinja", b"{{ messages[0].content }}")
    before = tree(work)
    outcome = grpoctl("rollout", "--policy", "policies", "--limit", 2, "--out", "new")
    assert_refused(outcome, 3, where="policies", found="tokenizer differ", expected="digest", todo="damaged or edited")
    assert tree(work) == before


def bos_policy(folder: Path) -> Path:
    """Return a policy whose tokenizer puts a begin token in front, as Llama's does."""
    policy = policy_copy(folder / "policy", tokenizer={"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast"})
    content = json.loads((policy / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    replace(policy / "tokenizer.json", json.dumps(content).encode())
    return policy


def test_a_second_begin_token_is_refused(empty: Path) -> None:
    policy = bos_policy(empty)
    prompts = write_prompts(empty / "p.parquet", {"prompt": [f"{BOS}What is 1+1?"]})
    outcome = rollout(prompts, policy=policy)
    assert_refused(outcome, 3, where=":0", found="two BOS", todo="remove the one")
    assert_nothing_made()


def test_a_template_that_writes_the_begin_token_gets_no_second_one(empty: Path) -> None:
    policy = bos_policy(empty)
    replace(policy / "chat_template.jinja", (BOS + "{{ messages[0].content }}").encode())
    prompts = write_prompts(empty / "p.parquet", {"prompt": [[USER]]})
    assert rollout(prompts, policy=policy).code == 0
    assert [ids[:2].count(0) for ids in (row["prompt_ids"] for row in rows("rollouts"))] == [1, 1]


NO_EOS = {"eos_token_id": None}
LLAMA = {"model_type": "llama"}  # whose tokenizer class has no end token of its own, unlike Qwen2's
NO_EOS_TOKEN = {"eos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_model_without_an_end_token_is_refused(empty: Path) -> None:
    policy = policy_copy(empty / "policy", config=NO_EOS | LLAMA, generation=NO_EOS, tokenizer=NO_EOS_TOKEN)
    outcome = rollout("builtin:addition", "--limit", 2, policy=policy)
    assert_refused(
        outcome, 3, where="policy", found="no end-of-sequence", expected="eos_token_id", todo="set eos_token_id"
    )
    assert_nothing_made()


def test_an_end_token_outside_the_vocabulary_is_refused(empty: Path) -> None:
    policy = policy_copy(
        empty / "policy", config=NO_EOS | LLAMA, generation={"eos_token_id": 999}, tokenizer=NO_EOS_TOKEN
    )
    outcome = rollout("builtin:addition", "--limit", 2, policy=policy)
    assert_refused(outcome, 3, where="policy", found="999", expected="320", todo="eos_token_id")
    assert_nothing_made()


def test_padding_with_the_end_token_changes_no_completion(work: Path) -> None:
    policy = policy_copy(
        work / "eos_as_pad",
        config={"pad_token_id": 1},
        generation={"pad_token_id": 1},
        tokenizer={"pad_token": "<|im_end|>"},
    )
    given = ("--group-size", 4, "--limit", 4, "--max-new-tokens", 28, "--seed", 3)
    done("rollout", "--policy", policy, *given, "--out", "padded")
    names = ("sample_id", "completion_ids", "completion_mask", "rollout_logprobs")
    ours, theirs = rows("padded"), rows("rollouts")
    assert [[row[name] for name in names] for row in ours] == [[row[name] for name in names] for row in theirs]
    assert all(row["completion_mask"] == [True] * len(row["completion_ids"]) for row in ours)


def test_a_pad_token_may_be_missing(empty: Path) -> None:
    none = {"pad_token_id": None}
    policy = policy_copy(empty / "policy", config=none, generation=none, tokenizer={"pad_token": None})
    assert rollout("builtin:addition", "--limit", 3, policy=policy).code == 0
    assert is_committed("rollouts")


def test_prompts_from_a_table_that_is_not_one_are_refused(empty: Path) -> None:
    (empty / "p.parquet").write_bytes(b"hello, I am a text file")
    assert_refused(rollout("p.parquet"), 3, where="p.parquet", found="hell", expected="Parquet")
    write_prompts(empty / "cut.parquet", {"prompt": ["a" * 500, "b"]})
    replace(empty / "cut.parquet", (empty / "cut.parquet").read_bytes()[:-40])
    assert_refused(rollout("cut.parquet"), 3, where="cut.parquet", found="can't be read|truncated")
    assert_refused(rollout("nowhere.parquet"), 3, where="nowhere.parquet", found="not found", todo="check the path")
    assert_nothing_made()


@pytest.mark.parametrize("folder", ["rollouts", "data"])
def test_unfinished_work_of_ours_is_no_data(work: Path, folder: str) -> None:
    """A killed rollout's folder holds shard records in JSON: no rows of anybody's."""
    Path("rollouts/_MANIFEST.json").unlink()
    shutil.copytree("rollouts", "data/rollouts")
    refused = grpoctl("rollout", "--prompts", folder, "--out", "../new", "--policy", "builtin:tiny")
    parts = {
        "where": "rollouts",
        "found": r"a folder without a manifest \(unfinished work\?\)",
        "todo": "rerun the stage",
    }
    assert_refused(refused, 3, **parts)
    assert_refused(grpoctl("reward", "test", "accuracy", "--data", folder), 3, **parts)
    assert_refused(grpoctl("reward-model", "train", "--preferences", folder, "--out", "../rm"), 3, **parts)


def test_a_run_s_folder_is_no_data(work: Path) -> None:
    refused = grpoctl("rollout", "--prompts", ".", "--out", "../new", "--policy", "builtin:tiny")
    assert_refused(refused, 3, found="holds an artifact of grpoctl", todo="name data files, or that artifact itself")
