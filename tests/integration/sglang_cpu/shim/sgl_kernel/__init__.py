"""Stand-in for SGLang's CPU kernels, which aren't on PyPI: what its CPU mode imports exists, calling it is an error."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: CPU kernels are not built")

    return missing
