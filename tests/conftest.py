"""What every test relies on: one thread, so numbers and times ignore the load; a small iteration to copy."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch at import, here and in the processes that tests start

import pyarrow.parquet as pq
import pytest
import torch
from addition import QUICKSTART, addition_prompts
from pipeline_file import small_pipeline  # noqa: F401  (fixtures of the fault tests)
from small_set import empty, small_set, work  # noqa: F401  (fixtures of the fault tests)

from grpoctl.pipeline.run import Pipeline
from grpoctl.settings.jobs import PipelineConfig
from grpoctl.settings.load import load_job
from grpoctl.stages.context import Context

torch.set_num_threads(1)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """A Parquet file with four addition prompts."""
    path = tmp_path / "prompts.parquet"
    pq.write_table(addition_prompts(4), path)
    return path


@pytest.fixture
def run_pipeline() -> Callable[..., Pipeline]:
    """Run quickstart.yaml with `key=value` changes and return the finished pipeline."""

    def run(*sets: str, **options: object) -> Pipeline:
        config = load_job(PipelineConfig, flags={}, sets=sets, file=QUICKSTART, environment={})
        pipeline = Pipeline(config=config, context=Context(quiet=True), **options)  # type: ignore[arg-type]
        pipeline.run()
        return pipeline

    return run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one iteration of 8 prompts × 4 samples with a KL term. Read only: copy it to change it."""
    run_dir = tmp_path_factory.mktemp("small") / "run"
    sets = [
        f"run_dir={run_dir}", "iterations=1", "rollout.prompts_per_iteration=8", "rollout.group_size=4",
        "rollout.prompts_per_shard=3", "update.mini_batch_size=16", "update.kl_coef=0.01", "reference=initial",
        "update.token_stats=true", "logprob.entropy=true",
    ]  # fmt: skip
    config = load_job(PipelineConfig, flags={}, sets=sets, file=QUICKSTART, environment={})
    Pipeline(config=config, context=Context(quiet=True)).run()
    return run_dir
