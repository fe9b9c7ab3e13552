"""The value head: rewards at the last valid token, whatever the batch; heads that are never left random."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    Qwen2ForSequenceClassification,
)

from grpoctl.algorithms.preference import bradley_terry_loss
from grpoctl.engines.base import OptimizerSettings
from grpoctl.engines.value_head.model import RewardModel, load_reward_model, new_reward_model, save_reward_model
from grpoctl.engines.value_head.trainer import PairIds, PreferenceTrainer
from grpoctl.errors import InputRefused
from grpoctl.inputs.policies import BUILTIN

TINY = BUILTIN / "tiny"
CONTEXT = 1024
PAD, EOS = 0, 1


def fresh(seed: int = 5) -> RewardModel:
    return new_reward_model(TINY, ref="tiny", device="cpu", dtype="float32", seed=seed, context_tokens=CONTEXT)


def load(folder: Path, *, context_tokens: int = CONTEXT) -> RewardModel:
    return load_reward_model(folder, ref="rm", device="cpu", dtype="float32", context_tokens=context_tokens)


def rows(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 320, size=length).astype(np.int32) for length in lengths]


@torch.no_grad()
def by_hand(model: RewardModel, ids: np.ndarray) -> float:
    """The reward from an unpadded forward of this row alone."""
    hidden = model.backbone(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state
    return float(hidden[0, len(ids) - 1] @ model.head[0])


@pytest.fixture(scope="module")
def model() -> RewardModel:
    return fresh()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder as `save_reward_model` leaves it, with config and tokenizer."""
    save_reward_model(fresh(), tmp_path / "rm")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "rm")
    return tmp_path / "rm"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A reward model as transformers publishes it."""
    torch.manual_seed(3)
    classifier = Qwen2ForSequenceClassification.from_pretrained(TINY, dtype=torch.float32, num_labels=1)
    classifier.save_pretrained(tmp_path / "published")
    return tmp_path / "published"


def test_the_loss_is_minus_the_log_probability_that_the_chosen_wins() -> None:
    chosen = torch.tensor([0.0, 1.0, 0.0, 1000.0, 0.0])
    rejected = torch.tensor([0.0, 0.0, 1.0, 0.0, 1000.0])
    expected = [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.e), 0.0, 1000.0]
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(expected, rel=1e-6)


@given(st.floats(-30, 30), st.floats(-30, 30), st.floats(-30, 30))
def test_only_the_difference_of_rewards_counts(chosen: float, rejected: float, shift: float) -> None:
    both = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(both[0], both[1])
    shifted = bradley_terry_loss(both[0] + shift, both[1] + shift)
    assert float(shifted.detach()) == pytest.approx(float(loss.detach()), abs=1e-9)
    loss.backward()
    assert both.grad is not None
    assert float(both.grad.sum()) == pytest.approx(0.0, abs=1e-12)
    assert float(both.grad[1]) == pytest.approx(1 / (1 + math.exp(chosen - rejected)), rel=1e-9)


def test_a_row_scores_the_same_alone_and_among_others(model: RewardModel) -> None:
    batch = rows([1, 2, 63, 64, 65, 128, 7, 7, 200, 520, 90, 64])
    together = model.score(batch, budget=16384)
    for budget in (1, 700, 100_000):
        np.testing.assert_array_equal(model.score(batch, budget=budget), together)
    alone = np.concatenate([model.score([ids], budget=16384) for ids in batch])
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(alone, together)  # bit-equal on this platform, by the rule for widths
    np.testing.assert_allclose([by_hand(model, ids) for ids in batch], together, rtol=0, atol=1e-5)


def test_the_order_of_rows_is_kept(model: RewardModel) -> None:
    batch = rows([200, 3, 70, 3, 150])
    backwards = model.score(batch[::-1], budget=300)
    np.testing.assert_array_equal(model.score(batch, budget=300), backwards[::-1])


def test_the_last_token_is_found_by_length_even_where_it_is_pad_or_eos(model: RewardModel) -> None:
    plain = rows([30])[0]
    ends = [np.append(plain, np.full(count, token, dtype=np.int32)) for token in (PAD, EOS) for count in (1, 3)]
    scores = model.score([plain, *ends], budget=16384)
    np.testing.assert_allclose(scores, [by_hand(model, ids) for ids in (plain, *ends)], rtol=0, atol=1e-5)
    assert len(set(scores.tolist())) == 5  # each real token counts; only padding doesn't


def test_a_padded_row_never_exceeds_the_context() -> None:
    short = fresh()
    short.context_tokens = 100
    batch = rows([100, 99, 65])
    np.testing.assert_allclose(
        short.score(batch, budget=16384), [by_hand(short, ids) for ids in batch], rtol=0, atol=1e-5
    )


def test_no_rows_no_scores(model: RewardModel) -> None:
    assert model.score([], budget=10).shape == (0,)


def test_saving_and_loading_changes_no_bit(saved: Path) -> None:
    batch = rows([5, 80, 33])
    np.testing.assert_array_equal(load(saved).score(batch, budget=999), fresh().score(batch, budget=999))
    assert list(load_file(str(saved / "value_head.safetensors"))) == ["value_head.weight"]
    assert load_file(str(saved / "value_head.safetensors"))["value_head.weight"].shape == (1, 96)
    assert not [path for path in saved.iterdir() if path.stat().st_mode & 0o044 != 0o044]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v_head.weight": (1, 96)}, r"holds \['v_head.weight'\], expected value_head.weight alone"),
        ({}, r"holds \[\], expected value_head.weight alone"),
        ({"value_head.weight": (1, 96), "value_head.bias": (1,)}, r"holds \['value_head.bias', 'value_head.weight'\]"),
        ({"value_head.weight": (2, 96)}, r"value_head.weight: shape \(2, 96\), expected \(1, 96\)"),
        ({"value_head.weight": (1, 95)}, r"value_head.weight: shape \(1, 95\), expected \(1, 96\)"),
    ],
)
def test_another_head_is_refused(saved: Path, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, str(saved / "value_head.safetensors"))
    with pytest.raises(InputRefused, match=message):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"1 weights are missing and would be random \(.*up_proj"),
        (lambda t: t.update({"layers.9.extra": torch.ones(1)}), r"1 weights have no place .*layers\.9\.extra"),
    ],
)
def test_an_incomplete_backbone_is_refused(saved: Path, change, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(InputRefused, match=message):
        load(saved)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(str(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def test_a_published_reward_model_scores_as_transformers_does(published: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(published, dtype=torch.float32)
    batch = rows([1, 9, 64, 130])
    with torch.no_grad():
        expected = [float(theirs(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0]) for ids in batch]
    np.testing.assert_allclose(load(published).score(batch, budget=4096), expected, rtol=0, atol=1e-5)


def test_a_published_reward_model_needs_no_pad_id(published: Path) -> None:
    batch = [np.append(rows([20])[0], np.int32(PAD)), *rows([20, 70])]
    ours = load(published)
    np.testing.assert_allclose(ours.score(batch, budget=4096), [by_hand(ours, ids) for ids in batch], rtol=0, atol=1e-5)
    config = json.loads((published / "config.json").read_text())
    for pad in (None, int(batch[1][-1])):  # no pad token, or one that the text itself ends with
        (published / "config.json").write_text(json.dumps({**config, "pad_token_id": pad}))
        np.testing.assert_array_equal(load(published).score(batch, budget=4096), ours.score(batch, budget=4096))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("score.weight"), "no value head: score.weight isn't among its weights and would be random"),
        (lambda t: t.update({"score.bias": torch.ones(1)}), r"1 weights have no place .*\(score.bias\)"),
        (
            lambda t: t.update({"value_head.weight": torch.ones(1, 96)}),
            r"1 weights have no place .*\(value_head.weight\)",
        ),
        (lambda t: t.pop("model.norm.weight"), r"1 weights are missing and would be random \(model.norm.weight\)"),
    ],
)
def test_a_published_model_with_another_head_is_refused(published: Path, change, message: str) -> None:
    rewrite(published, change)
    with pytest.raises(InputRefused, match=message):
        load(published)


def test_the_output_embedding_that_a_published_model_kept_is_no_head(published: Path) -> None:
    expected = load(published).score(rows([12]), budget=99)
    rewrite(published, lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 96)}))
    np.testing.assert_array_equal(load(published).score(rows([12]), budget=99), expected)


def test_learned_positions_and_untied_embeddings_work_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for config in (
        GPT2Config(**size, n_positions=50),
        LlamaConfig(**size, intermediate_size=64, num_key_value_heads=1),
    ):
        language_model = AutoModelForCausalLM.from_config(config)
        language_model.save_pretrained(tmp_path / config.model_type)
        model = new_reward_model(
            tmp_path / config.model_type, ref="m", device="cpu", dtype="float32", seed=1, context_tokens=50
        )
        batch = rows([50, 1, 49, 13])
        expected = [by_hand(model, ids) for ids in batch]
        np.testing.assert_allclose(model.score(batch, budget=120), expected, rtol=0, atol=1e-5)
        save_reward_model(model, tmp_path / "rm")
        shutil.copy(tmp_path / config.model_type / "config.json", tmp_path / "rm")
        again = load(tmp_path / "rm", context_tokens=50)
        np.testing.assert_array_equal(again.score(batch, budget=120), model.score(batch, budget=120))
        shutil.rmtree(tmp_path / "rm")


def test_an_encoder_s_classifier_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(InputRefused, match="BertForSequenceClassification has no plain linear head on the last token"):
        load(tmp_path)


def test_an_architecture_that_computes_more_than_the_head_is_refused(published: Path, monkeypatch) -> None:
    forward = Qwen2ForSequenceClassification.forward

    def capped(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.tanh() * 0.01
        return output

    monkeypatch.setattr(Qwen2ForSequenceClassification, "forward", capped)
    with pytest.raises(InputRefused, match=r"its architecture scores a probe .* models that compute more than that"):
        load(published)


def test_bfloat16_stays_close_and_the_head_float32(saved: Path) -> None:
    batch = rows([5, 80, 33])
    rounded = load_reward_model(saved, ref="rm", device="cpu", dtype="bfloat16", context_tokens=CONTEXT)
    found, exact = rounded.score(batch, budget=999), load(saved).score(batch, budget=999)
    assert rounded.head.dtype == torch.float32
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, rtol=0.1, atol=0.1)


def test_a_classifier_is_no_reward_model(tmp_path: Path) -> None:
    Qwen2ForSequenceClassification.from_pretrained(TINY, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(InputRefused, match="num_labels is 3, a reward model has 1; it is a classifier"):
        load(tmp_path)


def pairs(count: int = 12) -> list[PairIds]:
    generator = np.random.default_rng(1)
    lengths = generator.integers(3, 90, size=(count, 2)).tolist()
    return [PairIds(chosen=a, rejected=b) for i, (m, n) in enumerate(lengths) for a, b in [rows([m, n], seed=i)]]


def trainer(budget: int = 16384, *, head_only: bool = False) -> PreferenceTrainer:
    settings = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip=1.0)
    return PreferenceTrainer(fresh(), settings, head_only=head_only, budget=budget)


@pytest.mark.parametrize("head_only", [False, True])
def test_micro_batches_change_a_step_by_rounding_only(head_only: bool) -> None:
    one, many = trainer(head_only=head_only), trainer(200, head_only=head_only)
    for _ in range(3):
        assert one.step(pairs(), 1e-3) == pytest.approx(many.step(pairs(), 1e-3), rel=1e-4)
    torch.testing.assert_close(one.model.head, many.model.head, rtol=0, atol=1e-5)


def test_the_first_loss_and_gradient_are_those_of_the_whole_batch() -> None:
    model, batch = fresh(), pairs()
    scores = [(by_hand(model, pair.chosen), by_hand(model, pair.rejected)) for pair in batch]
    expected = np.mean([math.log1p(math.exp(worse - better)) for better, worse in scores])
    fitted = trainer(head_only=True)
    loss, norm = fitted.step(batch, 1e-3)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert norm > 0
    assert trainer().accuracy(batch) == np.mean([better > worse for better, worse in scores])


def test_training_the_head_leaves_the_language_model_as_it_is() -> None:
    fitted = trainer(head_only=True)
    before = {name: value.clone() for name, value in fitted.model.backbone.state_dict().items()}
    head = fitted.model.head.detach().clone()
    fitted.step(pairs(), 1e-2)
    assert all(torch.equal(before[name], value) for name, value in fitted.model.backbone.state_dict().items())
    assert not torch.equal(head, fitted.model.head)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    fitted = trainer()
    with torch.no_grad():
        fitted.model.head[0, 0] = torch.nan
    before = next(fitted.model.backbone.parameters()).detach().clone()
    _, norm = fitted.step(pairs(), 1e-2)
    assert not math.isfinite(norm)
    assert torch.equal(before, next(fitted.model.backbone.parameters()))
