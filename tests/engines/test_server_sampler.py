"""Sampling over HTTP: nothing is lost, nothing is made up, and a server that isn't the policy is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_sglang as fake
import numpy as np
import pytest
from command_line import assert_refused, grpoctl
from fake_sglang import EOS, VOCAB_SIZE, FakeSglang, logprob, serving

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.proof import Probe
from grpoctl.engines.servers import link as server_link
from grpoctl.engines.servers import scheduler as server_shard
from grpoctl.engines.servers.link import Link, open_client
from grpoctl.engines.servers.load import load_policy_into
from grpoctl.engines.servers.protocol import ServerFacts
from grpoctl.engines.servers.sampler import ServerSampler, ServerSettings
from grpoctl.engines.servers.sglang import SglangServer
from grpoctl.engines.servers.vllm import VllmServer
from grpoctl.engines.tokenizer import Tokenizer
from grpoctl.errors import GateFailed, GrpoctlError, InputRefused, TryAgain

RECORDED = json.loads((Path(__file__).parents[1] / "data/sglang-0.5.23.json").read_text())
RECORDED_VLLM = json.loads((Path(__file__).parents[1] / "data/vllm-0.32.0.json").read_text())
TOKENIZER = Tokenizer(
    inner=None, folder=Path(), eos_ids=(EOS,), pad_id=0, context_tokens=64, vocab_size=VOCAB_SIZE
)  # fmt: skip
COMPLETIONS = ((7, 8, 9, 10), (20, 21))
PROBE = Probe(
    policy="policies/v000001",
    weights_digest="0123456789abcdef",
    prompts=((2, 3), (4,)),
    completions=COMPLETIONS,
    logprobs=tuple(tuple(map(logprob, ids)) for ids in COMPLETIONS),
    copy_dtype="float32",
    limits="float32",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait milliseconds where a real client waits seconds."""
    monkeypatch.setattr(server_link, "BACKOFF_SECONDS", 0.005)


def settings(**changes: Any) -> SamplingSettings:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": (), "stop_token_ids": ()}
    return SamplingSettings(**(defaults | changes))


def requests(num: int, *, max_new_tokens: int = 8) -> list[SampleRequest]:
    """Return prompts of growing length, each starting with its own number."""
    return [
        SampleRequest(
            prompt_ids=np.asarray([10 + i] * (1 + i % 40), dtype=np.int32), seed=i, max_new_tokens=max_new_tokens
        )
        for i in range(num)
    ]


def sampler(urls: Sequence[str], *, concurrency: int = 4, timeout_seconds: float = 20.0) -> ServerSampler:
    asked = ServerSettings(urls=tuple(urls), concurrency=concurrency, timeout_seconds=timeout_seconds)
    return ServerSampler(TOKENIZER, PROBE, asked)


def assert_whole(samples: Sequence[Sample], asked: Sequence[SampleRequest], *, temperature: float = 1.0) -> None:
    """Every request has its own answer, in its place."""
    assert len(samples) == len(asked)
    for sample, request in zip(samples, asked, strict=True):
        first, last = int(request.prompt_ids[0]), int(request.prompt_ids[-1])
        assert sample.error is None
        assert sample.completion_ids.tolist() == [first, last, EOS]
        expected = [logprob(token) / temperature for token in (first, last, EOS)]
        np.testing.assert_allclose(sample.logprobs, expected, rtol=1e-6)
        assert sample.finish_reason == "stop"


def run(*fakes: FakeSglang, num: int = 12, **options: Any) -> list[Sample]:
    with serving(*fakes) as urls:
        return sampler(urls, **options).sample(requests(num), settings())


# what a recorded answer becomes


def replayed(name: str, *, weights: str) -> Sample:
    """Put a recorded answer through the SGLang side, with the request that was recorded."""
    call = RECORDED[name]

    class Replay:
        url = "http://recorded"

        async def post(self, path: str, body: dict[str, Any]) -> Any:
            assert (path, body["input_ids"]) == (call["path"], call["request"]["input_ids"])
            return call["response"]

    facts = ServerFacts(
        program="sglang", version="0.5.23", model="m", weight_version=weights, dtype="float32",
        max_prompt_tokens=2042, max_total_tokens=2046,
    )  # fmt: skip
    params = call["request"]["sampling_params"]
    request = SampleRequest(
        prompt_ids=np.asarray(call["request"]["input_ids"]), seed=0, max_new_tokens=params["max_new_tokens"]
    )
    given = settings(temperature=params["temperature"] or 1.0, stop_token_ids=tuple(params.get("stop_token_ids", ())))
    return asyncio.run(SglangServer(facts, (2,)).sample(Replay(), request, given))  # type: ignore[arg-type]


