"""The forward that logprob and update share, and the sampler beside it, on the built-in policy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grpoctl.engines.base import SampleRequest, SamplingSettings, Unit, micro_batches_by_tokens, padded_width
from grpoctl.engines.forward import make_units, pack, unit_logprobs
from grpoctl.engines.hf.sampler import HfSampler
from grpoctl.engines.tokenizer import Tokenizer, load_tokenizer
from grpoctl.engines.torch.model import TorchPolicy, load_policy
from grpoctl.inputs.policies import BUILTIN

TINY = BUILTIN / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY, "builtin:tiny")


@pytest.fixture(scope="module")
def policy(tokenizer: Tokenizer) -> TorchPolicy:
    return load_policy(TINY, ref="builtin:tiny", vocab_size=tokenizer.vocab_size, device="cpu", dtype="float32")


def requests(tokenizer: Tokenizer, *, num_prompts: int = 6, group_size: int = 4) -> list[SampleRequest]:
    prompts = [f"What is {11 * i % 100}+{(7 * i + 5) % 100}?" for i in range(num_prompts)]
    encoded = [tokenizer.encode_messages([{"role": "user", "content": text}]) for text in prompts]
    return [
        SampleRequest(prompt_ids=ids, seed=1000 * number + sample, max_new_tokens=28)
        for number, ids in enumerate(encoded)
        for sample in range(group_size)
    ]


def settings(temperature: float = 1.0, **changes: object) -> SamplingSettings:
    values = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": (), "stop_token_ids": (), **changes}
    return SamplingSettings(temperature=temperature, **values)  # type: ignore[arg-type]


def logprobs_by_row(
    policy: TorchPolicy, wanted: list[SampleRequest], completions: list, **options: object
) -> list[np.ndarray]:
    budget = int(options.get("budget", 1 << 20))
    units = make_units([r.prompt_ids for r in wanted], completions, policy=policy, budget=budget)
    rows: dict[int, np.ndarray] = {}
    for chunk in micro_batches_by_tokens(units, budget):
        with torch.no_grad():
            flat, _ = unit_logprobs(policy, chunk, temperature=float(options.get("temperature", 1.0)))
        place = 0
        for unit in chunk:
            for row, ids in zip(unit.rows, unit.completions, strict=True):
                rows[row] = flat[place : place + len(ids)].numpy()
                place += len(ids)
    return [rows[row] for row in range(len(wanted))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_and_recomputed_logprobs_agree(policy: TorchPolicy, tokenizer: Tokenizer, temperature: float) -> None:
    wanted = requests(tokenizer)
    drawn = HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings(temperature))
    recomputed = logprobs_by_row(policy, wanted, [s.completion_ids for s in drawn], temperature=temperature)
    gaps = [np.abs(sample.logprobs - row).max() for sample, row in zip(drawn, recomputed, strict=True)]
    assert max(gaps) <= 1e-4
    other = logprobs_by_row(policy, wanted, [s.completion_ids for s in drawn], temperature=1.7 - temperature)
    assert max(np.abs(s.logprobs - row).max() for s, row in zip(drawn, other, strict=True)) > 0.01


def test_a_sample_does_not_depend_on_the_batch_it_is_drawn_in(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = requests(tokenizer)
    whole = HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings())
    pieces = HfSampler(policy, tokenizer, batch_size=5).sample(wanted[::-1], settings())[::-1]
    for one, other in zip(whole, pieces, strict=True):
        assert np.array_equal(one.completion_ids, other.completion_ids)
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_samples_of_a_group_differ_and_seeds_repeat(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = requests(tokenizer, num_prompts=1, group_size=16)
    sampler = HfSampler(policy, tokenizer, batch_size=64)
    first = [tuple(s.completion_ids) for s in sampler.sample(wanted, settings())]
    assert len(set(first)) > 4
    assert first == [tuple(s.completion_ids) for s in sampler.sample(wanted, settings())]


def test_sampling_follows_the_distribution(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    ids = requests(tokenizer, num_prompts=1, group_size=1)[0].prompt_ids
    wanted = [SampleRequest(prompt_ids=ids, seed=seed, max_new_tokens=1) for seed in range(4000)]
    drawn = HfSampler(policy, tokenizer, batch_size=4000).sample(wanted, settings())
    tokens, counts = np.unique([int(s.completion_ids[0]) for s in drawn], return_counts=True)
    with torch.no_grad():
        logits = policy.module(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1]
    expected = torch.softmax(logits.float(), dim=-1).numpy()
    for token, count in zip(tokens, counts, strict=True):
        share, deviation = expected[token], np.sqrt(expected[token] / 4000)
        assert abs(count / 4000 - share) < 5 * deviation + 1e-3


def test_truncated_sampling_reports_the_distribution_drawn_from(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = requests(tokenizer, num_prompts=2)
    greedy_like = HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings(top_k=1))
    assert all(np.all(sample.logprobs == 0.0) for sample in greedy_like)


def test_stop_strings_end_a_completion_and_stay_in_the_ids(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    drawn = HfSampler(policy, tokenizer, batch_size=64).sample(requests(tokenizer), settings(stop=("</answer>",)))
    ended = [tokenizer.decode(s.completion_ids) for s in drawn if "</answer>" in tokenizer.decode(s.completion_ids)]
    assert ended
    assert all(text.endswith("</answer>") and text.count("</answer>") == 1 for text in ended)
    assert {sample.finish_reason for sample in drawn} == {"stop"}


def test_a_limit_is_a_length_finish(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = [SampleRequest(prompt_ids=r.prompt_ids, seed=r.seed, max_new_tokens=2) for r in requests(tokenizer)]
    drawn = HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings())
    assert max(len(sample.completion_ids) for sample in drawn) == 2
    ended = [int(sample.completion_ids[-1]) in tokenizer.eos_ids for sample in drawn]
    assert [sample.finish_reason for sample in drawn] == ["stop" if end else "length" for end in ended]
    assert "length" in {sample.finish_reason for sample in drawn}


def test_a_shared_prompt_gives_the_numbers_of_separate_rows(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = requests(tokenizer)
    completions = [s.completion_ids for s in HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings())]
    shared = logprobs_by_row(policy, wanted, completions)
    with torch.no_grad():
        for row, (request, ids) in enumerate(zip(wanted, completions, strict=True)):
            whole = torch.from_numpy(np.concatenate([request.prompt_ids, ids]).astype(np.int64))[None]
            logits = policy.module(whole).logits[0, len(request.prompt_ids) - 1 : -1].double()
            plain = torch.log_softmax(logits, dim=-1).gather(-1, whole[0, len(request.prompt_ids) :, None])[:, 0]
            assert np.abs(shared[row] - plain.numpy()).max() < 2e-5


@pytest.mark.parametrize("budget", [512, 4096])
def test_rows_are_bit_equal_whatever_runs_beside_them(policy: TorchPolicy, tokenizer: Tokenizer, budget: int) -> None:
    wanted = requests(tokenizer, num_prompts=12)
    completions = [s.completion_ids for s in HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings())]
    whole = logprobs_by_row(policy, wanted, completions)
    part = logprobs_by_row(policy, wanted, completions, budget=budget)
    assert all(np.array_equal(one, other) for one, other in zip(whole, part, strict=True))


def test_gradients_of_shared_and_separate_rows_agree(policy: TorchPolicy, tokenizer: Tokenizer) -> None:
    wanted = requests(tokenizer, num_prompts=3)
    completions = [s.completion_ids for s in HfSampler(policy, tokenizer, batch_size=64).sample(wanted, settings())]

    def gradient(budget: int) -> torch.Tensor:
        policy.module.zero_grad()
        units = make_units([r.prompt_ids for r in wanted], completions, policy=policy, budget=budget)
        for chunk in micro_batches_by_tokens(units, budget):
            unit_logprobs(policy, chunk, temperature=1.0)[0].sum().backward()
        flat = torch.cat([p.grad.flatten() for p in policy.module.parameters()])
        policy.module.zero_grad()
        return flat

    together, apart = gradient(1 << 20), gradient(1)
    assert float((together - apart).norm() / together.norm()) < 1e-5


def test_an_empty_completion_has_no_positions(policy: TorchPolicy) -> None:
    empty, one = np.zeros(0, np.int32), np.array([5], np.int32)
    unit = Unit(prompt_ids=np.array([1, 2, 3], np.int32), completions=(empty, one, empty), rows=(0, 1, 2))
    values, _ = unit_logprobs(policy, [unit], temperature=1.0)
    assert values.shape == (1,)
    none, _ = unit_logprobs(policy, [Unit(prompt_ids=one, completions=(empty,), rows=(0,))], temperature=1.0)
    assert none.shape == (0,)


def test_padding_sees_itself_only() -> None:
    ids = np.arange(1, 4, dtype=np.int32)
    packed = pack([Unit(prompt_ids=ids, completions=(ids, ids), rows=(0, 1))], torch.device("cpu"))
    assert packed.mask is not None
    mask = packed.mask[0, 0]
    assert mask[3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert mask[7].nonzero()[:, 0].tolist() == [0, 1, 2, 6, 7]
    assert mask[20].nonzero()[:, 0].tolist()[-1] == 20
    assert not mask[20, :9].any()
    assert packed.position_ids[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]


def test_widths_depend_on_the_row_alone() -> None:
    assert [padded_width(n) for n in (1, 64, 65, 512, 513, 1024, 1025, 3000)] == [
        64,
        64,
        128,
        512,
        576,
        1024,
        1152,
        3072,
    ]


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    from grpoctl.errors import InputRefused

    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=0.05,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputRefused, match="scale or cap logits"):
        load_policy(tmp_path, ref="scaled", vocab_size=64, device="cpu", dtype="float32")
