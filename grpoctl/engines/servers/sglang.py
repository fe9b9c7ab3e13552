"""SGLang's native `/generate`: token ids in and out, log-probabilities after temperature.

Seeds have no effect on what it draws unless it runs in deterministic mode, so its samples count as not reproducible. Its
log-probabilities leave top_p, top_k and min_p out. An id outside the vocabulary kills its CPU backend: check before asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.servers.link import Link
from grpoctl.engines.servers.protocol import ServerFacts, checked_sample
from grpoctl.errors import GateFailed

RESERVED_TOKENS: Final = 6
"""A prompt may be this much shorter than the context at most; with 0.5.23 a longer one gets 400."""
COMPLETION_TOKENS: Final = 4
"""Tokens beyond the longest prompt that still fit; SGLang cuts longer completions and calls that `length`."""
FINISH: Final = {"stop": "stop", "length": "length", "abort": "abort"}
PLAIN: Final = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "n": 1,
}  # fmt: skip
"""No truncation, no penalties."""


class SglangServer:
    """One SGLang server."""

    seeded = False
    truncation = False

    def __init__(self, facts: ServerFacts, eos_ids: Sequence[int]) -> None:
        self.facts = facts
        self._eos_ids = tuple(eos_ids)

    @staticmethod
    async def detect(link: Link, eos_ids: Sequence[int]) -> SglangServer | None:
        """Return the server where it is SGLang."""
        said = await link.get("/model_info") or await link.get("/get_model_info")
        if not isinstance(said, dict) or "model_path" not in said:
            return None
        model = cast("dict[str, Any]", said)
        info: dict[str, Any] = await link.get("/server_info") or await link.get("/get_server_info") or {}
        models: dict[str, Any] = await link.get("/v1/models") or {}
        served: list[dict[str, Any]] = models.get("data") or [{}]
        listed: Any = served[0].get("max_model_len")
        longest = int(info.get("max_req_input_len") or (info.get("context_length") or listed or 0) - RESERVED_TOKENS)
        dtype = info.get("dtype")
        facts = ServerFacts(
            program="sglang",
            version=str(info.get("version", "of unknown version")),
            model=str(model["model_path"]),
            weight_version=model.get("weight_version"),
            dtype=dtype if dtype != "auto" else None,
            max_prompt_tokens=longest,
            max_total_tokens=longest + COMPLETION_TOKENS,
        )
        return SglangServer(facts, eos_ids)

    async def sample(self, link: Link, request: SampleRequest, settings: SamplingSettings) -> Sample:
        """Draw one completion; one that spans two versions of the weights fails."""
        answer = await self._generate(
            link,
            request.prompt_ids.tolist(),
            {
                "max_new_tokens": request.max_new_tokens,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k or -1,
                "min_p": settings.min_p,
                "stop": list(settings.stop),
                "stop_token_ids": [*self._eos_ids, *settings.stop_token_ids],
                "no_stop_trim": True,
            },
        )
        meta = answer["meta_info"]
        pairs: list[Any] = meta.get("output_token_logprobs") or []
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        sample = checked_sample(
            ids=answer["output_ids"],
            logprobs=[pair[0] for pair in pairs],
            logprob_ids=[pair[1] for pair in pairs],
            num_sampled=meta.get("completion_tokens"),
            reason=FINISH.get(str(reason.get("type")), "error"),
        )
        spans: list[dict[str, Any]] = meta.get("weight_versions") or []
        versions = {span["version"] for span in spans} or {meta.get("weight_version")}
        if sample.error is None and versions != {self.facts.weight_version}:
            shown = ", ".join(sorted(map(str, versions)))
            return replace(
                sample,
                finish_reason="abort",
                error=f"sampled under weights {shown}, not {self.facts.weight_version} alone",
            )
        return sample

    async def forced(self, link: Link, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of given ids, computed from the first id on."""
        answer = await self._generate(link, ids, {"max_new_tokens": 0, "temperature": 1.0}, logprob_start_len=0)
        return [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]

    async def top_2(self, link: Link, ids: Sequence[int], temperature: float) -> list[tuple[int, float]]:
        """Return the two likeliest next ids with what sampling reports."""
        answer = await self._generate(link, ids, {"max_new_tokens": 1, "temperature": temperature}, top_logprobs_num=2)
        return [(int(pair[1]), float(pair[0])) for pair in answer["meta_info"]["output_top_logprobs"][0]]

    async def _generate(self, link: Link, ids: Sequence[int], params: dict[str, Any], **options: Any) -> dict[str, Any]:
        body = {"input_ids": list(map(int, ids)), "sampling_params": PLAIN | params, "return_logprob": True, **options}
        return await link.post("/generate", body)

    async def load(self, link: Link, folder: Path, version: str) -> None:
        """Load the folder while generation is paused, flush the cache, and name the weights."""
        pauses: dict[str, Any] = await link.get("/openapi.json") or {}
        can_pause = "/pause_generation" in pauses.get("paths", {})
        if can_pause:
            await link.post("/pause_generation", {"mode": "retract"})
        try:
            answer = await link.post(
                "/update_weights_from_disk",
                {"model_path": str(folder), "weight_version": version, "flush_cache": True},
            )
        finally:
            if can_pause:
                await link.post("/continue_generation", {})
        if not answer.get("success"):
            raise GateFailed(f"{link.url}: SGLang didn't load {folder}: {answer.get('message')}")
