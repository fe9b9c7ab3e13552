"""How far each sampler's log-probabilities lie from the training engine's float32 ones: one Markdown row an engine and type.

python benchmarks/rollout_gap.py --policy REF --prompts FILE --prompt-column question --engine hf --engine vllm-server …

Every cell is `rollout` with that engine and `logprob` over what it wrote: mean / p99 / max |rollout_logprobs −
old_logprobs|, nats. Servers are started on this machine's CPU, once a type, by the interpreters that GRPOCTL_VLLM_PYTHON
and GRPOCTL_SGLANG_PYTHON name; `vllm` runs the whole stage in the former. Servers want the policy as a folder. Checked on
the way: all engines write the declared schema, and every row is usable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpoctl.artifacts.artifact import open_artifact
from grpoctl.artifacts.tables import ROLLOUTS
from grpoctl.inputs.policies import open_policy

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/integration"))
import engines as servers  # noqa: E402

ENGINES = ("hf", "vllm", "vllm-server", "sglang-server")
DTYPES = ("float32", "bfloat16")
FACTS = ("rollout_gap_mean", "rollout_gap_p99", "rollout_gap_max")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"} | os.environ


def grpoctl(python: str, *arguments: Any) -> dict[str, Any]:
    """Run a command with `--json` and return its answer."""
    command = [python, "-m", "grpoctl", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout)


@contextmanager
def rollout_command(engine: str, dtype: str, folder: Path, log: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the interpreter and the options that select an engine, with its server running where it has one."""
    vllm_options = ["--engine", "vllm", "--set", "runtime.enforce_eager=true", "--set", "runtime.cpu_cache_gib=1"]
    if engine == "hf":
        yield sys.executable, ["--engine", "hf"]
    elif engine == "vllm":
        yield servers.interpreter("GRPOCTL_VLLM_PYTHON", "env-vllm"), vllm_options
    else:
        start = servers.vllm_server if engine == "vllm-server" else servers.sglang_server
        with start(folder, log, dtype=dtype) as server:
            yield sys.executable, ["--engine", "server", "--server", server.url]


def usable_schema(out: Path, *, num_rows: int) -> pa.Schema:
    """Return the schema in the files of a rollouts artifact, after holding it to the declared one.

    Raises:
        AssertionError: another schema, another number of rows, or a failed row.
    """
    artifact = open_artifact(str(out), table=ROLLOUTS.name)
    schemas = [pq.read_schema(out / shard.part) for shard in artifact.manifest.shards]
    declared = ROLLOUTS.arrow_schema({"source": schemas[0].field("source").type})
    assert all(schema.equals(declared) for schema in schemas), f"{out}: {schemas[0]} ≠ {declared}"
    table = artifact.read()
    assert table.num_rows == num_rows, f"{out}: {table.num_rows} rows, expected {num_rows}"
    assert set(table["status"].to_pylist()) <= {"ok", "empty"}, f"{out}: {table['error'].drop_null().to_pylist()[:3]}"
    return schemas[0]


def gap(out: Path, policy: str) -> str:
    """Recompute a rollout's log-probabilities in float32 and return mean / p99 / max of the gap."""
    answer = grpoctl(
        sys.executable, "logprob", "--rollouts", out, "--policy", policy, "--out", f"{out}-logprobs",
        "--set", "logprob.gap_limit=99", "--set", "logprob.gap_warn=99",
    )  # fmt: skip
    return " / ".join(f"{answer['facts'][name]:.1e}" for name in FACTS)


def main() -> None:
    """Print the table, each row as soon as it is measured."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--policy", default="builtin:tiny")
    options.add_argument("--prompts", default="builtin:addition")
    options.add_argument("--prompt-column", help="text; it becomes a user turn of the policy's chat template")
    options.add_argument("--limit", type=int, default=64)
    options.add_argument("--group-size", type=int, default=2)
    options.add_argument("--max-new-tokens", type=int, default=16)
    options.add_argument("--engine", action="append", choices=ENGINES, help="repeatable; all four by default")
    options.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; both by default")
    options.add_argument("--temperature", action="append", type=float, help="repeatable; 1 and 0.7 by default")
    given = options.parse_args()
    temperatures = given.temperature or [1.0, 0.7]
    common = [
        "--policy", given.policy, "--prompts", given.prompts, "--limit", given.limit, "--group-size", given.group_size,
        "--max-new-tokens", given.max_new_tokens, "--set", "rollout.max_truncated_ratio=1",
    ]  # fmt: skip
    if given.prompt_column:
        common += ["--prompt-column", given.prompt_column, "--set", "prompts.chat_template=always"]
    print("| engine | " + " | ".join(f"T = {t:g}" for t in temperatures) + " |")
    print("|---" * (1 + len(temperatures)) + "|")
    schema: pa.Schema | None = None
    with tempfile.TemporaryDirectory() as name:
        for engine in given.engine or ENGINES:
            for dtype in given.dtype or DTYPES:
                started = time.monotonic()
                cells, label = [], engine
                with rollout_command(
                    engine, dtype, open_policy(given.policy).folder, Path(name) / f"{engine}-{dtype}.log"
                ) as (python, selected):
                    for temperature in temperatures:
                        out = Path(name) / f"{engine}-{dtype}-{temperature}"
                        grpoctl(
                            python, "rollout", *common, *selected, "--temperature", temperature,
                            "--set", f"rollout.dtype={dtype}", "--out", out,
                        )  # fmt: skip
                        found = usable_schema(out, num_rows=given.limit * given.group_size)
                        schema = schema or found
                        assert found.equals(schema, check_metadata=True), f"{engine}: {found}, others wrote {schema}"
                        manifest = open_artifact(str(out), table=ROLLOUTS.name).manifest
                        assert manifest.sampling is not None
                        label = f"{engine} ({manifest.sampling.engine.split(' (')[0]})"
                        cells.append(gap(out, given.policy))
                print(f"| {label} {dtype} | " + " | ".join(cells) + " |", flush=True)
                print(f"{engine} {dtype}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
