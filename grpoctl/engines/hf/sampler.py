"""Sampling with transformers' generate: batched, KV cache, one random stream per completion.

The token is drawn inside a logits processor by inverting the cumulative distribution at a uniform number of the sample's
own stream; generate then takes the only token left. So a draw doesn't depend on the batch it happens to be in, and the
log-probability is kept at the moment of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
    __version__,
)

from grpoctl.engines.base import PolicyModel, Sample, SampleRequest, SamplingSettings
from grpoctl.engines.stop_strings import StopStrings
from grpoctl.engines.tokenizer import Tokenizer

_from_numpy: Callable[[npt.NDArray[Any]], Tensor] = cast("Any", torch).from_numpy  # torch leaves its argument untyped


class _Draw(LogitsProcessor):
    """Draws one token a row and leaves it as the only choice."""

    def __init__(self, uniforms: Tensor, settings: SamplingSettings, vocab_size: int, prompt_width: int) -> None:
        self.uniforms = uniforms
        self.temperature = settings.temperature
        self.vocab_size = vocab_size
        self.prompt_width = prompt_width
        self.logprobs: list[Tensor] = []
        self.warpers: list[Any] = []
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            self.warpers.append(MinPLogitsWarper(settings.min_p))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        logits: Any = scores[:, : self.vocab_size].float() / self.temperature
        for warper in self.warpers:
            logits = warper(input_ids, logits)
        logprobs = torch.log_softmax(logits, dim=-1)
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        step = input_ids.shape[1] - self.prompt_width
        target = self.uniforms[:, step, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=self.vocab_size - 1)
        self.logprobs.append(logprobs.gather(-1, chosen)[:, 0])
        result: Any = torch.full_like(scores, -torch.inf)
        return result.scatter_(-1, chosen, 0.0)


class _Stopped(StoppingCriteria):
    """Ends the rows whose last token completes a stop string."""

    def __init__(self, stops: StopStrings, prompt_width: int) -> None:
        self.stops = stops
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        rows = input_ids[:, self.prompt_width :].tolist()
        return torch.tensor([self.stops.ended_now(row) for row in rows], device=input_ids.device)


class HfSampler:
    """Samples with the very model that training uses, from the declared distribution and nothing else.

    `generate` fills what it isn't told from the model's own generation_config.json: penalties, bans, minimum lengths, beams,
    time limits. So that is emptied first.
    """

    reproducible = True

    def __init__(self, policy: PolicyModel, tokenizer: Tokenizer, *, batch_size: int) -> None:
        self.policy = policy
        self.policy.module.generation_config = GenerationConfig()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.name = f"transformers {__version__}"

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        """Draw one completion for each request, prompts of similar length together."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), i))
        results: dict[int, Sample] = {}
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            drawn = self._generate([requests[i] for i in part], settings)
            results.update(zip(part, drawn, strict=True))
        return [results[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        device = self.policy.device
        width = max(len(request.prompt_ids) for request in requests)
        limit = max(request.max_new_tokens for request in requests)
        input_ids = torch.full((len(requests), width), self.tokenizer.pad_id, dtype=torch.int64)
        attention = torch.zeros((len(requests), width), dtype=torch.int64)
        for row, request in enumerate(requests):
            input_ids[row, width - len(request.prompt_ids) :] = _from_numpy(request.prompt_ids.astype(np.int64))
            attention[row, width - len(request.prompt_ids) :] = 1
        uniforms = np.stack([np.random.default_rng(request.seed).random(limit) for request in requests])
        draw = _Draw(_from_numpy(uniforms).to(device), settings, self.tokenizer.vocab_size, width)
        stops = StopStrings(tokenizer=self.tokenizer, texts=settings.stop)
        ends = [*self.tokenizer.eos_ids, *settings.stop_token_ids]
        with torch.autocast(device.type, dtype=self.policy.autocast, enabled=self.policy.autocast is not None):
            output: Any = self.policy.module.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention.to(device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=limit,
                    eos_token_id=ends,
                    pad_token_id=self.tokenizer.pad_id,
                ),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([_Stopped(stops, width)] if stops.texts else []),
            )
        generated = output[:, width:].cpu().numpy().astype(np.int32)
        logprobs = torch.stack(draw.logprobs, dim=1).cpu().numpy().astype(np.float32)
        return [
            stops.cut(self._finish(generated[row], logprobs[row], request, frozenset(ends)))
            for row, request in enumerate(requests)
        ]

    def _finish(self, ids: Any, logprobs: Any, request: SampleRequest, ends: frozenset[int]) -> Sample:
        """Cut a row where it ended: its own end token or limit (the batch may have run on); stop strings come later."""
        stop_at = next((i for i, token in enumerate(ids) if int(token) in ends), len(ids) - 1) + 1
        stopped = stop_at <= len(ids) and int(ids[stop_at - 1]) in ends
        if stop_at > request.max_new_tokens:
            stop_at, stopped = request.max_new_tokens, False
        return Sample(
            completion_ids=ids[:stop_at].copy(),
            logprobs=logprobs[:stop_at].copy(),
            finish_reason="stop" if stopped else "length",
        )
