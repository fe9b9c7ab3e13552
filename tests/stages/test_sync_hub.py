"""Publishing to the Hugging Face hub: what main and the tags hold afterwards, and what a rerun, a race or a refusal does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Outcome, assert_refused, done, ended, grpoctl, manifest, start, write_prompts
from fake_hub import READER, WRITER, Commit, FakeHub, File, Repository, serving
from huggingface_hub import constants

NAME = "lab/grpo-tiny"
TO = f"hf://{NAME}"
RECORD = "grpoctl_policy.json"


@pytest.fixture(scope="module")
def updates(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of updates: first, other (the same version with other weights) and second (made from first)."""
    folder = tmp_path_factory.mktemp("updates")
    given = ("--rollouts", small_set / "rollouts", "--scores", small_set / "scores")
    given = (*given, "--logprobs", small_set / "logprobs", "--policy", "builtin:tiny")
    done("update", *given, "--lr", "1e-4", "--out", folder / "first")
    done("update", *given, "--lr", "2e-4", "--out", folder / "other")
    done("sync", "--update", folder / "first", "--to", folder / "policies")
    sampling = ("--group-size", 4, "--limit", 4, "--max-new-tokens", 28, "--seed", 3, "--iteration", 1)
    done("rollout", "--policy", folder / "policies", *sampling, "--out", folder / "rollouts")
    given = ("--rollouts", folder / "rollouts")
    done("score", *given, "--reward", "accuracy", "--out", folder / "scores")
    given = (*given, "--scores", folder / "scores", "--policy", folder / "policies")
    done("update", *given, "--lr", "1e-4", "--set", "update.old=rollout_logprobs", "--out", folder / "second")
    return folder


