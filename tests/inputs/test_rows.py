"""What a data file says arrives as it says it, through sampling and back, or is refused by file and line."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Outcome, assert_refused, done, grpoctl, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from grpoctl.errors import InputRefused
from grpoctl.inputs.json_columns import plain_rows
from grpoctl.inputs.rows import read_rows

WORDS: dict[str, list[Any]] = {
    "dates": ["2024-05-01", "2024-05-01T10:00:00Z", "10:30"],
    "numbers as text": ["007", "1e5", "1,000", " 19 ", "NaN", "true", ""],
    "integers beside floats": [19, 7.5, -0.0, 1e100],
    "integers beyond 64 bits": [123456789012345678901234, -1, 2**63],
    "text beside numbers": ["19", 19, True, None],
    "empty objects": [{}, {"a": 1}, None],
    "objects of other fields": [{"a": 1}, {"b": "x"}, {"b": None}],
    "lists of several kinds": [[1, "a"], [], [None, 2.5]],
    "arrays of objects": [[{"k": "2024-01-01"}], [{"k": "x"}, {"k": "y"}], []],
    "dates within": [{"when": "2024-05-01", "n": 3}, {"when": "x", "n": 4}],
    "booleans": [True, False, None],
    "odd text": ["a\u2028b", "ünï", "\x00\x1f", "\\n", '"'],
}


def same(found: Any, written: Any) -> bool:
    """Return whether two JSON values are equal, kinds of numbers and truth included."""
    return json.dumps(found, sort_keys=True) == json.dumps(written, sort_keys=True)


def lines(path: Path, values: list[Any]) -> Path:
    text = "".join(json.dumps({"prompt": f"What is {i}+1?", "answer": v}) + "\n" for i, v in enumerate(values))
    path.write_text(text)
    return path


def rollout(path: object, *more: object) -> Outcome:
    given = ("--group-size", 2, "--max-new-tokens", 4, "--set", "rollout.max_truncated_ratio=1")
    return grpoctl("rollout", "--policy", "builtin:tiny", "--prompts", path, *given, *more)


@pytest.mark.parametrize("name", WORDS)
def test_a_reward_gets_what_the_file_says(empty: Path, name: str) -> None:
    written = WORDS[name]
    lines(Path("p.jsonl"), written)
    Path("r.py").write_text(
        "import json\ndef shown(completion, answer=None):\n    return {'score': 1.0, 'said': json.dumps(answer)}\n"
    )
    outcome = rollout("p.jsonl")
    assert outcome.code == 0, outcome.err
    never = ("--set", "score.fail_if_all_equal=never", "--set", "score.rewards=[{ref: 'r.py:shown', allow_null: true}]")
    done("score", *never)
    from grpoctl.artifacts.artifact import open_artifact
    from grpoctl.stages.score.scorer import COLUMNS, source_rows

    artifact = open_artifact("rollouts", table="rollouts")
    found = [row["source"]["answer"] for shard in artifact.read_shards(COLUMNS) for row in source_rows(shard)][::2]
    assert all(same(a, b) for a, b in zip(found, written, strict=True)), found
    record = done("reward", "test", "r.py:shown", "--data", "rollouts", "-n", 2 * len(written), "--json").record
    shown = record["rows"][::2]
    assert [json.loads(row["extras"]["said"]) for row in shown if row["extras"]] == [
        json.loads(json.dumps(value)) for value, row in zip(written, shown, strict=True) if row["extras"]
    ]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.fixed_dictionaries({"a": VALUES, "b": SCALARS}), min_size=1, max_size=5))
def test_any_json_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("json") / "p.jsonl"
    try:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values))
    except UnicodeEncodeError:
        return  # half a surrogate pair: no file holds it
    table, _ = read_rows(str(path))
    assert all(same(found, row) for found, row in zip(plain_rows(table), values, strict=True))
    other = path.with_suffix(".parquet")
    pq.write_table(table, other)
    assert all(same(found, row) for found, row in zip(plain_rows(pq.read_table(other)), values, strict=True))


REFUSED: dict[str, tuple[str, str, str]] = {
    "null alone": ("null\n", ":1: found null", "expected an object"),
    "a number": ('{"prompt": "x"}\n3\n', ":2: found 3", "expected an object"),
    "cut off": ('{"prompt": "x"}\n\n{"prompt": "y"\n', ":3:", "can't be read as JSON"),
    "no number": ('{"prompt": "x", "n": NaN}\n', ":1: NaN", "write it as text or null"),
    "too large": ('{"prompt": "x"}\n{"prompt": "x", "n": 1e999}\n', ":2: 1e999", "write it as text or null"),
    "endless digits": ('{"prompt": "x", "n": ' + "9" * 5000 + "}\n", ":1: can't be read as JSON", "write it as text"),
    "twice in one object": ('{"prompt": "x", "a": 1, "a": 2}\n', ":1: 'a' stands twice", "keep one"),
    "spread over lines": ('{\n "prompt": "x"\n}\n', ":1:", "one object a line"),
    "too deep": ('{"prompt": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", ":1: nested too deeply", "flatten"),
    "half a pair": ('{"prompt": "x", "a": "\\ud800"}\n', "surrogates", "re-encode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_column_can_hold_is_refused_by_line(empty: Path, name: str) -> None:
    text, found, expected = REFUSED[name]
    Path("p.jsonl").write_text(text)
    assert_refused(rollout("p.jsonl"), 3, where="p.jsonl", found=found, expected=expected)


TABLE = pa.table({"prompt": ["What is 1+2?", "What is 3+4?"], "answer": ["3", "7"]})


def write(path: str, table: pa.Table = TABLE) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if ".parquet" in path:
        pq.write_table(table, path)
    elif ".arrow" in path:
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    else:
        rows = table.to_pylist()
        text = (
            json.dumps(rows)
            if ".json" in path and ".jsonl" not in path
            else "".join(json.dumps(r) + "\n" for r in rows)
        )
        if ".csv" in path:
            text = "prompt,answer\r\n" + "".join(f'"{r["prompt"]}",{r["answer"]}\r\n' for r in rows)
        data = text.encode()
        if path.endswith(".gz"):
            data = gzip.compress(data)
        if path.endswith(".zst"):
            data = pa.Codec("zstd").compress(data, asbytes=True)
        Path(path).write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "p.parquet",
        "p.jsonl",
        "p.ndjson",
        "p.json",
        "p.csv",
        "p.arrow",
        "p.jsonl.gz",
        "p.jsonl.zst",
        "p.csv.gz",
        "q[A].jsonl",
    ],
)
def test_every_format_gives_the_same_rows(empty: Path, name: str) -> None:
    write(name)
    if name == "q[A].jsonl":
        write("qA.jsonl", TABLE.slice(0, 1))  # what the name is as a pattern
    table, _ = read_rows(name)
    assert plain_rows(table) == TABLE.to_pylist()


def test_csv_values_are_text_as_they_stand(empty: Path) -> None:
    Path("p.csv").write_text('prompt,answer,when\n"a, b",007,2024-05-01\n"c\nd",,x\n')
    assert plain_rows(read_rows("p.csv")[0]) == [
        {"prompt": "a, b", "answer": "007", "when": "2024-05-01"},
        {"prompt": "c\nd", "answer": "", "when": "x"},
    ]
    Path("p.csv").write_text("prompt,answer\na,1\nb,2,3\n")
    assert_refused(rollout("p.csv"), 3, where=r"p.csv:3", found="3 values for 2 columns", todo="quote")
    Path("p.csv").write_text("prompt,prompt\na,1\n")
    assert_refused(rollout("p.csv"), 3, found="stand twice", todo="rename")


def test_columns_of_one_name_are_refused(empty: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"]), "p.parquet")
    assert_refused(rollout("p.parquet"), 3, found="stand twice", todo="rename")


@pytest.mark.parametrize(
    "names",
    [
        ("d/train.parquet", "d/test.parquet"),
        ("d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet", "d/test-00000-of-00001.parquet"),
        ("d/data/gsm8k_train.jsonl", "d/data/gsm8k_test.jsonl"),
        ("d/train/a.parquet", "d/validation/a.parquet"),
        ("d/split=train/a.parquet", "d/split=test/a.parquet"),
        ("d/train.parquet", "d/extra.parquet"),
    ],
)
def test_a_folder_of_several_splits_is_never_read_as_one(empty: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write(name)
    assert_refused(rollout("d"), 3, where="d", found="splits .*train", todo="prompts.split")
    outcome = rollout("d", "--set", "prompts.split=train", "--out", "r")
    assert outcome.code == 0, outcome.err
    assert len(rows("r")) == 2 * 2 * sum("train" in name for name in names)
    assert_refused(rollout("d", "--set", "prompts.split=dev"), 3, found="no split 'dev'", todo="name one")


def test_columns_in_folder_names_are_not_dropped(empty: Path) -> None:
    write("d/level=1/a.parquet")
    write("d/level=2/a.parquet")
    assert_refused(rollout("d"), 3, found="partitioned by level", todo="as columns")
    assert rollout("d/level=1").code == 0


def test_what_datasets_writes_beside_its_data_is_no_data(empty: Path) -> None:
    write("d/data-00000-of-00001.arrow")
    Path("d/dataset_info.json").write_text('{"features": {}}')
    Path("d/state.json").write_text('{"_fingerprint": "x"}')
    assert plain_rows(read_rows("d")[0]) == TABLE.to_pylist()


def test_dictionary_columns_beside_plain_ones(empty: Path) -> None:
    write("d/a.parquet")
    write("d/b.parquet", TABLE.set_column(1, "answer", TABLE["answer"].dictionary_encode()))
    assert plain_rows(read_rows("d")[0]) == TABLE.to_pylist() * 2


def test_messages_with_other_fields_in_other_turns(empty: Path) -> None:
    turns = [
        [{"role": "system", "content": "Be brief.", "name": "s"}, {"role": "user", "content": "What is 1+2?"}],
        [{"role": "user", "content": "What is 3+4?"}],
    ]
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": turn}) + "\n" for turn in turns))
    assert rollout("p.jsonl").code == 0
    assert [json.loads(row["prompt"]) for row in rows("rollouts")][::2] == turns


def test_a_field_within_a_column_of_several_kinds_is_found(empty: Path) -> None:
    extras = [{"ground_truth": "3"}, {"ground_truth": "7", "style": "rule"}]
    texts = [
        {"prompt": p, "data_source": "x", "reward_model": e}
        for p, e in zip(TABLE["prompt"].to_pylist(), extras, strict=True)
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    Path("r.py").write_text(
        "def solved(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth) + len(solution_str)\n"
    )
    assert rollout("p.jsonl").code == 0
    done("score", "--reward", "r.py:solved")
    for score, row in zip(rows("scores"), rows("rollouts"), strict=True):
        assert score["reward"] - len(row["completion"]) in (3.0, 7.0)


def test_a_number_is_never_rounded_on_its_way(tmp_path: Path) -> None:
    values = [0.1, 1e-300, 5e-324, 1.7976931348623157e308, 123456789.123456789]
    table, _ = read_rows(str(lines(tmp_path / "p.jsonl", values)))
    assert [math.isclose(a, b, rel_tol=0) for a, b in zip(table["answer"].to_pylist(), values, strict=True)] == [
        True
    ] * 5
    with pytest.raises(InputRefused, match="no data files there"):
        (tmp_path / "empty").mkdir()
        read_rows(str(tmp_path / "empty"))
