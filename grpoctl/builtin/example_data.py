"""Small files to try the commands on: addition prompts, and preferences between good and bad answers to them."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa

from grpoctl.inputs.rows import read_rows


def example_prompts(num_rows: int) -> pa.Table:
    """Return prompts (message lists) with their answers."""
    return read_rows("builtin:addition", num_rows)[0].select(["prompt", "answer"])


def example_preferences(num_rows: int) -> pa.Table:
    """Return prompts with a worked, tagged answer as `chosen` and a wrong, untagged or bare one as `rejected`."""
    rows = read_rows("builtin:addition", num_rows)[0]
    chosen: list[str] = []
    rejected: list[str] = []
    for number, prompt_id in enumerate(cast("list[str]", rows["prompt_id"].to_pylist())):
        a, b = (int(part) for part in prompt_id.split("-")[1:])
        chosen.append(f"<think>{_working(a, b)}</think><answer>{a + b}</answer>")
        bad = (f"<answer>{a + b + 1}</answer>", str(a + b), f"<think>{_working(a, b)}</think>{a + b}")
        rejected.append(bad[number % len(bad)])
    columns = {"prompt": rows["prompt"], "chosen": chosen, "rejected": rejected}
    return cast("Any", pa).table(columns)


def _working(a: int, b: int) -> str:
    """Return the sum digit by digit, units first, as the built-in policy writes it."""
    carry = (a % 10 + b % 10) // 10
    tens = f"{a // 10}+{b // 10}" + (f"+{carry}" if carry else "")
    return f"{a % 10}+{b % 10}={a % 10 + b % 10},{tens}={a // 10 + b // 10 + carry}"