def test_a_recorded_completion_keeps_ids_and_logprobs() -> None:
    sample = replayed("single", weights="default")
    assert sample.completion_ids.tolist() == [3575, 282, 4649, 314]
    np.testing.assert_allclose(sample.logprobs, [-0.238391176, -0.053861484, -0.967389584, -0.044027794], rtol=1e-6)
    assert (sample.finish_reason, sample.error) == ("length", None)


def test_a_recorded_stop_token_stays_in_the_ids() -> None:
    sample = replayed("stop", weights="default")
    assert (sample.completion_ids.tolist()[-1], sample.finish_reason, sample.error) == (314, "stop", None)


def test_a_recorded_abort_fails_the_row() -> None:
    sample = replayed("aborted", weights="default")
    assert (sample.finish_reason, sample.error) == ("abort", "the server ended the request with abort")


def test_a_recorded_completion_across_two_weight_versions_fails_the_row() -> None:
    sample = replayed("midflight_retract", weights="v1")
    assert sample.error == "sampled under weights default, v1, not v1 alone"


class VllmReplay:
    """A link that gives vLLM's recorded answers and keeps what was asked."""

    url = "http://recorded"

    def __init__(self, name: str, **changes: Any) -> None:
        call = RECORDED_VLLM[name]
        choice = call["response"]["choices"][0] | changes
        self.prompt = call["prompt"]
        self.answer = call["response"] | {"choices": [choice]}
        self.asked: dict[str, Any] = {}

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the recorded answer."""
        self.asked = body
        assert (path, body["prompt"]) == ("/v1/completions", self.prompt)
        return self.answer


def vllm_server() -> VllmServer:
    facts = ServerFacts(
        program="vllm", version="0.32.0", model="tiny", weight_version="default", dtype="float32",
        max_prompt_tokens=1023, max_total_tokens=1024,
    )  # fmt: skip
    return VllmServer(facts, (EOS,))


def vllm_sample(link: VllmReplay) -> Sample:
    request = SampleRequest(prompt_ids=np.asarray(link.prompt, dtype=np.int32), seed=7, max_new_tokens=4)
    return asyncio.run(vllm_server().sample(link, request, settings(temperature=0.5)))  # type: ignore[arg-type]


def test_a_recorded_vllm_completion_keeps_ids_and_logprobs() -> None:
    link = VllmReplay("single")
    sample = vllm_sample(link)
    assert sample.completion_ids.tolist() == [12, 13, 20, 12]
    np.testing.assert_allclose(sample.logprobs, [-0.177976027, -0.008005438, -0.214701667, 0.0], rtol=1e-6)
    assert (sample.finish_reason, sample.error) == ("length", None)
    sent = {name: link.asked[name] for name in ("seed", "temperature", "top_p", "top_k", "repetition_penalty", "n")}
    assert sent == {"seed": 7, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1}


def test_recorded_vllm_prompt_logprobs_are_of_the_given_ids() -> None:
    link = VllmReplay("forced")
    found = asyncio.run(vllm_server().forced(link, link.prompt))  # type: ignore[arg-type]
    np.testing.assert_allclose(found[:2] + found[-1:], [-7.584816933, -8.141861916, -13.608008385], rtol=1e-6)
    assert len(found) == 7


def test_minus_infinity_from_vllm_fails_the_row() -> None:
    logprobs = RECORDED_VLLM["single"]["response"]["choices"][0]["logprobs"]
    sample = vllm_sample(VllmReplay("single", logprobs=logprobs | {"token_logprobs": [-0.1, -9999.0, -0.2, -0.3]}))
    assert sample.error == "the server gave 3 log-probabilities for 4 tokens"
    assert np.isnan(sample.logprobs[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, r"gives no token ids; grpoctl needs vLLM ≥ 0\.10\.2"),
        ({"prompt_token_ids": [2, 10, 20]}, "changed the prompt's ids"),
    ],
)
def test_a_vllm_that_hides_or_changes_ids_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        vllm_sample(VllmReplay("single", **changes))


# every request is answered once, in its place


def test_two_replicas_share_the_work_long_prompts_first() -> None:
    first, second = FakeSglang(), FakeSglang()
    first.default = second.default = fake.slow
    asked = requests(40)
    with serving(first, second) as urls:
        samples = sampler(urls, concurrency=3).sample(asked, settings(temperature=0.5))
    assert_whole(samples, asked, temperature=0.5)
    lengths = [len(prompt) for prompt in first.sampled]
    assert len(first.sampled) + len(second.sampled) == 40
    assert min(len(first.sampled), len(second.sampled)) >= 12
    assert max(lengths[:3]) >= 38 and lengths[-1] <= 6


@pytest.mark.parametrize("code", [503, 429, 408, 500])
def test_a_busy_server_is_asked_again(code: int) -> None:
    server = FakeSglang()
    server.faults = {0: fake.status(code), 3: fake.status(code), 4: fake.status(code)}
    assert_whole(run(server), requests(12))
    assert len(server.sampled) == 15


@pytest.mark.parametrize("broken", [fake.reset, fake.half])
def test_a_broken_connection_loses_nothing(broken: fake.Fault) -> None:
    server = FakeSglang()
    server.faults = {2: broken, 7: broken}
    assert_whole(run(server), requests(12))


def test_a_hung_replica_is_suspended_once_and_its_prompts_are_asked_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    hung, well = FakeSglang(), FakeSglang()
    hung.faults = {1: fake.hang}
    with caplog.at_level(logging.WARNING, logger="grpoctl"):
        assert_whole(run(hung, well, timeout_seconds=3.0), requests(12))
    assert [message.split(": suspended")[0] for message in caplog.messages] == [hung.url]


def test_a_replica_that_stalls_while_its_health_is_fine_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, well = FakeSglang(), FakeSglang()
    forever = threading.Event()
    stalled.default = lambda *_: forever.wait(20) and None
    monkeypatch.setattr(server_shard, "MAX_COMEBACKS", 0)
    try:
        assert_whole(run(stalled, well, timeout_seconds=3.0), requests(12))
    finally:
        forever.set()


def test_a_server_restarted_on_its_first_weights_gives_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    restarted, well = FakeSglang(), FakeSglang()
    restarted.faults = {1: fake.other_weights}
    with caplog.at_level(logging.WARNING, logger="grpoctl"):
        assert_whole(run(restarted, well, concurrency=1), requests(12))
    assert "answers with other weights than policy policies/v000001" in caplog.text


def test_with_all_servers_gone_the_stage_asks_to_be_run_again() -> None:
    gone = FakeSglang()
    gone.faults = {3: fake.hang}
    with serving(gone) as urls, pytest.raises(TryAgain, match=r"no server is left .* finished shards are kept, rerun"):
        sampler(urls, timeout_seconds=3.0).sample(requests(12), settings())


def test_a_server_that_is_only_ever_busy_ends_in_try_again() -> None:
    server = FakeSglang()
    server.default = fake.status(503)
    with serving(server) as urls, pytest.raises(TryAgain, match=r"no server is left .* 503 busy"):
        sampler(urls).sample(requests(12), settings())


def test_one_unreachable_replica_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeSglang()) as urls, caplog.at_level(logging.WARNING, logger="grpoctl"):
        asked = requests(3)
        assert_whole(sampler([*urls, "http://127.0.0.1:9"]).sample(asked, settings()), asked)
    assert [r.message for r in caplog.records if "going on with 1 of 2 servers" in r.message] == [caplog.messages[0]]


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCTL_SERVER_API_KEY", "secret")
    server = FakeSglang()
    run(server, num=1)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


# a bad answer is a failed row, never a number


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fake.without_a_logprob, "the server gave 2 log-probabilities for 3 tokens"),
        (fake.one_id_short, "the server gave 3 log-probabilities for 2 tokens"),
        (fake.fewer_than_sampled, "the server gave 2 ids for 3 sampled tokens"),
    ],
)
def test_a_bad_answer_fails_its_row_only(fault: fake.Fault, message: str) -> None:
    server = FakeSglang()
    server.poison = {15: fault}
    samples = run(server)
    assert samples[5].error == message
    assert not (samples[5].logprobs == 0.0).any()
    assert_whole(samples[:5] + samples[6:], requests(12)[:5] + requests(12)[6:])


def test_an_abort_is_asked_again_twice_and_then_fails_the_row() -> None:
    passing, lasting = FakeSglang(), FakeSglang()
    passing.faults = {0: fake.aborted, 1: fake.aborted}
    assert_whole(run(passing, num=1), requests(1))
    lasting.default = fake.aborted
    samples = run(lasting, num=1)
    assert (samples[0].finish_reason, samples[0].error) == ("abort", "the server ended the request with abort")
    assert len(lasting.sampled) == 3


def test_a_request_that_a_server_always_fails_on_fails_alone() -> None:
    server = FakeSglang()
    server.poison = {13: fake.status(500)}
    samples = run(server, num=30)
    assert samples[3].error is not None and "500 busy" in samples[3].error
    assert [sample.error for i, sample in enumerate(samples) if i != 3] == [None] * 29


def test_a_limit_below_the_completion_is_length() -> None:
    with serving(FakeSglang()) as urls:
        (sample,) = sampler(urls).sample(requests(1, max_new_tokens=2), settings())
    assert (sample.finish_reason, len(sample.completion_ids)) == ("length", 2)


# servers that aren't the policy


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            FakeSglang(shift=0.01),
            r"other weights than policy policies/v000001 \(gap mean 0.01, max 0.01 nats.*bfloat16",
        ),
        (FakeSglang(shift=1.0), "other weights than policy policies/v000001 .* restart the server on it"),
        (FakeSglang(raw=True), "leave temperature out .* start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (FakeSglang(cached=0.1), "the prefix cache is of other weights: flush it"),
    ],
)
def test_a_server_with_other_weights_or_logprobs_is_refused(server: FakeSglang, message: str) -> None:
    with serving(server) as urls, pytest.raises(InputRefused, match=message):
        sampler(urls)
    assert server.sampled == []


def test_a_server_in_another_type_is_refused() -> None:
    server = FakeSglang()
    server.dtype = "bfloat16"
    with serving(server) as urls, pytest.raises(InputRefused, match=r"runs in bfloat16, rollout\.dtype says float32"):
        sampler(urls)


def test_a_server_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSglang, "answer", lambda *_: None)
    with serving(FakeSglang()) as urls, pytest.raises(InputRefused, match=r"neither as vLLM .* nor as SGLang"):
        sampler(urls)


def test_requests_that_a_server_cannot_take_are_refused_before_any_is_sent() -> None:
    server = FakeSglang()
    with serving(server) as urls:
        drawing = sampler(urls)
        outside = [SampleRequest(prompt_ids=np.asarray([3, VOCAB_SIZE], dtype=np.int32), seed=0, max_new_tokens=1)]
        for asked, given, message in [
            (outside, settings(), "token id 100, outside the policy's 100; nothing was sent"),
            (requests(1, max_new_tokens=70), settings(), "prompts up to 58 tokens and 62 .* --context-length"),
            (requests(1), settings(top_p=0.9), "log-probabilities leave top_p, top_k and min_p out"),
        ]:
            with pytest.raises(InputRefused, match=message):
                drawing.sample(asked, given)
    assert server.sampled == []


def test_engine_server_without_an_address_is_a_usage_error(empty: Path) -> None:
    assert_refused(grpoctl("rollout", "--engine", "server", "--limit", 1), 2, todo="--server http://HOST:PORT")


# new weights


def loaded(server: FakeSglang) -> float:
    async def load() -> float:
        async with open_client() as client:
            link = Link(server.url, client, timeout_seconds=5)
            gap = await load_policy_into(link, (EOS,), Path("/policies/v000001"), "v000001-abc", PROBE)
            return gap.max

    with serving(server):
        return asyncio.run(load())


def test_a_load_is_believed_after_the_probe() -> None:
    server = FakeSglang(shift=0.3)
    assert loaded(server) < 1e-6
    assert server.version == "v000001-abc"


@pytest.mark.parametrize(
    "name, refused", [("v000001-0123456789ab", False), ("default", False), ("v000000-fedcba987654", True)]
)
def test_a_server_that_names_another_policys_weights_is_refused_however_alike_it_answers(
    name: str, refused: bool
) -> None:
    server = FakeSglang()
    server.version = name
    if not refused:
        assert_whole(run(server), requests(12))
        return
    with pytest.raises(InputRefused, match="holds weights v000000-fedcba987654 by its own word, policies/v000001 has"):
        run(server)


def test_a_server_that_already_holds_the_weights_is_left_alone() -> None:
    server = FakeSglang()
    server.version = "v000001-abc"
    loaded(server)
    assert "/update_weights_from_disk" not in server.paths


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeSglang(shift=0.3, loads=False), "answers with other weights than policies/v000001 .* CURRENT stays"),
        (FakeSglang(shift=1e-4, loads=False), "the same to the last bit: still the old weights"),
    ],
)
def test_a_server_that_keeps_its_old_weights_is_an_error(server: FakeSglang, message: str) -> None:
    with pytest.raises(GateFailed, match=message) as caught:
        loaded(server)
    assert isinstance(caught.value, GrpoctlError) and caught.value.exit_code == 4
