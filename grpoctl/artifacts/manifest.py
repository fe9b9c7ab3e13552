"""The record that makes an artifact exist: what it holds, what it was made from, and what defines it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from grpoctl import __version__

MANIFEST_SCHEMA = 1


class Record(BaseModel):
    """Base of everything written as JSON beside the data."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Shard(Record):
    """One committed part file."""

    index: int
    """0-based number of the shard; sidecar artifacts have the same numbers as their rollouts."""
    part: str
    """Path of the part file within the artifact."""
    bytes: int
    """Size of the part file."""
    sha256: str
    """Digest of the part file."""
    content_digest: str
    """Digest of the rows without volatile columns."""
    rows: int
    """Number of rows."""
    counts: dict[str, int]
    """Rows by status."""
    attempt: str
    """Identifier of the process that wrote it."""
    fingerprint: str
    """Fingerprint of the work it belongs to."""
    stats: dict[str, Any] = Field(default_factory=dict)
    """Sums over this shard from which the artifact's stats are made."""


class ArtifactFile(Record):
    """A file of an artifact that isn't a table part: weights, tokenizer, optimizer state."""

    path: str
    """Path within the artifact."""
    bytes: int
    """Size."""
    sha256: str
    """Digest."""


class Parent(Record):
    """An artifact this one was made from."""

    role: str
    """What it was used as: rollouts, scores, logprobs, update, trainer_state."""
    url: str
    """Where it was read from."""
    fingerprint: str
    """Its fingerprint."""
    manifest_sha256: str
    """Digest of its manifest's bytes."""
    content_digest: str
    """Digest of its content."""


class PolicyIdentity(Record):
    """Which weights and which tokenizer."""

    ref: str
    """As it was named."""
    version: int
    """0 for the initial policy, then one more for each update."""
    weights_digest: str
    """Digest over every tensor's name, dtype, shape and bytes."""
    tokenizer_digest: str
    """Digest over the tokenizer's files and the chat template."""


class Sampling(Record):
    """The distribution that completions were drawn from."""

    engine: str
    """Sampler and its version."""
    group_size: int
    """G, completions a prompt."""
    temperature: float
    """Logits were divided by it."""
    top_p: float
    """1.0 where not truncated."""
    top_k: int
    """0 where not truncated."""
    min_p: float
    """0.0 where not truncated."""
    max_new_tokens: int
    """Sampling limit, tokens."""
    dtype: str
    """Floating-point type of the sampler's weights."""
    logprobs: str
    """`processed` where rollout_logprobs are of the distribution sampled from."""
    prompt_format: str
    """`text` or `messages` (the prompt column is then canonical JSON)."""
    reproducible: bool
    """Whether the engine honours per-sample seeds."""


class RowAccounting(Record):
    """Where the rows went: input = ok + skipped + failed."""

    input: int
    """Rows the stage was asked for."""
    ok: int
    """Rows usable downstream (an empty completion counts as ok)."""
    skipped: int
    """Rows left out on purpose, by a policy named in the config."""
    failed: int
    """Rows stored with status failed (or without a reward)."""


class Manifest(Record):
    """`_MANIFEST.json`: written last, exclusively; without it the artifact doesn't exist."""

    manifest_schema: int = MANIFEST_SCHEMA
    """Version of this document."""
    table: str
    """Name of the table under data/."""
    table_version: int
    """Schema version of the table."""
    stage: str
    """Stage that made it."""
    fingerprint: str
    """sha256 of the canonical JSON of `definition`."""
    definition: dict[str, Any]
    """Everything that defines the result: stage, config without runtime, digests of inputs."""
    content_digest: str
    """Digest over the shards' content digests and the files' digests; equal for equal results."""
    config: dict[str, Any]
    """The whole resolved config, runtime included."""
    parents: list[Parent]
    """Artifacts read."""
    shards: list[Shard]
    """Part files, by index."""
    files: list[ArtifactFile]
    """Files beside the table."""
    rows: RowAccounting
    """Row accounting."""
    policy: PolicyIdentity | None
    """The policy that sampled (rollouts), that was recomputed (logprobs) or that resulted (update)."""
    reference: PolicyIdentity | None = None
    """The frozen reference, where one was used."""
    sampling: Sampling | None
    """The sampling definition, carried along from the rollouts."""
    stats: dict[str, Any]
    """The stage's summary numbers."""
    tokens: dict[str, int]
    """Token counts."""
    timings: dict[str, float]
    """Seconds by phase."""
    grpoctl_version: str
    """Version of grpoctl that wrote it."""
    environment: dict[str, str]
    """Versions of the packages that computed it."""


class PolicyRecord(Record):
    """`grpoctl_policy.json` inside a policy folder: where these weights come from."""

    version: int
    """0 for the initial policy, then one more for each update."""
    parent_digest: str
    """Weights digest of the policy that was updated."""
    weights_digest: str
    """Digest over every tensor's name, dtype, shape and bytes."""
    tokenizer_digest: str
    """Digest over the tokenizer's files and the chat template."""
    update_fingerprint: str
    """Fingerprint of the update that made it."""
    consumed: list[str]
    """Content digests of all rollouts this line of policies was trained on, so that none is applied twice."""
    dtype: str
    """Floating-point type of the stored weights."""
    adapter_digest: str | None = None
    """Digest over the tensors of the low-rank adapters that are merged into the weights, null without any."""
    grpoctl_version: str = __version__
    """Version that wrote it."""
