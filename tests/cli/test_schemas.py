"""What is published under schemas/ and docs/settings.md is what the code says, and real files obey it."""

import json
from pathlib import Path

import jsonschema
import pyarrow.parquet as pq
import pytest

from grpoctl.algorithms.advantages import METHODS
from grpoctl.algorithms.aggregation import AGGREGATIONS
from grpoctl.algorithms.kl import canonical_estimator
from grpoctl.algorithms.policy_loss import LOSSES
from grpoctl.artifacts.tables import SCHEMA_VERSION_KEY, TABLES
from grpoctl.cli.publish_schemas import rendered
from grpoctl.settings.fields import AdvantageName, AggregationName, KlName, LossName

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(rendered()))
def test_published_file_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == rendered()[name], "run `make schemas`"


def test_names_in_the_config_are_the_names_of_the_formulas() -> None:
    assert set(AdvantageName.__args__) == set(METHODS)
    assert set(AggregationName.__args__) == set(AGGREGATIONS)
    assert set(LossName.__args__) == set(LOSSES)
    for name in KlName.__args__:
        canonical_estimator(name)


def test_every_column_says_what_it_means() -> None:
    for table in TABLES.values():
        for column in table.columns:
            assert len(column.doc) > 3, f"{table.name}.{column.name}"


def test_a_real_run_obeys_the_published_schemas(small_run: Path) -> None:
    schema = json.loads((ROOT / "schemas/manifest.schema.json").read_text())
    found = sorted(small_run.rglob("_MANIFEST.json"))
    assert len(found) == 4
    for path in found:
        manifest = json.loads(path.read_text())
        jsonschema.validate(manifest, schema)
        table = TABLES[manifest["table"]]
        for shard in manifest["shards"]:
            part = pq.read_table(path.parent / shard["part"])
            assert part.column_names == [column.name for column in table.columns]
            assert part.schema.metadata[SCHEMA_VERSION_KEY] == str(table.version).encode()
            for column in table.columns:
                field = part.schema.field(column.name)
                assert field.metadata[b"doc"].decode() == column.doc
                assert column.type is None or field.type == column.type
                assert column.nullable or part.column(column.name).null_count == 0, column.name


def test_shard_records_and_policy_record_obey_their_schemas(small_run: Path) -> None:
    for pattern, name in (("**/_shards/*.json", "shard"), ("**/grpoctl_policy.json", "policy")):
        schema = json.loads((ROOT / f"schemas/{name}.schema.json").read_text())
        found = list(small_run.glob(pattern))
        assert found
        for path in found:
            jsonschema.validate(json.loads(path.read_text()), schema)


def test_every_pipeline_obeys_the_published_schema() -> None:
    from grpoctl.settings.load import read_yaml

    schema = json.loads((ROOT / "schemas/pipeline.schema.json").read_text())
    for path in (ROOT / "pipelines").glob("*.yaml"):
        content, _ = read_yaml(str(path))
        content["score"]["rewards"] = [
            {"ref": reward} if isinstance(reward, str) else reward for reward in content["score"]["rewards"]
        ]
        jsonschema.validate(content, schema)
