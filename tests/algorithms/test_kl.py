"""The KL estimators: values, gradients, names and properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick
from torch import Tensor

from grpoctl.algorithms.kl import ALIASES, ESTIMATORS, canonical_estimator, token_kl

NAMES = [name + plus for name in (*ESTIMATORS, *ALIASES) for plus in ("", "+")]
logs = st.floats(-8, 8)


def gradient_of(kl: Tensor, logprobs: Tensor) -> float:
    return torch.autograd.grad(kl.sum(), logprobs)[0].item()


def one(logprob: float, ref: float, **options) -> tuple[float, float]:
    """Return value and gradient at one token."""
    logprobs = torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([[ref]], dtype=torch.float64), **options)
    return kl.item(), gradient_of(kl, logprobs)


@quick(100)
@given(logs, logs)
def test_each_estimator_is_its_formula(logprob: float, ref: float) -> None:
    difference = logprob - ref
    k3 = math.exp(-difference) + difference - 1
    expected = {
        "k1": (difference, 1.0),
        "k2": (difference**2 / 2, difference),
        "abs": (abs(difference), math.copysign(1.0, difference) if difference else 0.0),
        "k3": (k3, 1 - math.exp(-difference)),
    }
    for name, (value, gradient) in expected.items():
        assert one(logprob, ref, estimator=name, clamped=False) == pytest.approx(
            (value, gradient), rel=1e-12, abs=1e-14
        )
        assert one(logprob, ref, estimator=name + "+", clamped=False) == pytest.approx(
            (value, difference), rel=1e-12, abs=1e-14
        )
    assert one(logprob, ref, estimator="k3")[0] == pytest.approx(min(k3, 10.0), rel=1e-12, abs=1e-14)


@quick(200)
@given(st.floats(-50, 50), st.floats(-50, 50), st.booleans())
def test_k3_is_never_negative_and_zero_only_at_equality(logprob: float, ref: float, clamped: bool) -> None:
    value, _ = one(logprob, ref, estimator="k3", clamped=clamped)
    assert value >= 0
    assert value > 0 or abs(logprob - ref) < 1e-7


@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_is_zero_without_gradient_where_the_policies_agree(name: str) -> None:
    value, gradient = one(-1.3, -1.3, estimator=name)
    assert value == 0
    assert gradient == (1 if canonical_estimator(name) == "k1" else 0)


def test_clamping_bounds_k3_and_stops_its_gradient() -> None:
    assert one(-9.0, -5.0, estimator="k3") == (10.0, 0.0)
    assert one(-80.0, -1.0, estimator="k3") == (10.0, 0.0)
    assert one(-1.0, -80.0, estimator="k3") == (10.0, 0.0)
    value, gradient = one(-9.0, -5.0, estimator="k3", clamped=False)
    assert (value, gradient) == pytest.approx((math.exp(4) - 5, 1 - math.exp(4)))


@pytest.mark.parametrize("name", ["k1+", "k3+", "abs+", "k2+", "low_var_kl+"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    value, gradient = one(-2.0, -1.25, estimator=name)
    assert value == one(-2.0, -1.25, estimator=name[:-1])[0]
    assert gradient == pytest.approx(-0.75, rel=1e-15)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence_and_k1s_is_zero() -> None:
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.1, -0.4], dtype=torch.float64), dim=0)
    log_policy = torch.log_softmax(logits, dim=0)
    divergence = (log_policy.exp() * (log_policy - ref)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for name, expected in (("k2", exact), ("k3+", exact), ("k1", torch.zeros(3, dtype=torch.float64))):
        estimate = (log_policy.exp().detach() * token_kl(log_policy, ref, estimator=name)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_tokens_are_zero_and_without_gradient_whatever_they_hold(name: str, garbage: float) -> None:
    logprobs = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, garbage, -1.0]])
    kl = token_kl(logprobs, ref, estimator=name, mask=torch.tensor([[True, False, True]]))
    clean = token_kl(logprobs[:, ::2], ref[:, ::2], estimator=name)
    assert kl[0, 1] == 0 and torch.equal(kl[:, ::2], clean)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient[0, 1] == 0 and torch.isfinite(gradient).all()


def test_verls_names_mean_ours() -> None:
    assert [canonical_estimator(name) for name in ("kl", "mse", "low_var_kl", "abs")] == ["k1", "k2", "k3", "abs"]
    assert canonical_estimator("low_var_kl+") == "k3+"


@pytest.mark.parametrize("name", ["k4", "full", "", "+", "k3++", "K3"])
def test_an_unknown_estimator_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown KL estimator .*known: k1, k2, k3, abs, kl, mse, low_var_kl"):
        canonical_estimator(name)
