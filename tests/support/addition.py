"""Prompts that the built-in policy knows, and the pipeline that trains it."""

from pathlib import Path

import pyarrow as pa

QUICKSTART = str(Path(__file__).parents[2] / "pipelines/quickstart.yaml")


def addition_prompts(num_rows: int) -> pa.Table:
    """Return message prompts with answers."""
    pairs = [(3 + 7 * i, 91 - 5 * i) for i in range(num_rows)]
    prompts = [[{"role": "user", "content": f"What is {a % 100}+{b % 100}?"}] for a, b in pairs]
    return pa.table({"prompt": prompts, "answer": [str(a % 100 + b % 100) for a, b in pairs]})
