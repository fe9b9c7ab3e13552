"""Rollouts from real vLLM and SGLang servers, and sync that loads new weights into them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from addition import QUICKSTART, addition_prompts
from command_line import Outcome, assert_refused, done, ended, grpoctl, manifest, rows, start
from engines import CONTEXT, Engine, sglang_command, sglang_server, vllm_command, vllm_server
from test_vllm import opinionated

from grpoctl.artifacts.artifact import open_artifact
from grpoctl.artifacts.tables import ROLLOUTS
from grpoctl.inputs.policies import BUILTIN

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
TINY = BUILTIN / "tiny"
EOS = 1
ANSWER_TAG = 319
EXACT = {"rollout_gap_mean": 5e-6, "rollout_gap_max": 1e-4}
"""Largest gaps of a float32 server from our float32 forward, nats; measured 5e-7 and 6e-6."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the servers' own logs."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def vllm(logs: Path) -> Iterator[Engine]:
    """vLLM in float32 on the built-in policy; stays alive and on its weights."""
    with vllm_server(TINY, logs / "vllm.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def sglang(logs: Path) -> Iterator[Engine]:
    """SGLang in float32 on the built-in policy; whoever loads other weights puts these back."""
    with sglang_server(TINY, logs / "sglang.log") as engine:
        yield engine


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Engine:
    """Either of the two."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Eight addition prompts."""
    pq.write_table(addition_prompts(8), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def rollout(engine: Engine | str, prompts: Path, out: Path, *options: object) -> tuple[object, ...]:
    url = engine if isinstance(engine, str) else engine.url
    given = ("rollout", "--engine", "server", "--server", url, "--prompts", prompts, "--out", out)
    return (*given, "--policy", "builtin:tiny", "--max-new-tokens", 28, *options)


def gaps(rollouts: Path, policy: object = "builtin:tiny") -> dict[str, Any]:
    out = rollouts.with_name(f"{rollouts.name}-logprobs")
    return done("logprob", "--rollouts", rollouts, "--policy", policy, "--out", out, "--json").record["facts"]


def assert_table(out: Path, num: int) -> pa.Table:
    table = open_artifact(str(out), table="rollouts").read()
    assert table.column_names == [column.name for column in ROLLOUTS.columns]
    assert table.num_rows == num and set(table["status"].to_pylist()) == {"ok"}
    assert len(set(table["sample_id"].to_pylist())) == num
    return table


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_agree_with_the_training_forward(
    server: Engine, prompts: Path, tmp_path: Path, temperature: float
) -> None:
    out = tmp_path / "rollouts"
    done(*rollout(server, prompts, out, "--temperature", temperature))
    table = assert_table(out, 64)
    assert len(set(table["completion"].to_pylist()[:8])) > 1
    facts = gaps(out)
    assert {name: facts[name] <= limit for name, limit in EXACT.items()} == dict.fromkeys(EXACT, True)
    sampling = manifest(out)["sampling"]
    assert "server (model " in sampling["engine"] and sampling["logprobs"] == "processed"
    assert sampling["reproducible"] is sampling["engine"].startswith("vllm")


@pytest.mark.parametrize("start_server", [vllm_server, sglang_server])
def test_a_model_s_own_generation_config_changes_no_draw(
    start_server: Any, prompts: Path, tmp_path: Path, logs: Path
) -> None:
    own = Path(opinionated(tmp_path / "own"))
    with start_server(own, logs / "own.log") as engine:
        for number, stop in enumerate(([], ["=<"], ["<|im_end|>"], ["</think>"])):
            out = tmp_path / str(number)
            done(*rollout(engine, prompts, out, "--policy", own, "--set", f"rollout.stop={json.dumps(stop)}"))
            assert len({len(row["completion_ids"]) for row in rows(out)}) > 2  # no limits of the model's
            done("logprob", "--rollouts", out, "--policy", own, "--out", f"{out}-l")
            assert manifest(f"{out}-l")["stats"]["rollout_gap_max"] <= EXACT["rollout_gap_max"]


@pytest.mark.parametrize("group_size", [1, 64])
def test_group_sizes(server: Engine, prompts: Path, tmp_path: Path, group_size: int) -> None:
    done(*rollout(server, prompts, tmp_path / "r", "--group-size", group_size, "--limit", 2))
    assert_table(tmp_path / "r", 2 * group_size)


def test_vllm_draws_the_same_from_the_same_seeds(vllm: Engine, prompts: Path, tmp_path: Path) -> None:
    for name, concurrency in (("a", 64), ("b", 3)):
        done(*rollout(vllm, prompts, tmp_path / name, "--set", f"runtime.server_concurrency={concurrency}"))
    first, second = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert [row["completion_ids"] for row in first] == [row["completion_ids"] for row in second]


def test_a_full_context_and_a_prompt_of_context_less_one(server: Engine, tmp_path: Path) -> None:
    texts = ["," * (CONTEXT - 1), "," * (CONTEXT - 24), ","]  # a token each, and the policy doesn't end after them
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "p.parquet")
    options = ("--group-size", 2, "--set", "prompts.cap_to_context=true")
    done(*rollout(server, tmp_path / "p.parquet", tmp_path / "r", *options))
    found = rows(tmp_path / "r")
    assert [len(row["prompt_ids"]) for row in found[::2]] == [CONTEXT - 1, CONTEXT - 24, 1]
    assert all(row["status"] == "ok" for row in found)
    assert {len(row["completion_ids"]) for row in found[:2]} == {1}
    full = [row for row in found if row["finish_reason"] == "length" and len(row["prompt_ids"]) > 1]
    assert full and {len(row["prompt_ids"]) + len(row["completion_ids"]) for row in full} == {CONTEXT}


def test_the_end_token_as_the_first(server: Engine, prompts: Path, tmp_path: Path) -> None:
    from grpoctl.engines.tokenizer import load_tokenizer

    done(*rollout(server, prompts, tmp_path / "first", "--group-size", 1))
    whole = next(row for row in rows(tmp_path / "first") if row["completion_ids"][-1] == EOS)
    ids = whole["prompt_ids"] + whole["completion_ids"][:-1]
    pq.write_table(pa.table({"prompt": [load_tokenizer(TINY, "tiny").inner.decode(ids)]}), tmp_path / "p.parquet")
    done(*rollout(server, tmp_path / "p.parquet", tmp_path / "r"))
    found = [row for row in rows(tmp_path / "r") if row["completion_ids"] == [EOS]]
    assert found and all((row["finish_reason"], row["completion"]) == ("stop", "") for row in found)


def test_stop_strings_and_end_tokens_stay_in_the_ids(server: Engine, prompts: Path, tmp_path: Path) -> None:
    done(*rollout(server, prompts, tmp_path / "r", "--set", "rollout.stop=['</answer>']"))
    found = rows(tmp_path / "r")
    answered = [row for row in found if row["completion_ids"][-1] == ANSWER_TAG]
    assert answered
    assert all("</answer>" not in row["completion"] and row["finish_reason"] == "stop" for row in answered)
    assert all(row["completion_ids"][-1] in (EOS, ANSWER_TAG) for row in found if row["finish_reason"] == "stop")


def test_stop_token_ids_end_a_completion(server: Engine, prompts: Path, tmp_path: Path) -> None:
    done(*rollout(server, prompts, tmp_path / "r", "--set", f"rollout.stop_token_ids=[{ANSWER_TAG}]"))
    found = rows(tmp_path / "r")
    assert any(row["completion_ids"][-1] == ANSWER_TAG and row["finish_reason"] == "stop" for row in found)
    assert all(ANSWER_TAG not in row["completion_ids"][:-1] for row in found)


# servers that die, hang, or aren't the policy


@pytest.fixture(scope="module")
def victim(logs: Path) -> Iterator[Engine]:
    """A second vLLM server, frozen and then killed by the tests that follow, in this order."""
    with vllm_server(TINY, logs / "victim.log") as engine:
        yield engine


def while_sampling(engine: Engine, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not engine.busy():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()


def started(out: Path, prompts: Path, *engines: Engine, **options: object) -> Any:
    more = [word for engine in engines[1:] for word in ("--server", engine.url)]
    sets = [word for name, value in options.items() for word in ("--set", f"runtime.{name}={value}")]
    return start(*rollout(engines[0], prompts, out, "--group-size", 64, *more, *sets))


def test_a_frozen_server_is_dropped_and_the_rest_completes(
    victim: Engine, vllm: Engine, prompts: Path, tmp_path: Path
) -> None:
    process = started(tmp_path / "r", prompts, victim, vllm, server_timeout_seconds=10)
    while_sampling(victim, process)
    victim.signal(signal.SIGSTOP)
    outcome: Outcome = ended(process)
    victim.signal(signal.SIGCONT)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count(f"{victim.url}: suspended") == 1
    assert_table(tmp_path / "r", 512)


def test_one_of_two_servers_killed_in_a_shard_loses_nothing(
    victim: Engine, vllm: Engine, prompts: Path, tmp_path: Path
) -> None:
    process = started(tmp_path / "r", prompts, victim, vllm)
    while_sampling(victim, process)
    victim.kill()
    outcome: Outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count(f"{victim.url}: suspended") == 1
    assert_table(tmp_path / "r", 512)
    assert gaps(tmp_path / "r")["rollout_gap_max"] <= EXACT["rollout_gap_max"]


def test_all_servers_killed_is_try_again_and_a_rerun_completes(
    logs: Path, vllm: Engine, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    with vllm_server(TINY, logs / "last.log") as last:
        command = rollout(last, prompts, out, "--group-size", 64, "--set", "rollout.prompts_per_shard=2")
        process = start(*command)
        while not list(out.glob("_shards/*.json")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        last.kill()
        outcome = ended(process)
    assert_refused(outcome, 75, todo="finished shards are kept")
    kept = {path.name: path.read_bytes() for path in out.glob("_shards/*.json")}
    assert 1 <= len(kept) < 4
    done(*rollout(vllm, prompts, out, "--group-size", 64, "--set", "rollout.prompts_per_shard=2"))
    assert_table(out, 512)
    assert all((out / "_shards" / name).read_bytes() == data for name, data in kept.items())


def test_log_probabilities_without_temperature_are_refused(logs: Path, prompts: Path, tmp_path: Path) -> None:
    with vllm_server(TINY, logs / "raw.log", raw=True) as raw:
        refused = grpoctl(*rollout(raw, prompts, tmp_path / "r"))
    assert_refused(refused, 3, found="leave temperature out", todo="--logprobs-mode processed_logprobs")


def test_bfloat16_is_told_and_then_accepted(logs: Path, prompts: Path, tmp_path: Path) -> None:
    with vllm_server(TINY, logs / "bf16.log", dtype="bfloat16") as engine:
        refused = grpoctl(*rollout(engine, prompts, tmp_path / "r"))
        assert_refused(refused, 3, found="runs in bfloat16", todo="set rollout.dtype to bfloat16")
        done(*rollout(engine, prompts, tmp_path / "r", "--set", "rollout.dtype=bfloat16"))
    sampling = manifest(tmp_path / "r")["sampling"]
    assert (sampling["dtype"], sampling["reproducible"]) == ("bfloat16", False)
    assert 1e-4 < gaps(tmp_path / "r")["rollout_gap_mean"] < 0.05


# new weights


def trained(folder: Path, policy: object) -> Path:
    """Make one update of a policy, sampled by transformers; return its artifact."""
    given = ("--rollouts", folder / "rollouts")
    done(
        "rollout",
        "--policy",
        policy,
        "--group-size",
        4,
        "--limit",
        4,
        "--max-new-tokens",
        28,
        "--seed",
        3,
        "--out",
        given[1],
    )
    done("score", *given, "--reward", "accuracy", "--out", folder / "scores")
    done("logprob", *given, "--policy", policy, "--out", folder / "logprobs")
    given = (*given, "--scores", folder / "scores", "--logprobs", folder / "logprobs")
    done("update", *given, "--policy", policy, "--lr", "1e-3", "--out", folder / "update")
    return folder / "update"


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An update of the built-in policy."""
    return trained(tmp_path_factory.mktemp("update"), "builtin:tiny")


def test_sync_loads_a_policy_into_sglang_and_rollouts_come_from_it(
    sglang: Engine, update: Path, prompts: Path, tmp_path: Path
) -> None:
    published = tmp_path / "policies"
    facts = done("sync", "--update", update, "--to", published, "--server", sglang.url, "--json").record["facts"]
    assert facts["server_gap_max"][sglang.url] <= EXACT["rollout_gap_max"]
    assert json.loads((published / "CURRENT").read_text())["version"] == 1
    stale = grpoctl(*rollout(sglang, prompts, tmp_path / "stale"))
    assert_refused(stale, 3, found="by its own word, builtin:tiny has", todo="grpoctl sync --server")
    done(*rollout(sglang, prompts, tmp_path / "new", "--policy", published))
    assert gaps(tmp_path / "new", published)["rollout_gap_max"] <= EXACT["rollout_gap_max"]
    assert "weights v000001-" in manifest(tmp_path / "new")["sampling"]["engine"]
    shutil.copytree(TINY, published / "v000000")
    (published / "v000000/grpoctl_policy.json").write_text(json.dumps(_record(update)))
    done("sync", "--to", published, "--rollback", 0, "--server", sglang.url)
    done(*rollout(sglang, prompts, tmp_path / "back"))


def _record(update: Path) -> dict[str, Any]:
    """Return the record of the policy that an update began with, as version 0."""
    from grpoctl.inputs.policies import open_policy

    record = json.loads((update / "policy/grpoctl_policy.json").read_text())
    parent = open_policy("builtin:tiny")
    return record | {"version": 0, "weights_digest": parent.weights_digest, "parent_digest": "", "consumed": []}


def test_vllm_with_a_tied_embedding_keeps_its_old_head_and_is_caught(logs: Path, update: Path, tmp_path: Path) -> None:
    with vllm_server(TINY, logs / "tied.log") as engine:
        refused = grpoctl("sync", "--update", update, "--to", tmp_path / "policies", "--server", engine.url)
    assert_refused(refused, 4, found="answers with other weights than .*v000001", todo="restart it on that folder")
    assert (tmp_path / "policies/v000001").is_dir()
    assert not (tmp_path / "policies/CURRENT").exists()


def untied(folder: Path) -> Path:
    """Write the built-in policy with an output embedding of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        folder.mkdir(exist_ok=True)
        shutil.copy(TINY / name, folder)
    model.save_pretrained(folder)
    return folder


def test_sync_loads_an_untied_policy_into_vllm(logs: Path, prompts: Path, tmp_path: Path) -> None:
    policy = untied(tmp_path / "untied")
    made = trained(tmp_path, policy)
    with vllm_server(policy, logs / "untied.log") as engine:
        published = tmp_path / "policies"
        done(*rollout(engine, prompts, tmp_path / "old", "--policy", policy))
        facts = done("sync", "--update", made, "--to", published, "--server", engine.url, "--json").record["facts"]
        assert facts["server_gap_max"][engine.url] <= EXACT["rollout_gap_max"]
        assert_refused(
            grpoctl(*rollout(engine, prompts, tmp_path / "stale", "--policy", policy)), 3, found="by its own word"
        )
        done(*rollout(engine, prompts, tmp_path / "new", "--policy", published))
    assert gaps(tmp_path / "new", published)["rollout_gap_max"] <= EXACT["rollout_gap_max"]


def test_a_pipeline_runs_on_a_server_that_sync_keeps_current(sglang: Engine, tmp_path: Path) -> None:
    """Three iterations; every later rollout must match the recomputed log-probabilities of its own policy."""
    restart = {"model_path": str(TINY), "weight_version": "default", "flush_cache": True}
    httpx.post(f"{sglang.url}/update_weights_from_disk", json=restart, timeout=60).raise_for_status()
    command = [
        sys.executable, "-m", "grpoctl", "run", QUICKSTART, "--run-dir", str(tmp_path / "run"), "--iterations", "3",
        "--server", sglang.url, "--set", "rollout.engine=server", "--set", "update.lr=1e-3", "--json",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads(result.stdout)
    assert [row["rollout_gap_max"] < 2e-4 for row in record["metrics"]] == [True, True, True]


def managed(command: Sequence[str], environment: dict[str, str], run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """Run three iterations whose rollouts come from a server that `run` starts; return metrics and stderr."""
    serve = {"command": list(command), "environment": environment}
    words = [
        sys.executable, "-m", "grpoctl", "run", QUICKSTART, "--run-dir", str(run_dir), "--iterations", "3",
        "--set", "rollout.engine=server", "--set", "update.lr=1e-3", "--set", f"runtime.serve={json.dumps(serve)}",
        "--set", "rollout.prompts_per_iteration=8", "--set", "update.mini_batch_size=64", "--json",
    ]  # fmt: skip
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)["metrics"], result.stderr


def test_run_starts_sglang_once_and_gives_it_each_new_policy(tmp_path: Path) -> None:
    command, environment = sglang_command("{policy}")
    rows, told = managed([*command, "--host", "127.0.0.1", "--port", "{port}"], environment, tmp_path / "run")
    assert [row["rollout_gap_max"] < 2e-4 for row in rows] == [True, True, True]
    assert told.count("starting server 0") == 1 and told.count("given the new policy") == 2


def test_run_starts_a_vllm_that_keeps_its_old_head_anew(tmp_path: Path) -> None:
    """On a CPU vLLM can't take weights whose output embedding is tied: each iteration gets a fresh server instead."""
    command, environment = vllm_command("{policy}")
    rows, told = managed([*command, "--host", "127.0.0.1", "--port", "{port}"], environment, tmp_path / "run")
    assert [row["rollout_gap_max"] < 2e-4 for row in rows] == [True, True, True]
    assert told.count("starting server 0") == 3 and told.count("starting it anew") == 2
