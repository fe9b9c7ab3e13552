"""Sampling with vLLM in this process: token ids in, token ids out, one request a completion with a seed of its own.

The G requests of a prompt share its prefix through vLLM's prefix cache. They are not children of one `n = G` request: vLLM
gives child j the seed + j, so neighbouring seeds would share noise between prompts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from grpoctl.engines.base import Sample, SampleRequest, SamplingSettings, VllmSettings
from grpoctl.engines.tokenizer import Tokenizer
from grpoctl.errors import InputRefused, TryAgain
from grpoctl.extras import require
from grpoctl.processes.watchdog import watched

FINISH: Final = {"stop": "stop", "length": "length", "abort": "abort"}
ADAPTER_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of adapters."""
SEED_LIMIT: Final = 2**63
"""vLLM passes a seed to torch's generator, which takes 63 bits."""


class VllmSampler:
    """One vLLM engine with the weights of one policy folder."""

    reproducible = True

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: VllmSettings) -> None:
        self.tokenizer = tokenizer
        _environment(settings)
        require("vllm")
        self._vllm = _vllm()
        self.name = f"vllm {self._vllm.__version__}"
        self._patience = settings.timeout_seconds
        cpu = _on_cpu()
        options: dict[str, Any] = {
            "model": str(folder),
            "dtype": settings.dtype,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "max_model_len": settings.max_context_tokens,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": settings.enforce_eager,
            "disable_log_stats": True,
        }
        if cpu:
            options["enable_chunked_prefill"] = (
                False  # with per-request seeds it kills the CPU engine ("does not use offset")
            )
        else:
            options["gpu_memory_utilization"] = settings.memory_fraction
        if settings.adapter_rank:
            rank = next((size for size in ADAPTER_RANKS if size >= settings.adapter_rank), settings.adapter_rank)
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        self._adapters: Any = None
        self._num_adapters = 0
        self._num_steps = 0
        try:
            self._engine: Any = self._vllm.LLM(**options)
        except (ValueError, RuntimeError) as error:
            raise InputRefused(f"{folder}: vLLM can't load it ({str(error).splitlines()[0]})") from error
        self._count_steps()

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Sample]:
        """Draw one completion for each request in one engine call, long prompts first."""
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), i))
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=requests[i].prompt_ids.tolist()) for i in order]
        params = [
            self._vllm.SamplingParams(
                n=1,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k or -1,
                min_p=settings.min_p,
                seed=requests[i].seed % SEED_LIMIT,
                max_tokens=requests[i].max_new_tokens,
                logprobs=0,
                stop=list(settings.stop) or None,
                stop_token_ids=[*self.tokenizer.eos_ids, *settings.stop_token_ids],
                detokenize=bool(settings.stop),
                skip_special_tokens=False,
            )
            for i in order
        ]
        outputs = self._generate(prompts, params)
        drawn = {i: _sample(output.outputs[0]) for i, output in zip(order, outputs, strict=True)}
        return [drawn[i] for i in range(len(requests))]

    def _count_steps(self) -> None:
        """Count the engine's steps, by which the watchdog tells slow work from none."""
        inner: Any = self._engine.llm_engine
        step = inner.step

        def counted() -> Any:
            outputs = step()
            self._num_steps += 1
            return outputs

        inner.step = counted

    @contextmanager
    def _asked(self) -> Generator[None]:
        """Ask the engine something, watched: one that hangs ends the process, one that died is TryAgain."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportUnknownVariableType]  vLLM lives in an environment of its own

        died = cast("type[Exception]", EngineDeadError)

        try:
            with watched(self.name, lambda: self._num_steps, patience_seconds=self._patience):
                yield
        except died as error:
            raise TryAgain("the vLLM engine died; finished shards are kept: rerun (see its own log above)") from error

    def reload(self, folder: Path) -> None:
        """Load other weights of the same architecture; whether they took is for `prompt_logprobs` to tell."""
        with self._asked():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            if _on_cpu():
                self._engine.collective_rpc(_repack_head)
            self._engine.reset_prefix_cache()

    def use_adapters(self, folder: Path) -> None:
        """Put adapters beside the loaded weights, in the place of earlier ones."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportUnknownVariableType]  as above

        self._num_adapters += 1  # a number of its own each time: the prefix cache keeps them apart by it
        self._adapters = LoRARequest(f"adapters-{self._num_adapters}", self._num_adapters, str(folder))

    def _generate(self, prompts: Any, params: Any) -> Any:
        with self._asked():
            return self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._adapters)

    def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probabilities of given completions at temperature 1: what the loaded weights really say."""
        texts = [self._vllm.TokensPrompt(prompt_token_ids=[*p, *c]) for p, c in zip(prompts, completions, strict=True)]
        params = self._vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._generate(texts, params)
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[len(prompt) :], ids, strict=True)]
            for output, prompt, ids in zip(outputs, prompts, completions, strict=True)
        ]

    def close(self) -> None:
        """Free the engine's memory."""
        import gc

        del self._engine
        gc.collect()


def _vllm() -> Any:
    """Import vLLM; by name, since a type checker takes this folder for the package where that isn't installed."""
    return importlib.import_module("vllm")


def _repack_head(worker: Any) -> None:
    """Pack the output embedding anew: on a CPU vLLM keeps a packed copy that a reload of tied weights leaves old."""
    head = worker.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)


def _environment(settings: VllmSettings) -> None:
    """Set what vLLM reads from the environment at import; what the user has set stands."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.cpu_cache_gib))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # pyright: ignore[reportUnknownVariableType]  as above

    return bool(cast("Any", current_platform).is_cpu())


def _sample(output: Any) -> Sample:
    """Turn vLLM's output into ours; a token without its log-probability fails the row, never counts as certain."""
    ids = np.asarray(output.token_ids, dtype=np.int32)
    found = [entry.get(int(token)) for token, entry in zip(ids, output.logprobs or (), strict=False)]
    values = [np.nan if item is None else item.logprob for item in found]
    error = None
    if len(values) < len(ids) or any(item is None for item in found):
        missing = len(ids) - sum(item is not None for item in found)
        error = f"vLLM returned no log-probability for {missing} of {len(ids)} tokens"
    reason = FINISH.get(str(output.finish_reason), "error")
    if reason in ("abort", "error"):
        error = error or f"vLLM ended the request with {output.finish_reason!r}"
    return Sample(completion_ids=ids, logprobs=np.asarray(values, dtype=np.float32), finish_reason=reason, error=error)
