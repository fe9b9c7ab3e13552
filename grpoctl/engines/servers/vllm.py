"""vLLM's OpenAI server: `/v1/completions` with token ids in and out.

Every sampling setting is sent, since the server's defaults come from the model's generation_config.json.
`VLLM_SERVER_DEV_MODE=1` adds the routes that load weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings
from grpoctl.engines.servers.link import Link
from grpoctl.engines.servers.protocol import ServerFacts, checked_sample
from grpoctl.errors import InputRefused

FINISH: Final = {"stop": "stop", "length": "length", "abort": "abort"}
TOKEN_PREFIX: Final = "token_id:"
PLAIN: Final = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "n": 1,
}  # fmt: skip
"""No truncation, no penalties."""


class VllmServer:
    """One vLLM server."""

    seeded = True
    truncation = True

    def __init__(self, facts: ServerFacts, eos_ids: Sequence[int]) -> None:
        self.facts = facts
        self._eos_ids = tuple(eos_ids)

    @staticmethod
    async def detect(link: Link, eos_ids: Sequence[int]) -> VllmServer | None:
        """Return the server where it is vLLM."""
        said = await link.get("/version")
        if not isinstance(said, dict) or "version" not in said:
            return None
        models = await link.get("/v1/models")
        listed = cast("dict[str, Any]", models)
        first: dict[str, Any] = listed["data"][0] if isinstance(models, dict) and listed.get("data") else {}
        if first.get("owned_by") != "vllm":
            return None
        weights: dict[str, Any] = await link.get("/weight_info") or {}
        info = cast("Any", await link.get("/server_info?config_format=json") or {})
        known = cast("dict[str, Any]", info)
        config: dict[str, Any] = known.get("vllm_config", {}).get("model_config", {}) if isinstance(info, dict) else {}
        limit = int(first["max_model_len"])
        facts = ServerFacts(
            program="vllm",
            version=str(cast("dict[str, Any]", said)["version"]),
            model=str(first["id"]),
            weight_version=weights.get("weight_version"),
            dtype=str(config["dtype"]).removeprefix("torch.") if "dtype" in config else None,
            max_prompt_tokens=limit - 1,
            max_total_tokens=limit,
        )
        return VllmServer(facts, eos_ids)

    async def sample(self, link: Link, request: SampleRequest, settings: SamplingSettings) -> Sample:
        """Draw one completion with the request's own seed."""
        choice, usage = await self._complete(
            link,
            request.prompt_ids.tolist(),
            max_tokens=request.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k or -1,
            min_p=settings.min_p,
            seed=request.seed,
            stop=list(settings.stop),
            stop_token_ids=[*self._eos_ids, *settings.stop_token_ids],
            logprobs=0,
        )
        found: dict[str, Any] = choice.get("logprobs") or {}
        names: list[str] = found.get("tokens") or []
        return checked_sample(
            ids=choice["token_ids"],
            logprobs=found.get("token_logprobs") or [],
            logprob_ids=[_token(name) for name in names],
            num_sampled=usage.get("completion_tokens"),
            reason=FINISH.get(str(choice.get("finish_reason")), "error"),
        )

    async def forced(self, link: Link, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of given ids; such requests don't read the prefix cache."""
        choice, _ = await self._complete(link, ids, max_tokens=1, temperature=1.0, prompt_logprobs=0, logprobs=0)
        entries = choice.get("prompt_logprobs")
        if entries is None:
            raise InputRefused(
                f"{link.url}: gives no prompt_logprobs, which prove its weights; allow --max-logprobs ≥ 2"
            )
        return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]

    async def top_2(self, link: Link, ids: Sequence[int], temperature: float) -> list[tuple[int, float]]:
        """Return the two likeliest next ids with what sampling reports."""
        choice, _ = await self._complete(link, ids, max_tokens=1, temperature=temperature, logprobs=2, seed=0)
        top = choice["logprobs"]["top_logprobs"][0]
        return sorted(((_token(name), float(value)) for name, value in top.items()), key=lambda pair: -pair[1])[:2]

    async def _complete(self, link: Link, ids: Sequence[int], **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        body = PLAIN | {"model": self.facts.model, "prompt": list(map(int, ids)), **settings}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": False}
        answer = await link.post("/v1/completions", body)
        choice = answer["choices"][0]
        if choice.get("token_ids") is None:
            raise InputRefused(f"{link.url}: vLLM {self.facts.version} gives no token ids; grpoctl needs vLLM ≥ 0.10.2")
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and list(echoed) != body["prompt"]:
            raise InputRefused(f"{link.url}: the server changed the prompt's ids; start it without prompt truncation")
        return choice, answer.get("usage") or {}

    async def load(self, link: Link, folder: Path, version: str) -> None:
        """Reload weights between a pause and a resume; needs the server's dev mode."""
        if self.facts.weight_version is None and await link.get("/is_paused") is None:
            raise InputRefused(
                f"{link.url}: vLLM has no routes to load weights; start it with VLLM_SERVER_DEV_MODE=1, or restart it on "
                f"{folder}"
            )
        await link.post("/pause", {}, query={"mode": "wait"})
        try:
            await link.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            await link.post("/reset_prefix_cache", {})
        finally:
            await link.post("/resume", {})
        if self.facts.weight_version is not None:  # older versions name no weights
            await link.post("/update_weight_version", {"new_version": version})


def _token(name: str) -> int:
    return int(name.removeprefix(TOKEN_PREFIX)) if name.startswith(TOKEN_PREFIX) else -1
