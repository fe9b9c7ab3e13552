"""The cycle of stages: iteration after iteration over files, resuming at the first thing that isn't there.

Runs exactly the functions behind the commands. All state is in the run's artifacts; a killed run is continued by running
it again.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from grpoctl.artifacts.artifact import Artifact, read_manifest
from grpoctl.artifacts.canonical import canonical_json
from grpoctl.artifacts.storage import create_exclusively, locate, read_bytes, read_if_there, remove, write_bytes
from grpoctl.artifacts.writer import differences
from grpoctl.engines.registry import sampling_engine
from grpoctl.errors import Conflict, InputRefused, UsageError
from grpoctl.inputs.policies import POLICY_RECORD, open_policy
from grpoctl.pipeline.metrics import metrics_row
from grpoctl.pipeline.report import summary_line
from grpoctl.pipeline.servers import ManagedServers
from grpoctl.processes.interpreter import Interpreter
from grpoctl.settings.jobs import Job, PipelineConfig, RolloutJob
from grpoctl.stages.context import Context
from grpoctl.stages.registry import artifact_folders, cycle, stage_named
from grpoctl.stages.stage import StageResult, result_of, run
from grpoctl.stages.sync.stage import version_name
from grpoctl.stages.update.inputs import STATE

log = logging.getLogger("grpoctl")
LOCK: Final = "lock.json"
ORIGIN: Final = "origin.json"
METRICS: Final = "metrics.jsonl"
NOT_LOCKED: Final = {"runtime", "run_dir", "iterations", "name", "servers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Another run's iteration that this run starts from: its artifacts before `stage` are read where they lie."""

    run_dir: str
    iteration: int
    stage: str

    @staticmethod
    def parse(text: str) -> Origin:
        """Read `RUN_DIR/iter-000003/score`.

        Raises:
            UsageError: anything else.
        """
        head, _, stage = text.rstrip("/").rpartition("/")
        run_dir, _, name = head.rpartition("/")
        number = name.removeprefix("iter-")
        stages = artifact_folders()
        if stage not in stages or not run_dir or not number.isdigit():
            raise UsageError(f"--from {text}: expected RUN_DIR/iter-000003/STAGE with STAGE one of {', '.join(stages)}")
        return Origin(run_dir=run_dir, iteration=int(number), stage=stage)

    def covers(self, iteration: int, stage: str) -> bool:
        """Return whether a stage's artifact is taken from the other run."""
        order = list(artifact_folders())
        return iteration == self.iteration and order.index(stage) < order.index(self.stage)


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """One run of a pipeline file."""

    config: PipelineConfig
    context: Context
    origin: Origin | None = None
    accept_changes: bool = False
    tell: Callable[[str], None] = log.info
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    first_version: int = 0
    wall_seconds: float = 0.0
    engine_seconds: float = 0.0
    interpreters: dict[str, Interpreter] = field(default_factory=dict[str, Interpreter])
    servers: ManagedServers | None = None

    def run(self) -> dict[str, Any]:
        """Run every iteration that isn't finished; return the run's summary."""
        self.origin = self._settled_origin()
        self.first_version = open_policy(self.config.policy).version
        start = self.origin.iteration if self.origin else 0
        for iteration in range(start, self.config.iterations):
            started = time.monotonic()
            config = self._locked(iteration)
            worked = self._iteration(config, iteration)
            self.metrics.append(self._metrics_row(iteration))
            if worked:
                self.wall_seconds += time.monotonic() - started
                self.engine_seconds += sum(self.metrics[-1]["seconds"].values())
            self._write_metrics()
            self._prune(iteration)
            self.tell(summary_line(self.metrics[-1]) + ("" if worked else "  (already done)"))
        return {
            "run_dir": self.config.run_dir,
            "iterations": len(self.metrics),
            "wall_seconds": self.wall_seconds,
            "engine_seconds": self.engine_seconds,
            "metrics": self.metrics,
        }

    def plan(self) -> Iterator[str]:
        """Yield a line for each stage of each iteration: done, or to be run."""
        self.origin = self._stored_origin() or self.origin
        start = self.origin.iteration if self.origin else 0
        for iteration in range(start, self.config.iterations):
            for stage in self._stages(self.config):
                done = self._is_there(iteration, stage)
                yield f"iter-{iteration:06d} {stage:8s} {'done' if done else 'to run'}  {self._url(iteration, stage)}"

    def _is_there(self, iteration: int, stage: str) -> bool:
        if stage == "sync":
            place = locate(self._published(iteration + 1)).child(POLICY_RECORD)
            return read_if_there(place) is not None
        return read_manifest(self._url(iteration, stage)) is not None

    def _settled_origin(self) -> Origin | None:
        """Remember where a run branched off, so that continuing it needs no --from."""
        stored = self._stored_origin()
        if stored is not None:
            return stored
        if self.origin is not None:
            if self.origin.iteration >= self.config.iterations:
                raise UsageError(
                    f"--from {self.origin.run_dir}/iter-{self.origin.iteration:06d}: iterations is "
                    f"{self.config.iterations}, so the last one is {self.config.iterations - 1}; raise --iterations"
                )
            if read_if_there(locate(self.origin.run_dir).child(f"iter-{self.origin.iteration:06d}/{LOCK}")) is None:
                raise InputRefused(
                    f"--from {self.origin.run_dir}/iter-{self.origin.iteration:06d}: no such iteration; see "
                    f"`grpoctl status {self.origin.run_dir}`"
                )
            facts = {"run_dir": self.origin.run_dir, "iteration": self.origin.iteration, "stage": self.origin.stage}
            create_exclusively(locate(self.config.run_dir).child(ORIGIN), json.dumps(facts).encode())
        return self.origin

    def _stored_origin(self) -> Origin | None:
        """Return where this run branched off when it began.

        Raises:
            Conflict: `--from` says another place.
        """
        place = locate(self.config.run_dir).child(ORIGIN)
        data = read_if_there(place)
        if data is None:
            return None
        stored = Origin(**json.loads(data))
        if self.origin is not None and self.origin != stored:
            raise Conflict(f"{place.url}: this run branched off {stored.run_dir}, not {self.origin.run_dir}")
        return stored

    def _locked(self, iteration: int) -> PipelineConfig:
        """Return the iteration's config: the one it began with, which an edited file can't change behind its back."""
        ours = self.config.model_dump(mode="json", exclude=NOT_LOCKED)
        place = locate(self.config.run_dir).child(f"iter-{iteration:06d}/{LOCK}")
        if create_exclusively(place, canonical_json(ours).encode()):
            return self.config
        theirs = self._known(json.loads(read_bytes(place)), place.url)
        changed = list(differences(theirs, ours))
        if not changed:
            return self.config
        shown = "; ".join(f"{key}: {before} → {after}" for key, before, after in changed[:6])
        if not self.accept_changes:
            raise Conflict(
                f"{place.url}: iteration {iteration} began with other settings ({shown}); use another --run-dir, or "
                "--accept-changes to finish begun iterations as they began and change the later ones"
            )
        log.warning("iteration %d keeps the settings it began with (%s)", iteration, shown)
        outside = self.config.model_dump(mode="json", include=NOT_LOCKED)
        return PipelineConfig.model_validate({**theirs, **outside})

    def _known(self, stored: dict[str, Any], where: str) -> dict[str, Any]:
        """Return settings as they were stored, those that didn't exist yet at their defaults."""
        outside = self.config.model_dump(mode="json", include=NOT_LOCKED)
        try:
            full = PipelineConfig.model_validate({**stored, **outside})
        except ValidationError as error:
            first = error.errors()[0]
            raise InputRefused(
                f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}; written by another version of grpoctl: "
                "continue the run with that one, or use another --run-dir"
            ) from error
        return full.model_dump(mode="json", exclude=NOT_LOCKED)

    def _stages(self, config: PipelineConfig) -> list[str]:
        return [name for name in cycle() if stage_named(name).needed(config)]

    def _iteration(self, config: PipelineConfig, iteration: int) -> bool:
        worked = False
        for stage in self._stages(config):
            if self.origin and stage in artifact_folders() and self.origin.covers(iteration, stage):
                continue
            self.context.stop.check()
            started = time.monotonic()
            result = self._run_stage(stage, self._with_servers(config, iteration, stage), config)
            worked = worked or result.state == "done"
            log.debug("iter-%06d %s: %s in %.2f s", iteration, stage, result.state, time.monotonic() - started)
        return worked

    def _run_stage(self, name: str, job: Job, config: PipelineConfig) -> StageResult:
        """Run a stage in this process, or in the interpreter that runtime.python names for it."""
        stage = stage_named(name)
        python = config.runtime.python.get(name)
        if python is None:
            return run(stage, job, self.context)
        if python not in self.interpreters:
            self.interpreters[python] = Interpreter(python, module="grpoctl.stages.serve")
        request = {"stage": name, "job": job.model_dump(mode="json")}
        answer = self.interpreters[python].ask(request, what=name, stop=self.context.stop)
        artifact = None if stage.table is None else read_manifest(answer["out"])
        return result_of(answer, artifact=artifact)

    def _with_servers(self, config: PipelineConfig, iteration: int, stage: str) -> Job:
        """Return a stage's job; one that samples from servers of our own gets their addresses."""
        job = self._job(config, iteration, stage)
        asks = isinstance(job, RolloutJob) and sampling_engine(job.rollout.engine).asks_servers
        if not isinstance(job, RolloutJob) or not asks or self._is_there(iteration, stage):
            return job
        if self.servers is None:
            place = locate(self.config.run_dir)
            logs = Path(place.path) if place.is_local else Path(tempfile.mkdtemp(prefix="grpoctl-"))
            self.servers = ManagedServers(config.runtime, self.context, logs / "servers")
        return job.model_copy(update={"servers": (*job.servers, *self.servers.serving(job.policy))})

    def close(self) -> None:
        """End the interpreters that stages were run in, and the servers."""
        if self.servers is not None:
            self.servers.close()
        for interpreter in self.interpreters.values():
            interpreter.close()

    def _job(self, config: PipelineConfig, iteration: int, stage: str) -> Job:
        """Return a stage's job of an iteration: the pipeline's settings, and where this iteration reads and writes."""
        others = {name for name in self._stages(config) if name != stage}
        inputs = {
            **{folder: self._url(iteration, name) for name, folder in artifact_folders().items() if name in others},
            "policy": self._policy(config, iteration),
            "reference": config.policy if config.reference == "initial" else config.reference,
            "resume_from": self._previous_update(iteration),
            "iteration": iteration,
            "out": self._url(iteration, stage),
            "to": f"{config.run_dir}/policies",
            "runtime": config.stage_runtime,
        }
        return stage_named(stage).job.of(config, inputs)

    def _url(self, iteration: int, stage: str) -> str:
        if stage == "sync":
            return self._published(iteration + 1)
        run_dir = self.config.run_dir
        if self.origin and self.origin.covers(iteration, stage):
            run_dir = self.origin.run_dir
        return f"{run_dir}/iter-{iteration:06d}/{artifact_folders()[stage]}"

    def _published(self, iteration: int) -> str:
        run_dir = self.config.run_dir
        if self.origin and iteration <= self.origin.iteration:
            run_dir = self.origin.run_dir
        return f"{run_dir}/policies/{version_name(self.first_version + iteration)}"

    def _policy(self, config: PipelineConfig, iteration: int) -> str:
        return config.policy if iteration == 0 else self._published(iteration)

    def _previous_update(self, iteration: int) -> str | None:
        if iteration == 0:
            return None
        branched = self.origin is not None and iteration == self.origin.iteration
        run_dir = self.origin.run_dir if branched and self.origin else self.config.run_dir
        return f"{run_dir}/iter-{iteration - 1:06d}/update"

    def _manifests(self, iteration: int) -> dict[str, Artifact]:
        found = {stage: read_manifest(self._url(iteration, stage)) for stage in artifact_folders()}
        return {stage: artifact for stage, artifact in found.items() if artifact is not None}

    def _metrics_row(self, iteration: int) -> dict[str, Any]:
        return metrics_row(iteration, self._manifests(iteration))

    def _write_metrics(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.metrics)
        write_bytes(locate(self.config.run_dir).child(METRICS), lines.encode())

    def _prune(self, iteration: int) -> None:
        """Drop the optimizer state of iterations that nothing will continue from."""
        keep = self.config.runtime.keep_states
        old = iteration - (keep or 0)
        if keep is not None and old >= (self.origin.iteration if self.origin else 0):
            remove(locate(self.config.run_dir).child(f"iter-{old:06d}/update/{STATE}"))
