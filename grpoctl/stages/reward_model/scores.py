"""Score completions with a reward model: its own tokenizer and template applied to the text, micro-batches by tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grpoctl.artifacts.artifact import Artifact
from grpoctl.engines.base import TokenIds
from grpoctl.engines.warm import Warm
from grpoctl.errors import InputRefused
from grpoctl.inputs.reward_models import TEXT_RULES, RewardModelFolder, open_reward_model
from grpoctl.processes.memory import memory_errors
from grpoctl.rewards.sample import RewardOutcome, RewardSample
from grpoctl.settings.jobs import ScoreJob

NAME: Final = "reward_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelScorer:
    """A reward model as one more reward of a score job; torch is imported when the first rows are scored.

    Args:
        rule: name of what the model reads, in TEXT_RULES
    """

    model: RewardModelFolder
    rule: str
    job: ScoreJob

    @property
    def weight(self) -> float:
        """Factor in the weighted sum."""
        return self.job.score.reward_model_weight

    @property
    def definition(self) -> dict[str, Any]:
        """What defines its scores."""
        return {
            "kind": self.model.kind,
            "weights_digest": self.model.weights_digest,
            "tokenizer_digest": self.model.tokenizer_digest,
            "reads": TEXT_RULES[self.rule],
            "value": "head on the last valid token",
        }

    def outcomes(self, samples: Sequence[RewardSample], warm: Warm) -> list[RewardOutcome]:
        """Return one outcome a sample; a value that isn't finite is an error, never a number.

        Raises:
            InputRefused: texts longer than the model's context, or without any token.
        """
        if not samples:
            return []
        started = time.monotonic()
        rows = self._rows(samples)
        model = warm.reward_model(self.model, dtype=self.job.score.reward_model_dtype, runtime=self.job.runtime)
        with memory_errors("scoring with the reward model", "lower runtime.micro_batch_tokens"):
            values = model.score(rows, budget=self.job.runtime.micro_batch_tokens)
        seconds = (time.monotonic() - started) / len(samples)
        return [_outcome(float(value), seconds) for value in values]

    def _rows(self, samples: Sequence[RewardSample]) -> list[TokenIds]:
        from grpoctl.engines.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.model.folder, self.model.ref)
        rows = [self._encoded(tokenizer, sample) for sample in samples]
        for wrong, what in (
            ([n for n, ids in enumerate(rows) if len(ids) > tokenizer.context_tokens], "are longer than"),
            ([n for n, ids in enumerate(rows) if not len(ids)], "have no token for"),
        ):
            if wrong:
                raise InputRefused(
                    f"{self.job.rollouts}: {len(wrong)} texts {what} the reward model's context of "
                    f"{tokenizer.context_tokens} tokens ({self.model.ref}): {[samples[n].sample_id for n in wrong[:5]]}; "
                    "shorten prompts or rollout.max_new_tokens, or use another reward model"
                )
        return rows

    def _encoded(self, tokenizer: Any, sample: RewardSample) -> TokenIds:
        if self.rule == "text":
            return tokenizer.encode_text(f"{sample.prompt}{sample.completion}")
        turns = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        return tokenizer.encode_conversation([*turns, {"role": "assistant", "content": sample.completion}])


def reward_model_scorer(job: ScoreJob, rollouts: Artifact) -> RewardModelScorer | None:
    """Return the scorer of the reward model that the job names, None where it names none.

    Raises:
        InputRefused: it isn't a reward model, or can't read these prompts.
    """
    if job.score.reward_model is None:
        return None
    assert rollouts.manifest.sampling is not None
    model = open_reward_model(job.score.reward_model)
    rule = model.text_rule(rollouts.manifest.sampling.prompt_format)
    return RewardModelScorer(model=model, rule=rule, job=job)


def _outcome(value: float, seconds: float) -> RewardOutcome:
    if math.isfinite(value):
        return RewardOutcome(reward=value, status="ok", error=None, seconds=seconds)
    return RewardOutcome(reward=None, status="error", error=f"the reward model returned {value}", seconds=seconds)
