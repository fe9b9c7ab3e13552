"""Render the published schemas and the settings page from the code: `python -m grpoctl.cli.publish_schemas`."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpoctl.artifacts.manifest import Manifest, PolicyRecord, Shard
from grpoctl.artifacts.tables import TABLES
from grpoctl.cli.options import choices_of
from grpoctl.settings.fields import Flag, Gate, RewardModelConfig, Section
from grpoctl.settings.jobs import PipelineConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def rendered() -> dict[str, str]:
    """Return {path in the repository: content} of every published file."""
    files = {f"schemas/{name}.table.json": _json(table.published()) for name, table in TABLES.items()}
    models = {"manifest": Manifest, "shard": Shard, "policy": PolicyRecord, "pipeline": PipelineConfig}
    for name, model in models.items():
        files[f"schemas/{name}.schema.json"] = _json({"$schema": DIALECT, **model.model_json_schema()})
    files["docs/settings.md"] = settings_page()
    return files


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def settings_page() -> str:
    """Return the reference of all settings as Markdown."""
    lines = [
        "# Settings",
        "",
        "Rendered from `grpoctl/settings/` by `python -m grpoctl.cli.publish_schemas`; do not edit.",
        "",
        "A setting is given as a flag, as `--set key=value`, as the environment variable `GRPOCTL_` + key in capitals with",
        "`__` for each dot (`GRPOCTL_UPDATE__LR`), or in a pipeline-shaped YAML file; the first that names it wins.",
        "Settings under `runtime` and those marked *limit* never change a result and stay outside the fingerprint.",
    ]
    top = {n: f for n, f in PipelineConfig.model_fields.items() if not _is_section(f)}
    lines += ["", "## Run", "", *_table(top, "")]
    for name, field in PipelineConfig.model_fields.items():
        if _is_section(field):
            section = typing.cast(type[Section], field.annotation)
            lines += [
                "",
                f"## {name}",
                "",
                (section.__doc__ or "").strip(),
                "",
                *_table(section.model_fields, f"{name}."),
            ]
            if name == "score":
                from grpoctl.settings.fields import RewardConfig

                lines += ["", "### score.rewards[]", "", *_table(RewardConfig.model_fields, "")]
    lines += [
        "",
        "## reward_model",
        "",
        f"`grpoctl reward-model train`: {(RewardModelConfig.__doc__ or '').strip()}",
        "",
    ]
    lines += _table(RewardModelConfig.model_fields, "reward_model.")
    return "\n".join(lines) + "\n"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(fields: typing.Mapping[str, FieldInfo], prefix: str) -> Iterator[str]:
    yield "| key | default | flag | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(fields, prefix)


def _rows(fields: typing.Mapping[str, FieldInfo], prefix: str) -> Iterator[str]:
    for name, field in fields.items():
        if _is_section(field):
            yield from _rows(typing.cast(type[Section], field.annotation).model_fields, f"{prefix}{name}.")
            continue
        flag = next((f"`{item}`" for item in field.metadata if isinstance(item, Flag)), "")
        limit = "*limit:* " if any(isinstance(item, Gate) for item in field.metadata) else ""
        text = limit + " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{prefix}{name}` | {_default(field)} | {flag} | {text}{_choices(field)} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(list(typing.cast('tuple[Any, ...]', value)) if isinstance(value, tuple) else value)}`"


def _choices(field: FieldInfo) -> str:
    choices = choices_of(field)
    return " One of " + ", ".join(f"`{choice}`" for choice in choices) + "." if choices else ""


def main() -> None:
    """Write every published file into the repository that this package lies in."""
    root = Path(__file__).parents[2]
    for name, content in rendered().items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
