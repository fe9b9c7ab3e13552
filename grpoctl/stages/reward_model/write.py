"""Write a trained reward model as one folder, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from grpoctl.artifacts.canonical import sha256_json
from grpoctl.artifacts.storage import (
    create_exclusively,
    exists,
    list_names,
    locate,
    put_file,
    read_bytes,
    read_if_there,
    storage_errors,
)
from grpoctl.artifacts.writer import conflict
from grpoctl.errors import Conflict, InputRefused, TryAgain
from grpoctl.inputs.policies import PolicyFolder, policy_files, tokenizer_digest, weights_digest
from grpoctl.inputs.reward_models import REWARD_MODEL_RECORD, RewardModelRecord, parsed_record
from grpoctl.settings.jobs import RewardModelJob
from grpoctl.stages.stage import StageResult, package_versions

STAGE_NAME: Final = "reward-model train"


def find_trained(out: str, definition: Mapping[str, Any]) -> StageResult | None:
    """Return the result where this very model lies at `out`, None where nothing does.

    Raises:
        Conflict: another reward model lies there, or other files.
    """
    location = locate(out)
    data = read_if_there(location.child(REWARD_MODEL_RECORD))
    if data is not None:
        record = parsed_record(data, out)
        if record.fingerprint != sha256_json(definition):
            raise conflict(out, record.definition, definition)
        return StageResult(stage=STAGE_NAME, out=out, state="already_done", artifact=None, facts=facts_of(record))
    names = list_names(location)
    if not names and exists(location) and not location.filesystem.isdir(location.path):
        raise Conflict(f"{out}: is a file; choose another --out")
    if names:
        raise Conflict(
            f"{out}: holds {names[0]} but no {REWARD_MODEL_RECORD} (unfinished, or something else); choose another "
            "--out or remove the folder"
        )
    return None


def facts_of(record: RewardModelRecord) -> dict[str, Any]:
    """Return what `--json` and a person are told of a reward model."""
    return {
        "held_out_accuracy": record.held_out_accuracy,
        "num_pairs": record.num_pairs,
        "num_held_out": record.num_held_out,
        **record.stats,
        "weights_digest": record.weights_digest,
        "fingerprint": record.fingerprint,
    }


@contextmanager
def scratch_folder(out: str) -> Generator[Path, None, None]:
    """Make a folder to write in, beside the output where that is on this disk; it is gone afterwards.

    Raises:
        InputRefused: nothing may be written there.
        TryAgain: the disk is full.
    """
    location = locate(out)
    beside = Path(location.path).parent if location.is_local else None
    if beside is not None and beside.exists() and not beside.is_dir():
        raise InputRefused(f"{out}: {beside} is a file, expected a folder; choose another --out")
    with storage_errors(location):
        if beside is not None:
            beside.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-reward-model-", dir=beside))
        scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_reward_model(
    job: RewardModelJob,
    base: PolicyFolder,
    model: Any,
    definition: Mapping[str, Any],
    stats: Mapping[str, Any],
    *,
    scratch: Path,
) -> RewardModelRecord:
    """Complete the folder in `scratch`, then move it to its place; the record is its last file.

    Raises:
        Conflict: something else was put there meanwhile.
    """
    from grpoctl.engines.value_head.model import save_reward_model

    with storage_errors(locate(job.out)):
        save_reward_model(model, scratch)
        _carry(base.folder, scratch, type(model.backbone).__name__)
    own = ("held_out_accuracy", "num_pairs", "num_held_out", "template")
    record = RewardModelRecord(
        base_weights_digest=base.weights_digest,
        weights_digest=weights_digest(scratch),
        tokenizer_digest=tokenizer_digest(scratch),
        fingerprint=sha256_json(definition),
        definition=dict(definition),
        stats={name: value for name, value in stats.items() if name not in own},
        environment=package_versions(),
        **{name: stats[name] for name in own},
    )
    (scratch / REWARD_MODEL_RECORD).write_text(record.model_dump_json(indent=1))
    _move_into_place(scratch, job.out, definition)
    return record


def _carry(base: Path, folder: Path, architecture: str) -> None:
    """Copy tokenizer and template unchanged, and the config with the architecture and type of what is saved."""
    for path in policy_files(base):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((base / "config.json").read_bytes())
    config |= {"architectures": [architecture], "dtype": "float32"}
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _move_into_place(scratch: Path, out: str, definition: Mapping[str, Any]) -> None:
    """Put the finished folder at its place; another process may have been there first."""
    location = locate(out)
    if location.is_local:
        try:
            with storage_errors(location):
                os.rename(scratch, location.path)
        except TryAgain:  # another process was there first: with this very model, or Conflict
            if find_trained(out, definition) is None:
                raise
        return
    for path in sorted(scratch.iterdir()):
        if path.name != REWARD_MODEL_RECORD:
            put_file(path, location.child(path.name))
    place = location.child(REWARD_MODEL_RECORD)
    if not create_exclusively(place, (scratch / REWARD_MODEL_RECORD).read_bytes()):
        record = parsed_record(read_bytes(place), out)
        if record.weights_digest != parsed_record((scratch / REWARD_MODEL_RECORD).read_bytes(), out).weights_digest:
            raise Conflict(f"{place.url}: another reward model was written here meanwhile; choose another --out")
