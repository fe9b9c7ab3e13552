"""Chunked token log-probabilities against a full float64 log-softmax."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpoctl.algorithms.token_logprobs import token_logprobs


def make(num: int, width: int, vocabulary: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, head, torch.randint(0, vocabulary, (num,), generator=generator)


def full(hidden: Tensor, head: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies from the whole (N, V) log-softmax in float64."""
    log_softmax = torch.log_softmax(hidden.double() @ head.double().T / temperature, dim=-1)
    return log_softmax.gather(-1, ids[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("padding", [0, 37])
def test_logprobs_entropy_and_gradients_equal_a_full_float64_log_softmax(
    dtype: torch.dtype, temperature: float, padding: int
) -> None:
    hidden, head, ids = make(50, 24, 300, 7, dtype)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    padded = torch.cat([head, torch.full((padding, 24), 9.0, dtype=dtype)])
    upstream = torch.linspace(-1, 1, 50)
    ours, entropy = token_logprobs(
        hidden, padded, ids, temperature=temperature, vocab_size=300, with_entropy=True, chunk_tokens=16
    )
    expected, expected_entropy = full(hidden, head, ids, temperature)
    assert ours.dtype == torch.float32 and entropy is not None and not entropy.requires_grad
    assert (ours - expected).abs().max() <= 1e-5
    assert (entropy - expected_entropy).abs().max() <= 1e-5
    gradients = torch.autograd.grad((ours * upstream).sum(), (hidden, head))
    references = torch.autograd.grad((expected * upstream).sum(), (hidden, head))
    half = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - reference.double()).abs().max() <= half * reference.abs().max().double()


@quick(60)
@given(st.integers(1, 40), st.integers(2, 30), st.floats(0.3, 3.0), st.integers(0, 5), st.integers(0, 2**31))
def test_float64_is_exact_for_any_shape_temperature_and_padding(
    num: int, vocabulary: int, temperature: float, padding: int, seed: int
) -> None:
    hidden, head, ids = make(num, 5, vocabulary, seed, torch.float64)
    padded = torch.cat([head, torch.full((padding, 5), math.nan, dtype=torch.float64)])
    ours, entropy = token_logprobs(
        hidden, padded, ids, temperature=temperature, vocab_size=vocabulary, with_entropy=True, chunk_tokens=7
    )
    expected, expected_entropy = full(hidden, head, ids, temperature)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-11)


@quick(30)
@given(st.integers(1, 33), st.integers(1, 40), st.integers(0, 2**31))
def test_the_chunk_size_changes_nothing(num: int, chunk: int, seed: int) -> None:
    hidden, head, ids = make(num, 4, 11, seed, torch.float64)
    results = []
    for chunk_tokens in (chunk, 1024):
        leaves = (hidden.clone().requires_grad_(), head.clone().requires_grad_())
        ours, _ = token_logprobs(*leaves, ids, temperature=0.7, chunk_tokens=chunk_tokens)
        results.append((ours, *torch.autograd.grad(ours.square().sum(), leaves)))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_backward_is_the_derivative_of_the_forward(temperature: float) -> None:
    hidden, head, ids = make(5, 3, 6, 1, torch.float64)

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        return token_logprobs(hidden, head, ids, temperature=temperature, vocab_size=5, chunk_tokens=2)[0]

    ids = ids.clamp(max=4)
    assert torch.autograd.gradcheck(logprobs, (hidden.requires_grad_(), head.requires_grad_()))


def test_rows_past_the_vocabulary_get_no_gradient() -> None:
    hidden, head, ids = make(9, 4, 8, 3, torch.float32)
    head = head.requires_grad_()
    ours, _ = token_logprobs(hidden, head, ids.clamp(max=5), vocab_size=6)
    (gradient,) = torch.autograd.grad(ours.sum(), head)
    assert gradient[:6].any() and not gradient[6:].any()


def test_one_leaf_alone_gets_its_gradient() -> None:
    hidden, head, ids = make(6, 4, 7, 4, torch.float64)
    both = (hidden.clone().requires_grad_(), head.clone().requires_grad_())
    expected = torch.autograd.grad(token_logprobs(*both, ids)[0].sum(), both)
    for position in (0, 1):
        leaves = [hidden, head]
        leaves[position] = leaves[position].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(token_logprobs(leaves[0], leaves[1], ids)[0].sum(), leaves[position])
        assert torch.equal(gradient, expected[position])


class LargestByLastDimension(TorchDispatchMode):
    """Record the most rows that any result with the given last dimension had."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return result


def test_no_more_logits_than_a_chunk_exist_at_any_time() -> None:
    hidden, head, ids = make(200, 6, 91, 5, torch.float32)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    with LargestByLastDimension(91) as largest:
        ours, _ = token_logprobs(hidden, head, ids, with_entropy=True, chunk_tokens=16)
        ours.sum().backward()
    assert largest.rows == 16


def test_autocast_does_not_round_the_logits() -> None:
    hidden, head, ids = make(20, 16, 40, 6, torch.float32)
    leaves = (hidden.requires_grad_(), head.requires_grad_())
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ours, _ = token_logprobs(*leaves, ids)
            results.append((ours, *torch.autograd.grad(ours.sum(), leaves)))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    hidden, head, ids = make(3, 4, 5, 8, torch.float64)
    ours, _ = token_logprobs(hidden.requires_grad_(), head, ids)
    upstream = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((ours * upstream).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_probabilities_of_the_whole_vocabulary_sum_to_one() -> None:
    hidden, head, _ = make(1, 4, 13, 9, torch.float64)
    ours, _ = token_logprobs(hidden.expand(13, 4), head, torch.arange(13), temperature=0.8)
    assert ours.exp().sum().item() == pytest.approx(1.0, rel=1e-13)
    assert (ours <= 0).all()


def test_large_logits_neither_overflow_nor_lose_the_gradient() -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    ours, entropy = token_logprobs(hidden, torch.eye(2), torch.tensor([1]), with_entropy=True)
    assert ours.item() == -2e4 and entropy is not None and entropy.item() == 0
    assert torch.autograd.grad(ours.sum(), hidden)[0].tolist() == [[-1.0, 1.0]]


def test_no_position_gives_an_empty_result_with_zero_gradient() -> None:
    hidden, head, ids = make(0, 4, 5, 0, torch.float32)
    head = head.requires_grad_()
    ours, entropy = token_logprobs(hidden.requires_grad_(), head, ids, with_entropy=True)
    assert ours.shape == (0,) and entropy is not None and entropy.shape == (0,)
    assert not torch.autograd.grad(ours.sum(), head)[0].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    hidden, head, ids = make(2, 4, 5, 0, torch.float32)
    with pytest.raises(ValueError, match="temperature must be > 0, got"):
        token_logprobs(hidden, head, ids, temperature=temperature)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    hidden, head, _ = make(2, 4, 8, 0, torch.float32)
    with pytest.raises(ValueError, match="token ids must be within 0 … 4, found"):
        token_logprobs(hidden, head, torch.tensor([1, wrong]), vocab_size=5)
