"""Training on one process with plain torch: the reference that every other engine is measured against."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpoctl.engines.base import OptimizerSettings, Unit
from grpoctl.engines.forward import unit_logprobs
from grpoctl.engines.hf_model import Policy
from grpoctl.errors import InputRefused

STATE_FILE = "optimizer.safetensors"


class TorchTrainer:
    """AdamW over float32 master weights; the forward runs in the policy's autocast type."""

    def __init__(self, policy: Policy, settings: OptimizerSettings) -> None:
        self.policy = policy
        self.settings = settings
        named = dict(policy.module.named_parameters())
        self._names = {parameter: name for name, parameter in named.items()}
        matrices = [p for p in named.values() if p.ndim > 1]
        vectors = [p for p in named.values() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )

    def logprobs(
        self, units: Sequence[Unit], *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (N,) log-probabilities of all completion tokens, flattened in order, with gradient; and entropies."""
        return unit_logprobs(self.policy, units, temperature=temperature, with_entropy=with_entropy)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar loss."""
        loss.backward()

    def step(self, lr: float) -> float | None:
        """Clip, step and clear; return the norm before clipping, or None (and no step) where it isn't finite."""
        parameters = [p for p in self._names if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            self.discard()
            return None
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.discard()
        return float(norm)

    def discard(self) -> None:
        """Drop the gradient collected so far."""
        self._optimizer.zero_grad(set_to_none=True)

    def save_state(self, folder: Path) -> None:
        """Write both moments of every parameter as safetensors and the step counts as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for parameter, state in self._optimizer.state.items():
            name = self._names[parameter]
            tensors[f"exp_avg.{name}"] = state["exp_avg"].contiguous()
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"].contiguous()
            steps[name] = int(state["step"])
        with _disk_errors():
            save_file(tensors, str(folder / STATE_FILE), metadata={"steps": json.dumps(steps, sort_keys=True)})
        (folder / STATE_FILE).chmod(0o644)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote.

        Raises:
            InputRefused: the state belongs to a model with other parameters.
        """
        from safetensors import safe_open

        path = folder / STATE_FILE
        tensors = load_file(str(path), device=str(self.policy.device))
        with safe_open(str(path), framework="pt") as file:
            steps: dict[str, int] = json.loads(file.metadata()["steps"])
        by_name = {name: parameter for parameter, name in self._names.items()}
        if not set(steps) <= set(by_name):
            foreign = sorted(set(steps) - set(by_name))[0]
            raise InputRefused(f"{path}: optimizer state for {foreign}, which this model lacks; name the right update")
        state: Any = self._optimizer.state
        for name, count in steps.items():
            state[by_name[name]] = {
                "step": torch.tensor(float(count)),
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }

    def export(self, folder: Path) -> None:
        """Write the float32 weights as safetensors, under the names of the policy that was loaded; tied stay tied."""
        folder.mkdir(parents=True, exist_ok=True)
        with _disk_errors():
            self.policy.module.save_pretrained(folder, safe_serialization=True)
        for path in folder.iterdir():
            if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
                path.chmod(0o644)
            else:
                path.unlink()  # config, tokenizer and template are carried from the parent unchanged


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise the OSError that safetensors wraps in an error of its own."""
    try:
        yield
    except SafetensorError as error:
        code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
        raise OSError(code, str(error)) from error
