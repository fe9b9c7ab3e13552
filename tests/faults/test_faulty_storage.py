"""Damaged, missing and unwritable files, full disks, other clocks, text that is none."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import Outcome, assert_refused, done, ended, grpoctl, is_committed, manifest, part, rows, start, tree
from damage import flip_bit, replace
from small_set import SAMPLING

READERS = [
    ("rollouts", ("score", "--reward", "accuracy", "--out", "new")),
    ("rollouts", ("logprob", "--policy", "builtin:tiny", "--out", "new")),
    ("rollouts", ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--out", "new")),
    ("scores", ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--out", "new")),
    ("logprobs", ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--out", "new")),
]
DAMAGE = {
    "cut": (lambda path: replace(path, path.read_bytes()[:-100]), "bytes"),
    "emptied": (lambda path: replace(path, b""), "0 bytes"),
    "without its magic": (lambda path: replace(path, b"XXXX" + path.read_bytes()[4:]), "content differs"),
    "a bit flipped": (flip_bit, "content differs"),
    "gone": (lambda path: path.unlink(), "missing"),
    "replaced by a bigger one": (lambda path: replace(path, path.read_bytes() + b"more"), "bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("artifact", "command"), READERS)
def test_a_damaged_part_is_refused_by_file_and_manifest(
    work: Path, artifact: str, command: tuple[str, ...], damage: str
) -> None:
    place = part(artifact)
    whole = place.read_bytes()
    DAMAGE[damage][0](place)
    before = tree(".")
    outcome = grpoctl(*command)
    manifest_url = f"{artifact}/_MANIFEST.json"
    assert_refused(
        outcome, 3, where=place.name, found=DAMAGE[damage][1], expected=manifest_url, todo="restore it, or remove"
    )
    assert tree(".") == before
    replace(place, whole)
    assert grpoctl(*command, "--dry-run").code == 0


def test_following_the_advice_repairs_a_damaged_artifact(work: Path) -> None:
    digest = manifest("rollouts")["content_digest"]
    flip_bit(part("rollouts"))
    shutil.rmtree("rollouts")
    done("rollout", "--policy", "builtin:tiny", *SAMPLING)
    assert manifest("rollouts")["content_digest"] == digest
    done("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--lr", "1e-4")


WEIGHTS = [
    ("policies/v000001/model.safetensors", ("rollout", "--policy", "policies", "--limit", 1, "--out", "new")),
    ("update/policy/model.safetensors", ("sync", "--update", "update", "--to", "new")),
    ("update/policy/model.safetensors", ("rollout", "--policy", "update", "--limit", 1, "--out", "new")),
    ("update/policy/config.json", ("sync", "--update", "update", "--to", "new")),
    ("policies/v000001/tokenizer.json", ("rollout", "--policy", "policies", "--limit", 1, "--out", "new")),
]


@pytest.mark.parametrize("damage", ["a bit flipped", "cut", "emptied", "gone"])
@pytest.mark.parametrize(("place", "command"), WEIGHTS)
def test_damaged_weights_are_refused(work: Path, place: str, command: tuple[Any, ...], damage: str) -> None:
    DAMAGE[damage][0](Path(place))
    before = tree(".")
    outcome = grpoctl(*command)
    folder = Path(place).parent.parent.name
    assert_refused(outcome, 3, where=folder, found="differ|content|truncated|no |not |missing|bytes|damaged")
    assert {name: digest for name, digest in tree(".").items() if not name.startswith("new/")} == before
    assert not is_committed("new")
    assert not Path("new/CURRENT").exists()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a few blocks."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


STAGES = {
    "rollouts": ("rollout", "--policy", "builtin:tiny", *SAMPLING),
    "scores": ("score", "--reward", "accuracy"),
    "logprobs": ("logprob", "--policy", "builtin:tiny", "--reference", "builtin:tiny"),
    "update": ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--lr", "1e-4"),
}


@pytest.mark.parametrize(
    ("name", "size"), [*((name, "12k") for name in STAGES), ("update", "1200k"), ("update", "2000k")]
)
def test_a_full_disk_asks_to_try_again_and_leaves_no_remains(work: Path, name: str, size: str) -> None:
    with small_disk(work / "disk", size) as disk:
        outcome = grpoctl(*STAGES[name], "--out", disk / name)
        assert_refused(outcome, 75, where="disk", found="no space|full|No space", todo="free some")
        assert not is_committed(disk / name)
        assert not [place for place in disk.rglob("*") if place.name.startswith(".tmp")]
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        done(*STAGES[name], "--out", disk / name)
        assert manifest(disk / name)["content_digest"] == manifest(name)["content_digest"]


def test_a_full_disk_while_publishing_leaves_the_published_policy(work: Path) -> None:
    with small_disk(work / "disk", "500k") as disk:
        outcome = grpoctl("sync", "--update", "update", "--to", disk / "policies")
        assert_refused(outcome, 75, where="disk", found="no space|full|No space", todo="free some")
        assert not (disk / "policies/CURRENT").exists()
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        done("sync", "--update", "update", "--to", disk / "policies")


def test_two_writers_of_one_work_both_succeed_and_one_copy_counts(work: Path) -> None:
    command = (*STAGES["rollouts"], "--set", "rollout.prompts_per_shard=1", "--out", "both")
    ends = [ended(process) for process in [start(*command) for _ in range(2)]]
    assert [end.code for end in ends] == [0, 0], [end.err for end in ends]
    assert len(manifest("both")["shards"]) == 4
    assert [row["completion_ids"] for row in rows("both")] == [row["completion_ids"] for row in rows("rollouts")]


def test_two_writers_of_different_work_conflict(work: Path) -> None:
    commands = [(*STAGES["rollouts"], "--seed", seed, "--out", "both") for seed in (1, 2)]
    ends = [ended(process) for process in [start(*command) for command in commands]]
    assert sorted(end.code for end in ends) == [0, 5], [end.err for end in ends]
    assert_refused(next(end for end in ends if end.code == 5), 5, where="both", found="other|seed", todo="--out")
    assert is_committed("both")


@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_do_not_matter(work: Path, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = days * 86400
    for place in Path(".").rglob("*"):
        os.utime(place, (place.stat().st_atime + shift,) * 2)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - shift)
    before = tree(".")
    for name, command in STAGES.items():
        assert "already done" in done(*command, "--out", name).out
    assert tree(".") == before
    done(*STAGES["update"], "--out", "again")
    assert manifest("again")["content_digest"] == manifest("update")["content_digest"]


def refuse_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the output was checked")

    monkeypatch.setattr("grpoctl.engines.torch.model.load_policy", load)


@pytest.mark.parametrize("name", STAGES)
def test_a_read_only_output_is_refused_before_a_model_is_loaded(
    work: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(work / "disk", "10m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refuse_models(monkeypatch)
        outcome = grpoctl(*STAGES[name], "--out", disk / name)
        assert_refused(outcome, 3, where=f"disk/{name}", found="read-only|Read-only", todo="another --out|permission")


@pytest.mark.parametrize("name", ["rollouts", "update"])
def test_an_output_without_permission_is_refused(work: Path, name: str) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root to become nobody")
    Path("locked").mkdir(mode=0o755)
    for place in (work, *work.parents):
        place.chmod(place.stat().st_mode | 0o055)
    before = tree(".")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    process = start(*STAGES[name], "--out", f"locked/{name}", prefix=nobody, environment={"HOME": "/tmp"})
    assert_refused(
        ended(process), 3, where=f"locked/{name}", found="[Pp]ermission|refused", todo="check permissions|another --out"
    )
    assert tree(".") == before


INSIDE = [
    ("logprob", "--policy", "builtin:tiny", "--out", "rollouts"),
    ("logprob", "--policy", "builtin:tiny", "--out", "rollouts/logprobs"),
    ("logprob", "--policy", "builtin:tiny", "--out", "./rollouts/logprobs"),
    ("logprob", "--policy", "builtin:tiny", "--out", "scores/../rollouts/logprobs"),
    ("score", "--reward", "accuracy", "--out", "{here}/rollouts/scores"),
    ("update", "--policy", "builtin:tiny", "--logprobs", "logprobs", "--out", "scores/update"),
    ("update", "--policy", "policies/v000001", "--logprobs", "logprobs", "--out", "./policies"),
    ("sync", "--update", "update", "--to", "update/policies"),
]


@pytest.mark.parametrize("command", INSIDE)
def test_an_output_inside_an_input_is_refused(work: Path, command: tuple[str, ...]) -> None:
    before = tree(".")
    outcome = grpoctl(*(word.format(here=work) for word in command))
    assert_refused(outcome, 2, where="--out|--to", found="overlaps the input|inside", todo="another folder")
    assert tree(".") == before


def test_an_output_that_is_a_file_is_refused(work: Path) -> None:
    Path("file").write_text("mine")
    for out in ("file", "file/new"):
        assert_refused(grpoctl(*STAGES["scores"], "--out", out), 3, where="file", found="folder|[Nn]ot a directory")
    assert Path("file").read_text() == "mine"


def rollout(prompts: str) -> Outcome:
    return grpoctl(
        "rollout", "--prompts", prompts, "--policy", "builtin:tiny", "--group-size", 2, "--max-new-tokens", 4
    )


def test_text_that_is_not_utf8_is_refused_by_row(empty: Path) -> None:
    Path("p.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    assert_refused(rollout("p.jsonl"), 3, where="p.jsonl", found="row 1 is not UTF-8", todo="re-encode")
    bad = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": bad}), "p.parquet")
    assert_refused(
        rollout("p.parquet"), 3, where="p.parquet", found="UTF-?8", expected="row 1|index 1", todo="re-encode"
    )
    assert not Path("rollouts").exists()


def test_lone_surrogates_are_refused_by_row(empty: Path) -> None:
    Path("p.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": "half \\ud83d"}\n')
    assert_refused(rollout("p.jsonl"), 3, where="p.jsonl", found="surrogate", expected="row 1|row_1|rows? ")
    messages = json.dumps([{"role": "user", "content": "half \ud83d"}])
    pq.write_table(pa.table({"prompt": [messages, messages]}), "p.parquet")
    assert_refused(rollout("p.parquet"), 3, where=r"p\.parquet.*:0", found="surrogate")
    assert not Path("rollouts").exists()