@pytest.fixture(scope="module")
def once(updates: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeHub:
    """Return a hub with the first update published by the command; tests go on from copies of its repository."""
    with serving(FakeHub()) as hub:
        home = tmp_path_factory.mktemp("home")
        outcome = as_process(hub, home, "sync", "--update", updates / "first", "--to", TO, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.record["out"] == f"{NAME}@v000001"
    assert outcome.record["state"] == "done"
    return hub


@pytest.fixture
def hub(once: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub that holds the first update, for this process too."""
    with serving(FakeHub(once.repositories, once.stored)) as hub:
        lead_to(hub.url, monkeypatch)
        yield hub


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub that holds nothing, for this process too."""
    with serving(FakeHub()) as hub:
        lead_to(hub.url, monkeypatch)
        yield hub


def as_process(hub: FakeHub, home: Path, *arguments: object, token: str = WRITER) -> Outcome:
    """Run a command as a process of its own, led to the hub as a user would."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "HF_TOKEN": token}
    return ended(start(*arguments, environment=environment))


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do to this process what those variables do to a new one, which huggingface_hub reads at import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITER)


def sync(*arguments: object) -> Outcome:
    """Run sync with the repository as its target."""
    return grpoctl("sync", "--to", TO, *arguments, "--json")


def repository(hub: FakeHub) -> Repository:
    """Return the repository that all tests publish to."""
    return hub.repositories[NAME]


def published(update: Path) -> dict[str, bytes]:
    """Return the files of an update's policy."""
    return {path.name: path.read_bytes() for path in (update / "policy").iterdir()}


def contents(commit: Commit) -> dict[str, bytes]:
    """Return a commit's files, without the hub's own."""
    return {path: file.data for path, file in commit.files.items() if path != ".gitattributes"}


def digest(update: Path) -> str:
    """Return the weights digest of an update's policy."""
    return json.loads((update / "policy" / RECORD).read_text())["weights_digest"]


def test_a_policy_becomes_one_commit_of_a_new_private_repository_and_its_version_a_tag(
    once: FakeHub, updates: Path
) -> None:
    one = repository(once)
    assert one.private
    assert [commit.title for commit in one.commits[1:]] == [f"v000001: weights {digest(updates / 'first')[:12]}"]
    assert one.tags == {"v000001": one.head.oid}
    assert contents(one.head) == published(updates / "first")
    assert one.head.files["model.safetensors"].lfs


def test_a_rollout_opens_the_published_version_by_its_tag(hub: FakeHub, updates: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", {"prompt": ["1+1="]})
    given = ("--prompts", prompts, "--policy", f"{NAME}@v000001", "--group-size", 2, "--max-new-tokens", 4)
    outcome = as_process(hub, tmp_path, "rollout", *given, "--out", tmp_path / "rollouts", token=READER)
    assert outcome.code == 0, outcome.err
    policy = manifest(tmp_path / "rollouts")["policy"]
    assert (policy["ref"], policy["version"]) == (f"{NAME}@v000001", 1)
    assert policy["weights_digest"] == digest(updates / "first")


def test_publishing_again_does_nothing(hub: FakeHub, updates: Path) -> None:
    outcome = sync("--update", updates / "first")
    assert outcome.record["state"] == "already_done"
    assert len(repository(hub).commits) == 2
    assert not {"create", "commit", "tag", "put"} & set(hub.asked)


def test_the_next_version_replaces_files_and_a_rollback_brings_the_earlier_ones_back(
    hub: FakeHub, updates: Path
) -> None:
    one = repository(hub)
    kept = {name: File(name.encode()) for name in ("README.md", "assets/curve.png")}
    stale = {"model-00001-of-00002.safetensors": File(b"old", lfs=True)}
    one.add("a page for people, and a file of other software", one.head.files | kept | stale)

    outcome = sync("--update", updates / "second")
    assert outcome.record["out"] == f"{NAME}@v000002", outcome.err
    second = one.head
    assert one.tags == {"v000001": one.commits[1].oid, "v000002": second.oid}
    assert contents(second) == published(updates / "second") | {name: file.data for name, file in kept.items()}
    assert digest(updates / "second") != digest(updates / "first")

    older = sync("--update", updates / "first")  # main is ahead of it, as CURRENT may be
    assert older.record["state"] == "already_done"

    planned = sync("--rollback", 1, "--dry-run")
    assert (planned.record["state"], one.head) == ("planned", second)
    hub.asked.clear()
    outcome = sync("--rollback", 1)
    assert outcome.record["out"] == f"{NAME}@v000001", outcome.err
    assert contents(one.head) == published(updates / "first") | {name: file.data for name, file in kept.items()}
    assert len(one.tags) == 2
    assert "put" not in hub.asked  # weights are copied on the hub's side
    num_commits = len(one.commits)
    assert sync("--rollback", 1).code == 0
    assert len(one.commits) == num_commits

    outcome = sync("--update", updates / "second")  # forward again, as with a folder
    assert outcome.record["state"] == "done", outcome.err
    assert contents(one.head) == contents(second)
    assert one.tags["v000002"] == second.oid


def test_a_kill_between_commit_and_tag_is_repaired_by_a_rerun(empty_hub: FakeHub, updates: Path) -> None:
    empty_hub.faults["tag"] = 503
    broken = sync("--update", updates / "first")
    assert_refused(broken, 75, where=TO, found="503", todo="rerun to continue")
    one = repository(empty_hub)
    assert (len(one.commits), one.tags) == (2, {})
    outcome = sync("--update", updates / "first")
    assert outcome.record["state"] == "already_done", outcome.err
    assert (len(one.commits), one.tags) == (2, {"v000001": one.head.oid})


@pytest.mark.parametrize("tagged", [True, False])
def test_a_version_with_other_weights_is_a_conflict(hub: FakeHub, updates: Path, tagged: bool) -> None:
    if not tagged:
        repository(hub).tags.clear()
    outcome = sync("--update", updates / "other")
    assert_refused(
        outcome,
        5,
        where=f"{NAME}@v000001",
        found=f"weights {digest(updates / 'first')[:12]}…, this one has {digest(updates / 'other')[:12]}…",
        todo="publish to another repository",
    )
    assert len(repository(hub).commits) == 2


def test_a_tag_of_something_else_is_a_conflict(hub: FakeHub, updates: Path) -> None:
    repository(hub).tags = {"v000002": repository(hub).commits[0].oid}
    outcome = sync("--update", updates / "second")
    assert_refused(outcome, 5, where=f"{NAME}@v000002", found="a tag of something else than a policy")


@pytest.mark.parametrize("writer", ["the same policy", "another policy", "a page for people"])
def test_whoever_commits_first_is_never_overwritten(hub: FakeHub, updates: Path, writer: str) -> None:
    one = repository(hub)
    files = {
        "the same policy": published(updates / "second"),
        "another policy": published(updates / "other"),
        "a page for people": contents(one.head) | {"README.md": b"# Tiny"},
    }[writer]
    theirs = {path: File(data, lfs=path.endswith(".safetensors")) for path, data in files.items()}
    hub.before["commit"] = lambda: one.add("theirs", {".gitattributes": one.head.files[".gitattributes"], **theirs})
    outcome = sync("--update", updates / "second")
    assert one.head.title == "theirs"
    if writer == "the same policy":
        assert outcome.record["state"] == "done", outcome.err
        assert one.tags["v000002"] == one.head.oid
        return
    assert len(one.tags) == 1
    if writer == "another policy":
        assert_refused(outcome, 5, where=TO, found="another policy was published here meanwhile")
    else:
        assert_refused(outcome, 75, where=TO, found="main was changed meanwhile", todo="rerun to go on from it")


@pytest.mark.parametrize("theirs", ["second", "first"])
def test_a_tag_that_another_writer_makes_first_is_compared(hub: FakeHub, updates: Path, theirs: str) -> None:
    one = repository(hub)
    first = one.tags["v000001"]
    hub.before["tag"] = lambda: one.tags.update(v000002=one.head.oid if theirs == "second" else first)
    outcome = sync("--update", updates / "second")
    if theirs == "second":
        assert outcome.record["state"] == "done", outcome.err
    else:
        assert_refused(outcome, 5, where=f"{NAME}@v000002", found="published from another update")


def test_a_repository_that_another_writer_creates_first_is_not_overwritten(empty_hub: FakeHub, updates: Path) -> None:
    def theirs() -> None:
        empty_hub.create({"organization": "lab", "name": "grpo-tiny"})
        repository(empty_hub).add("theirs", {path: File(data) for path, data in published(updates / "other").items()})

    empty_hub.before["create"] = theirs
    outcome = sync("--update", updates / "first")
    assert_refused(outcome, 5, where=TO, found="another policy was published here meanwhile")
    assert repository(empty_hub).head.title == "theirs"


def test_an_upload_that_is_refused_leaves_main_as_it_was(hub: FakeHub, updates: Path) -> None:
    hub.faults["put"] = 400
    outcome = sync("--update", updates / "second")
    assert_refused(outcome, 3, where=TO, found="refused the request .400: something broke")
    assert len(repository(hub).commits) == 2


def test_a_dry_run_of_a_new_repository_changes_nothing(empty_hub: FakeHub, updates: Path) -> None:
    outcome = sync("--update", updates / "first", "--dry-run")
    assert outcome.record["state"] == "planned", outcome.err
    assert empty_hub.asked == ["refs"]


def test_a_rollback_to_a_version_without_a_tag_is_refused(hub: FakeHub) -> None:
    outcome = sync("--rollback", 7)
    assert_refused(outcome, 3, where=f"{NAME}@v000007", found="no such published version", todo="see the tags")


@pytest.mark.parametrize(("token", "found"), [("", "401"), ("hf_revoked", "401: Invalid credentials")])
def test_a_missing_or_wrong_token_is_refused_before_any_work(
    hub: FakeHub, updates: Path, monkeypatch: pytest.MonkeyPatch, token: str, found: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    outcome = sync("--update", updates / "first")
    assert_refused(outcome, 3, where=TO, found=found, todo="credentials: set HF_TOKEN")
    assert set(hub.asked) == {"refs"}


def test_a_token_that_may_only_read_is_refused(hub: FakeHub, updates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    outcome = sync("--update", updates / "second")
    assert_refused(outcome, 3, where=TO, found="403: You don't have", todo="credentials: set HF_TOKEN")
    assert len(repository(hub).commits) == 2


def test_a_hub_that_fails_or_is_away_is_to_be_tried_again(
    hub: FakeHub, updates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults["refs"] = 500
    assert_refused(sync("--update", updates / "first"), 75, where=TO, found="500", todo="rerun to continue")
    lead_to("http://127.0.0.1:9", monkeypatch)
    assert_refused(sync("--update", updates / "first"), 75, where=TO, found="refused", todo="rerun to continue")


def test_a_gitignore_on_main_is_refused(hub: FakeHub, updates: Path) -> None:
    one = repository(hub)
    one.add("ignore", one.head.files | {".gitignore": File(b"*.json\n")})
    outcome = sync("--update", updates / "second")
    assert_refused(outcome, 3, where=TO, found=r"has a \.gitignore", todo="remove it from main")


def test_a_damaged_record_on_main_is_refused(hub: FakeHub, updates: Path) -> None:
    one = repository(hub)
    one.commits[-1] = replace(one.head, files=one.head.files | {RECORD: File(b"{}")})
    outcome = sync("--update", updates / "first")
    assert_refused(outcome, 3, where=TO, found=f"{RECORD} of commit {one.head.oid[:12]} is damaged")


@pytest.mark.parametrize(
    ("to", "found"),
    [
        ("hf://grpo-tiny", "expected hf://ORG/NAME"),
        ("hf://lab/grpo-tiny/policies", "expected hf://ORG/NAME"),
        ("hf://lab/grpo-tiny@main", "expected hf://ORG/NAME"),
        ("hf://datasets/lab/grpo-tiny", "expected hf://ORG/NAME, a model repository"),
        ("hf://datasets/lab", "expected hf://ORG/NAME, a model repository"),
        ("hf://lab/a--b", "not a name of a repository"),
    ],
)
def test_anything_but_a_model_repository_is_a_usage_error(to: str, found: str, updates: Path) -> None:
    assert_refused(grpoctl("sync", "--update", updates / "first", "--to", to), 2, where=f"--to {to}", found=found)


def test_servers_and_the_hub_do_not_go_together(updates: Path) -> None:
    outcome = grpoctl("sync", "--update", updates / "first", "--to", TO, "--server", "http://127.0.0.1:1")
    assert_refused(outcome, 2, where=f"--server with --to {TO}", found="servers load weights from a folder")


def test_without_huggingface_hub_the_extra_is_named(updates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "huggingface_hub" else find(name, *rest))
    outcome = grpoctl("sync", "--update", updates / "first", "--to", TO)
    assert_refused(outcome, 2, found="huggingface_hub is not installed", todo=r'pip install "grpoctl\[hub\]"')


def test_adapters_beside_a_policy_come_and_go_with_their_version(
    small_set: Path, empty_hub: FakeHub, tmp_path: Path
) -> None:
    given = ("--rollouts", small_set / "rollouts", "--scores", small_set / "scores")
    given = (*given, "--logprobs", small_set / "logprobs", "--policy", "builtin:tiny", "--set", "update.lora.rank=2")
    done("update", *given, "--lr", "1e-3", "--out", tmp_path / "first")
    done("sync", "--update", tmp_path / "first", "--to", tmp_path / "policies")
    sampling = ("--group-size", 4, "--limit", 4, "--max-new-tokens", 28, "--iteration", 1)
    done("rollout", "--policy", tmp_path / "policies", *sampling, "--out", tmp_path / "rollouts")
    done("score", "--rollouts", tmp_path / "rollouts", "--reward", "accuracy", "--out", tmp_path / "scores")
    given = ("--rollouts", tmp_path / "rollouts", "--scores", tmp_path / "scores", "--policy", tmp_path / "policies")
    given = (*given, "--set", "update.lora.rank=2", "--set", "update.old=rollout_logprobs", "--lr", "1e-3")
    done("update", *given, "--resume-from", tmp_path / "first", "--out", tmp_path / "second")
    beside = ("--to", TO, "--set", "sync.adapters=beside")
    done("sync", "--update", tmp_path / "first", *beside)
    name = "adapter/adapter_model.safetensors"
    first = empty_hub.repositories[NAME].head.files[name]
    done("sync", "--update", tmp_path / "second", *beside)
    assert empty_hub.repositories[NAME].head.files[name] != first
    done("sync", "--to", TO, "--rollback", 1)
    assert empty_hub.repositories[NAME].head.files[name] == first
    done("rollout", "--policy", f"{NAME}@v000002", "--limit", 2, "--group-size", 2, "--out", tmp_path / "r")
