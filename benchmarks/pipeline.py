"""Seconds of engine work against seconds of everything else, over a few iterations of the quickstart pipeline."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from grpoctl.pipeline.run import Pipeline
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job
from grpoctl.stages.context import Context

QUICKSTART = str(Path(__file__).parents[1] / "pipelines/quickstart.yaml")


def main() -> None:
    """Print the share of wall time that the stages' engines worked."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"run_dir={folder}/run", "iterations=6"]
        config = load_job(PipelineConfig, flags={}, sets=sets, file=QUICKSTART, environment={})
        pipeline = Pipeline(config=config, context=Context(quiet=True))
        marks: list[float] = []
        pipeline.tell = lambda _: marks.append(time.perf_counter())
        pipeline.run()
        rows = pipeline.metrics[1:]  # the first iteration loads the model
        wall = (marks[-1] - marks[0]) / len(rows)
        engine = sum(sum(row["seconds"].values()) for row in rows) / len(rows)
        print(f"an iteration: {wall:.3f} s wall, {engine:.3f} s of timed stage work, {1 - engine / wall:.0%} elsewhere")
        for stage in rows[0]["seconds"]:
            print(f"  {stage:8s} {sum(row['seconds'][stage] for row in rows) / len(rows):.3f} s")


if __name__ == "__main__":
    main()
