"""Settings are refused where they were written."""

from pathlib import Path

import pytest
from command_line import assert_refused, done, grpoctl, is_committed
from pipeline_file import edited, run

BAD_VALUES = [
    ("  lr: 1e-4", '  lr: "1e-6"', r"p\.yaml:9:3.*update\.lr", "1e-6", "number"),
    ("  lr: 1e-4", "  lr: -1e-6", r"p\.yaml:9:3.*update\.lr", "-1e-06", "greater than or equal to 0"),
    ("  lr: 1e-4", "  lr: .nan", r"p\.yaml:9:3.*update\.lr", "nan", "finite|greater"),
    ("  lr: 1e-4", "  lr: .inf", r"p\.yaml:9:3.*update\.lr", "inf", "finite"),
    ("  lr: 1e-4", "  lr:", r"p\.yaml:9:3.*update\.lr", "None", "number"),
    ("group_size: 4", "group_size: true", r"p\.yaml:6:11.*rollout\.group_size", "True", "integer"),
    ("group_size: 4", "group_size: 0", r"p\.yaml:6:11.*rollout\.group_size", "0", "greater than or equal to 1"),
    ("group_size: 4", "group_size: 4.5", r"p\.yaml:6:11.*rollout\.group_size", "4.5", "integer"),
    ("seed: 17", "seed: yes", r"p\.yaml:4:1.*seed", "'yes'", "integer"),
    ("  lr: 1e-4", "  loss: pro_clip", r"p\.yaml:9:3.*update\.loss", "pro_clip", "ppo_clip"),
    ("name: test\n", "", r"p\.yaml.*name", "missing", "add it"),
    ("  lr: 1e-4", "  lr_schedule: cosine", r"p\.yaml:8:1.*update", "cosine", "total_steps"),
]


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_refused_by_file_line_and_column(small_pipeline: Path, case: tuple[str, ...]) -> None:
    old, new, where, found, expected = case
    edited(small_pipeline, old, new)
    assert_refused(run(), 2, where=where, found=found, expected=expected)
    assert not Path("run").exists()


@pytest.mark.parametrize("value", ["abc", "-1", "nan", "true", ""])
def test_a_bad_value_of_a_flag_names_the_flag(empty: Path, value: str) -> None:
    assert_refused(
        grpoctl("update", "--lr", value), 2, where=r"--lr.*update\.lr", found="found", expected="expected|number"
    )
    outcome = grpoctl("update", "--set", f"update.lr={value}")
    assert_refused(outcome, 2, where=r"--set update\.lr=.*update\.lr", found="found", expected="expected|number")


