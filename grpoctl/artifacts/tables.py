"""The tables of every artifact, each column declared once.

Arrow schemas, the published JSON documents under `schemas/` and the checks on reading are all rendered from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow as pa

SCHEMA_VERSION_KEY: Final = b"grpoctl.schema_version"
TABLE_KEY: Final = b"grpoctl.table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    Args:
        name: as it stands in the file
        type: Arrow type; None for a struct whose fields the data decide (`source`, `rewards`)
        doc: what it means
        unit: nats, tokens, seconds …; None where it has none
        nullable: null means undefined; a placeholder value is never written
        volatile: differs between two runs of the same work (durations), so it stays out of the content digest
    """

    name: str
    type: pa.DataType | None
    doc: str
    unit: str | None = None
    nullable: bool = False
    volatile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of one schema version."""

    name: str
    version: int
    doc: str
    columns: tuple[Column, ...]

    def arrow_schema(self, structs: Mapping[str, pa.DataType] | None = None) -> pa.Schema:
        """Return the Arrow schema, `structs` giving the types that the data decide.

        Raises:
            KeyError: a struct column without a type.
        """
        fields: list[pa.Field[Any]] = []
        for column in self.columns:
            kind = column.type if column.type is not None else (structs or {})[column.name]
            metadata = {"doc": column.doc} | ({"unit": column.unit} if column.unit else {})
            fields.append(pa.field(column.name, kind, nullable=column.nullable, metadata=metadata))
        footer: dict[bytes | str, bytes | str] = {
            TABLE_KEY: self.name.encode(),
            SCHEMA_VERSION_KEY: str(self.version).encode(),
        }
        return pa.schema(fields, metadata=footer)

    def build(self, columns: Mapping[str, Any], structs: Mapping[str, pa.DataType] | None = None) -> pa.Table:
        """Return rows as an Arrow table of this schema.

        Args:
            columns: values by column; a column of only nulls may be None
            structs: types of the columns that the data decide
        """
        schema = self.arrow_schema(structs)
        num_rows = len(columns[self.columns[0].name])
        values = {name: [None] * num_rows if value is None else value for name, value in columns.items()}
        arrays: dict[str, Any] = {
            f.name: pa.array(values[f.name], type=f.type) for f in cast("Iterable[pa.Field[Any]]", schema)
        }
        return pa.table(arrays, schema=schema)  # pyright: ignore[reportUnknownMemberType]  its stub names pandas

    def published(self) -> dict[str, Any]:
        """Return the table as the JSON document under `schemas/`."""
        return {
            "table": self.name,
            "schema_version": self.version,
            "doc": self.doc,
            "columns": [
                {
                    "name": column.name,
                    "type": str(column.type) if column.type is not None else "struct (fields come from the data)",
                    "nullable": column.nullable,
                    "unit": column.unit,
                    "doc": column.doc,
                    "in_content_digest": not column.volatile,
                }
                for column in self.columns
            ],
        }


_TEXT = pa.large_string()
_IDS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_BOOLS = pa.list_(pa.field("item", pa.bool_(), nullable=False))

ROLLOUTS: Final = Table(
    name="rollouts",
    version=1,
    doc="Sampled completions, one row each; the G rows of a group stand together and never split over shards.",
    columns=(
        Column(name="sample_id", type=_TEXT, doc="group_id#sample_index; the key of every join"),
        Column(name="group_id", type=_TEXT, doc="prompt_id@iteration"),
        Column(name="prompt_id", type=_TEXT, doc="the user's id column, or sha256(file)[:8]:row"),
        Column(name="sample_index", type=pa.int32(), doc="0 … G − 1 within the group"),
        Column(name="prompt", type=_TEXT, doc="the prompt as given: text, or a message list as canonical JSON"),
        Column(
            name="completion", type=_TEXT, doc="the completion's text without special tokens; a view, ids are the data"
        ),
        Column(name="prompt_ids", type=_IDS, doc="token ids the sampler saw, template applied"),
        Column(name="completion_ids", type=_IDS, doc="sampled token ids, the end token included when it was sampled"),
        Column(name="completion_mask", type=_BOOLS, doc="true at tokens that may carry loss"),
        Column(
            name="rollout_logprobs",
            type=_FLOATS,
            unit="nats",
            nullable=True,
            doc="log-probability of each sampled token under the distribution it was drawn from (after temperature)",
        ),
        Column(name="finish_reason", type=_TEXT, doc="stop, length, abort or error"),
        Column(name="policy_version", type=pa.int64(), doc="version of the policy that sampled"),
        Column(
            name="seed", type=pa.int64(), doc="this sample's seed, a function of run seed, iteration, prompt, index"
        ),
        Column(name="status", type=_TEXT, doc="ok; empty (no token at all); failed (see error)"),
        Column(name="error", type=_TEXT, nullable=True, doc="why the row failed"),
        Column(name="source", type=None, nullable=True, doc="the prompt row's other columns"),
    ),
)

LOGPROBS: Final = Table(
    name="logprobs",
    version=1,
    doc="Per-token log-probabilities recomputed by the training framework; rows as in the rollouts.",
    columns=(
        Column(name="sample_id", type=_TEXT, doc="as in rollouts"),
        Column(
            name="old_logprobs",
            type=_FLOATS,
            unit="nats",
            nullable=True,
            doc="under the policy that sampled, recomputed",
        ),
        Column(name="ref_logprobs", type=_FLOATS, unit="nats", nullable=True, doc="under the frozen reference"),
        Column(name="entropy", type=_FLOATS, unit="nats", nullable=True, doc="of the old policy at each position"),
    ),
)

SCORES: Final = Table(
    name="scores",
    version=1,
    doc="Rewards and advantages; rows as in the rollouts.",
    columns=(
        Column(name="sample_id", type=_TEXT, doc="as in rollouts"),
        Column(name="group_id", type=_TEXT, doc="as in rollouts"),
        Column(name="reward", type=pa.float64(), nullable=True, doc="weighted sum of the rewards; null unless ok"),
        Column(name="rewards", type=None, nullable=True, doc="each reward's raw value by name"),
        Column(name="reward_status", type=_TEXT, doc="ok, unscorable, timeout, error or crash"),
        Column(name="reward_error", type=_TEXT, nullable=True, doc="message of the first reward that wasn't ok"),
        Column(
            name="reward_seconds",
            type=pa.float64(),
            unit="seconds",
            volatile=True,
            doc="time spent in reward functions",
        ),
        Column(name="advantage", type=pa.float64(), nullable=True, doc="group-relative advantage; null where unscored"),
        Column(
            name="token_advantages",
            type=_FLOATS,
            nullable=True,
            doc="per-token advantages when the KL penalty is part of the reward; null otherwise",
        ),
        Column(name="num_scored_in_group", type=pa.int32(), doc="members of the group whose reward is not null"),
    ),
)


def _metric(name: str, doc: str, unit: str | None = None, *, nullable: bool = False, volatile: bool = False) -> Column:
    return Column(name=name, type=pa.float64(), doc=doc, unit=unit, nullable=nullable, volatile=volatile)


def _count(name: str, doc: str, unit: str | None = None) -> Column:
    return Column(name=name, type=pa.int64(), doc=doc, unit=unit)


STEPS: Final = Table(
    name="steps",
    version=1,
    doc="One row per optimizer step of an update.",
    columns=(
        _count("step", "0-based within this update"),
        _count("global_step", "steps of the whole run up to and including this one; the schedule's argument"),
        _count("epoch", "pass over the rollouts, 0-based"),
        Column(
            name="status", type=_TEXT, doc="ok; no_tokens (nothing to train on); nonfinite (skipped, see skipped_ids)"
        ),
        Column(
            name="skipped_ids", type=pa.list_(_TEXT), nullable=True, doc="sample_ids of a step skipped as non-finite"
        ),
        _metric("loss", "policy term plus kl_coef times KL term, numerator over denominator"),
        _metric("policy_loss_numerator", "summed policy loss before the division"),
        _metric("kl_loss_numerator", "summed KL loss before the division and the coefficient", nullable=True),
        _metric("loss_denominator", "what both numerators are divided by; computed before the first forward"),
        _metric("kl", "mean k1 … k3 estimate over the step's tokens, against the reference", "nats", nullable=True),
        _metric("ratio_mean", "mean π/π_old over the step's tokens"),
        _metric("ratio_max", "largest π/π_old"),
        _metric("ratio_min", "smallest π/π_old"),
        _metric("clip_fraction_low", "share of tokens whose gradient the lower clip took away"),
        _metric("clip_fraction_high", "share of tokens whose gradient the upper clip took away"),
        _metric(
            "correction_mean", "mean off-policy weight over the step's tokens; null without correction", nullable=True
        ),
        _metric("entropy", "mean entropy over the step's tokens", "nats", nullable=True),
        _metric("grad_norm", "global L2 norm of the gradient before clipping", nullable=True),
        _metric("lr", "learning rate of this step"),
        _count("num_tokens", "completion tokens with loss", "tokens"),
        _count("num_sequences", "completions with at least one token with loss"),
        _count("num_micro_batches", "forward passes; changes memory and speed only"),
        _metric("seconds", "wall time of the step", "seconds", volatile=True),
    ),
)

TOKEN_STATS: Final = Table(
    name="token_stats",
    version=1,
    doc="Per-token values of an update's first epoch, written on request.",
    columns=(
        Column(name="sample_id", type=_TEXT, doc="as in rollouts"),
        Column(name="logprobs", type=_FLOATS, unit="nats", doc="under the policy at the step that used the row"),
        Column(name="ratio", type=_FLOATS, doc="π/π_old"),
        Column(name="clipped", type=_BOOLS, doc="true where a clip took the gradient away"),
        Column(name="kl", type=_FLOATS, unit="nats", nullable=True, doc="estimate against the reference"),
        Column(name="token_loss", type=_FLOATS, doc="policy loss before aggregation"),
    ),
)

TABLES: Final = {table.name: table for table in (ROLLOUTS, LOGPROBS, SCORES, STEPS, TOKEN_STATS)}
