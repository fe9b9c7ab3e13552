"""The recorded KL estimates of verl, TRL's k3 inside its loss, and verl's KL as a reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_cases import MATCHED, Case, Outcome, first_gap, gap

from grpoctl.algorithms.advantages import token_advantages
from grpoctl.algorithms.kl import canonical_estimator, token_kl


def verl_kl(case: Case) -> Outcome:
    """Compare values and gradients; where verl has no such estimator ours refuses the name too."""
    name = case.params["kl_penalty"]
    if case.error is not None:
        assert case.error.startswith("NotImplementedError")
        with pytest.raises(ValueError, match="unknown KL estimator"):
            canonical_estimator(name)
        return MATCHED
    logprobs = case.tensor("logprob").requires_grad_()
    kl = token_kl(logprobs, case.tensor("ref_logprob"), estimator=name)
    (gradient,) = torch.autograd.grad((kl * case.tensor("upstream")).sum(), logprobs)
    message = first_gap(
        gap(kl, case.output("kl"), rtol=case.rtol), gap(gradient, case.output("grad_logprob"), rtol=case.rtol)
    )
    assert not message, message
    return MATCHED


def verl_kl_in_reward(case: Case) -> Outcome:
    """Compare the penalty at each token: our token advantages are its sums over the tokens still to come."""
    coef = case.params["kl_ratio"]
    old, ref = case.tensor("old_log_prob"), case.tensor("ref_log_prob")
    scores = case.tensor("token_level_scores").double().numpy()
    for row, expected in enumerate(case.output("rewards")):
        spread = token_advantages(0.0, old[row].double().numpy(), ref[row].double().numpy(), kl_coef=coef)
        penalty = spread - np.append(spread[1:], 0.0)
        scale = np.abs(spread) + np.abs(scores[row])
        message = gap(scores[row] + penalty, expected, rtol=case.rtol, scale=scale)
        assert not message, message
    return MATCHED


HANDLERS = {("verl", "kl_penalty"): verl_kl, ("verl", "compute_rewards"): verl_kl_in_reward}