def test_a_bad_value_of_an_environment_variable_names_the_variable(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPOCTL_UPDATE__LR", "fast")
    assert_refused(grpoctl("update"), 2, where="GRPOCTL_UPDATE__LR", found="'fast'", expected="number")
    monkeypatch.setenv("GRPOCTL_UPDATE__LR", "1e-6")
    monkeypatch.setenv("GRPOCTL_UPDATE__LRR", "1")
    assert_refused(grpoctl("update"), 2, where="GRPOCTL_UPDATE__LRR", found="unknown key", todo="did you mean 'lr'")


BAD_FILES: list[tuple[bytes, str, str, str]] = [
    (b"", r"p\.yaml", "nothing", "mapping"),
    (b"null\n", r"p\.yaml", "nothing", "mapping"),
    (b"# only a comment\n", r"p\.yaml", "nothing", "mapping"),
    (b"- a\n- b\n", r"p\.yaml", "list", "mapping"),
    (b"just words\n", r"p\.yaml", "just words", "mapping"),
    (b"name: a\n---\nname: b\n", r"p\.yaml:2", "second document", "one"),
    (b"name: a\nupdate:\n\tlr: 1\n", r"p\.yaml:3", "tab", "spaces"),
    (b"name: \xff\xfe\x00", r"p\.yaml", "not UTF-8", "YAML"),
    (b"\x00\x01\x02\x03", r"p\.yaml", "", "YAML|character"),
    (b"name: [a\n", r"p\.yaml:\d", "expected|found", ""),
    (b"name: *nowhere\n", r"p\.yaml:1", "alias", ""),
    (b"name: [a\n]: b\n", r"p\.yaml:\d", "", ""),
]


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("command", [("run", "p.yaml"), ("rollout", "--config", "p.yaml")])
def test_a_file_that_is_no_mapping_is_refused(
    empty: Path, command: tuple[str, ...], case: tuple[bytes, str, str, str]
) -> None:
    content, where, found, expected = case
    (empty / "p.yaml").write_bytes(content)
    assert_refused(grpoctl(*command), 2, where=where, found=found, expected=expected)
    assert [place.name for place in empty.iterdir()] == ["p.yaml"]


def test_a_missing_file_is_refused(empty: Path) -> None:
    assert_refused(run(), 2, where=r"p\.yaml", found="can't be read", todo="check the path")


UNKNOWN = [
    ("seed: 17", "seeds: 17", r"p\.yaml:4:1", "'seeds'", "'seed'"),
    ("  lr: 1e-4", "  learning_rate: 1e-4", r"p\.yaml:9:3", "learning_rate", "known|mean"),
    ("  lr: 1e-4", "  clip_lo: 0.1", r"p\.yaml:9:3", "clip_lo", "'clip_low'"),
    ("group_size: 4", "group_sizes: 4", r"p\.yaml:6:11", "group_sizes", "'group_size'"),
    ("{ref: reward.py:by_length}", "{ref: reward.py:by_length, weigth: 2}", r"p\.yaml:7:\d+", "weigth", "weight"),
    ("update:", "stages: [a, b]\nupdate:", r"p\.yaml:8:1", "'stages'", "known|mean"),
]


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_is_refused_with_the_closest(small_pipeline: Path, case: tuple[str, ...]) -> None:
    old, new, where, found, closest = case
    edited(small_pipeline, old, new)
    assert_refused(run(), 2, where=where, found=f"unknown key.*{found}", todo=closest)


def test_a_duplicate_key_is_refused_with_both_lines(small_pipeline: Path) -> None:
    edited(small_pipeline, "  lr: 1e-4", "  lr: 1e-4\n  lr: 1e-5")
    assert_refused(run(), 2, where=r"p\.yaml:10:3", found="duplicate key.*lr", expected="line 9", todo="keep one")
    edited(small_pipeline, "  lr: 1e-4\n  lr: 1e-5", "  lr: 1e-4\nseed: 4")
    assert_refused(run(), 2, where=r"p\.yaml:10:1", found="duplicate key.*seed", expected="line 4", todo="keep one")


def test_unknown_keys_of_set_and_environment_are_refused(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(
        grpoctl("rollout", "--set", "rollout.group_sise=2"), 2, where="--set", found="group_sise", todo="group_size"
    )
    assert_refused(grpoctl("rollout", "--set", "rolout.group_size=2"), 2, where="--set", found="rolout", todo="rollout")
    assert_refused(grpoctl("rollout", "--set", "group_size"), 2, where="--set group_size", expected="key=value")
    monkeypatch.setenv("GRPOCTL_ROLOUT__GROUP_SIZE", "2")
    assert_refused(grpoctl("rollout"), 2, where="GRPOCTL_ROLOUT__GROUP_SIZE", found="rolout", todo="rollout")


def test_a_missing_environment_variable_is_refused(small_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(small_pipeline, "run_dir: run", "run_dir: ${NOWHERE_SET}/run")
    assert_refused(run(), 2, where=r"p\.yaml:2:1", found="NOWHERE_SET isn't set", todo="set it")
    monkeypatch.setenv("NOWHERE_SET", "here")
    done("run", "p.yaml", "--iterations", 1)
    assert is_committed("here/run/iter-000000/update")
