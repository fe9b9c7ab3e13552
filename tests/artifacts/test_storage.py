"""Exclusive creation, checked reads and artifacts, on the local disk and on a store without renames."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from grpoctl.artifacts import artifact as artifacts
from grpoctl.artifacts import storage
from grpoctl.artifacts.artifact import open_artifact, read_manifest
from grpoctl.artifacts.canonical import canonical_json, table_digest
from grpoctl.artifacts.manifest import RowAccounting
from grpoctl.artifacts.storage import create_exclusively, list_names, locate, read_bytes, read_if_there, write_bytes
from grpoctl.artifacts.tables import LOGPROBS
from grpoctl.artifacts.writer import ArtifactWriter, Work, committed, parquet_bytes
from grpoctl.errors import Conflict, InputRefused, TryAgain, UsageError


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "store")
    else:
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True) if list_names(
            locate(f"memory://{tmp_path.name}")
        ) else None


def rows(*ids: str) -> pa.Table:
    count = len(ids)
    columns = {
        "sample_id": list(ids),
        "old_logprobs": [[-0.5]] * count,
        "ref_logprobs": [None] * count,
        "entropy": [None] * count,
    }
    return pa.table(columns, schema=LOGPROBS.arrow_schema())


def work(num_shards: int = 2, **definition: Any) -> Work:
    return Work(stage="logprob", table=LOGPROBS, definition={"a": 1, **definition}, config={}, num_shards=num_shards)


def commit(writer: ArtifactWriter) -> artifacts.Artifact | None:
    return writer.commit(
        rows=RowAccounting(input=1, ok=1, skipped=0, failed=0), policy=None, sampling=None, stats={}, tokens={},
        timings={}, environment={},
    )  # fmt: skip


def finished(root: str, **definition: Any) -> artifacts.Artifact:
    writer = ArtifactWriter(url=root, work=work(**definition))
    writer.write_shard(0, rows("a", "b"), counts={"ok": 2})
    writer.write_shard(1, rows("c"), counts={"ok": 1})
    artifact = commit(writer)
    assert artifact is not None
    return artifact


def test_exactly_one_of_many_writers_creates_a_file(root: str) -> None:
    place = locate(root).child("one")
    write_bytes(locate(root).child("warm"), b"")
    won: list[int] = []
    gate = threading.Barrier(16)

    def create(number: int) -> None:
        gate.wait()
        if create_exclusively(place, f"writer {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if place.is_local:  # fsspec's memory store checks and writes in two steps; real object stores answer atomically
        assert len(won) == 1
        assert read_bytes(place) == f"writer {won[0]}".encode()
    assert won


def test_a_second_creation_fails_and_changes_nothing(root: str) -> None:
    place = locate(root).child("folder/one")
    assert create_exclusively(place, b"first")
    assert not create_exclusively(place, b"second")
    assert read_bytes(place) == b"first"


def test_a_lost_acknowledgement_counts_as_success(monkeypatch: pytest.MonkeyPatch) -> None:
    place = locate("memory://lost-ack").child("one")
    real = place.filesystem.pipe_file

    def lose(path: str, data: bytes, **options: Any) -> None:
        real(path, data)
        raise OSError("[Errno 16] 409 conflict")

    monkeypatch.setattr(place.filesystem, "pipe_file", lose)
    assert create_exclusively(place, b"mine")
    monkeypatch.setattr(place.filesystem, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(OSError("slow down")))
    with pytest.raises(TryAgain, match="slow down"):
        create_exclusively(place.child("other"), b"mine")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(TryAgain, match="no space left"):
        write_bytes(locate(str(tmp_path / "x/file")), b"data")
    assert list((tmp_path / "x").iterdir()) == []


def test_chained_urls_and_unknown_protocols_are_refused() -> None:
    with pytest.raises(UsageError, match="chained URLs are refused"):
        locate("simplecache::s3://bucket/x")
    with pytest.raises(UsageError, match="no file system for this URL"):
        locate("gopher://host/x")


def test_an_artifact_exists_only_with_its_manifest(root: str) -> None:
    writer = ArtifactWriter(url=root, work=work())
    writer.write_shard(0, rows("a", "b"), counts={"ok": 2})
    assert commit(writer) is None
    assert read_manifest(root) is None
    with pytest.raises(InputRefused, match=r"without a manifest .*rerun the stage"):
        open_artifact(root, table="logprobs")
    again = ArtifactWriter(url=root, work=work())
    assert again.missing_shards() == [1]
    again.write_shard(1, rows("c"), counts={"ok": 1})
    assert commit(again) is not None
    assert open_artifact(root, table="logprobs").read()["sample_id"].to_pylist() == ["a", "b", "c"]


def test_the_first_shard_stands_when_two_attempts_write_it(root: str) -> None:
    first, second = (ArtifactWriter(url=root, work=work()) for _ in range(2))
    mine = first.write_shard(0, rows("a"), counts={"ok": 1})
    assert second.write_shard(0, rows("a"), counts={"ok": 1}) == mine


def test_equal_work_gives_equal_digests_whatever_the_attempt(tmp_path: Path) -> None:
    one, two = finished(str(tmp_path / "one")), finished(str(tmp_path / "two"))
    assert one.manifest.content_digest == two.manifest.content_digest
    assert one.manifest.shards[0].part != two.manifest.shards[0].part


def test_other_work_is_a_conflict_that_names_the_key(root: str) -> None:
    finished(root, nested={"lr": 1e-6})
    assert committed(root, work(nested={"lr": 1e-6})) is not None
    with pytest.raises(Conflict, match=r"nested.lr: 1e-06 → 1e-05"):
        committed(root, work(nested={"lr": 1e-5}))


def test_unfinished_shards_of_other_work_are_a_conflict(root: str) -> None:
    ArtifactWriter(url=root, work=work()).write_shard(0, rows("a"), counts={"ok": 1})
    with pytest.raises(Conflict, match="unfinished shards of other work"):
        committed(root, work(b=2))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
def test_a_damaged_part_is_refused_with_file_and_manifest(root: str, damage: str) -> None:
    artifact = finished(root)
    place = artifact.location.child(artifact.manifest.shards[0].part)
    data = bytearray(read_bytes(place))
    data[len(data) // 2] ^= 1
    if damage == "missing":
        place.filesystem.rm(place.path)
    else:
        write_bytes(place, {"flip": bytes(data), "truncate": bytes(data[:-9]), "empty": b""}[damage])
    with pytest.raises(InputRefused, match=r"part-00000-.*_MANIFEST.json.*rerun its stage"):
        open_artifact(root, table="logprobs").read()


def test_the_wrong_table_and_newer_versions_are_refused(root: str) -> None:
    artifact = finished(root)
    with pytest.raises(InputRefused, match="holds logprobs, expected scores"):
        open_artifact(root, table="scores")
    place = artifact.location.child("_MANIFEST.json")
    raw = json.loads(read_bytes(place))
    write_bytes(place, json.dumps({**raw, "table_version": 99, "grpoctl_version": "9.9"}).encode())
    with pytest.raises(InputRefused, match=r"version 99, written by grpoctl 9.9.*upgrade"):
        read_manifest(root)
    write_bytes(place, b"{half")
    with pytest.raises(InputRefused, match="not JSON"):
        read_manifest(root)


def test_reading_what_is_not_there(root: str) -> None:
    assert read_if_there(locate(root).child("nothing")) is None
    with pytest.raises(InputRefused, match="not found"):
        read_bytes(locate(root).child("nothing"))
    assert list_names(locate(root).child("nothing")) == []


def test_page_checksums_are_written() -> None:
    import pyarrow.parquet as pq

    data = bytearray(parquet_bytes(rows("a", "b"), LOGPROBS))
    place = data.find(b"a") + 1
    data[place] ^= 0xFF
    with pytest.raises(OSError, match=r"(?i)crc|checksum|corrupt|decompress"):
        pq.read_table(pa.BufferReader(bytes(data)), page_checksum_verification=True)


def test_a_table_digest_sees_values_and_nulls_only() -> None:
    one = pa.table({"x": pa.chunked_array([[1, None], [3]]), "y": [["a"], [], None]})
    two = pa.table({"x": pa.chunked_array([[1], [None, 3]]), "y": [["a"], [], None]})
    assert table_digest(one) == table_digest(two)
    for other in (
        pa.table({"x": [1, 0, 3], "y": [["a"], [], None]}),
        pa.table({"x": [1, None, 3], "y": [["a"], None, []]}),
        pa.table({"x": [1, None, 3], "y": [[], ["a"], None]}),
        pa.table({"z": [1, None, 3], "y": [["a"], [], None]}),
    ):
        assert table_digest(one) != table_digest(other)


def test_canonical_json_refuses_what_has_no_canonical_form() -> None:
    assert canonical_json({"b": 1.0, "a": [None, True, "é"]}) == '{"a":[null,true,"é"],"b":1}'
    with pytest.raises(TypeError, match=r"\$.a: nan"):
        canonical_json({"a": float("nan")})
    with pytest.raises(TypeError, match="set has no canonical"):
        canonical_json({1, 2})
