"""Where a reward function lives, and how the child that may be killed gets hold of it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from grpoctl.rewards.resolve.signature import Parameter

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "any",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


class TargetMissing(Exception):
    """The module has no such function; `names` are the callables that it has."""

    def __init__(self, names: list[str]) -> None:
        super().__init__("no such function")
        self.names = names


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function's place: `module` (imported by name) or `path` (a file), and the attribute in it."""

    module: str = ""
    path: str = ""
    attribute: str
    factory: bool = False
    """The attribute is called with the user's kwargs and returns the reward function."""


def load_target(target: Target, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the target and return the function that scores.

    Raises:
        TargetMissing: the module is there, the callable is not.
    """
    module = _file_module(target.path) if target.path else _named_module(target.module)
    found: Any = module
    for part in target.attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetMissing([name for name in dir(module) if callable(getattr(module, name)) and name[0] != "_"])
    return cast("Callable[..., Any]", found(**kwargs) if target.factory else found)


def _named_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _file_module(path: str) -> ModuleType:
    """Load a file under a name of its own; the modules beside it can be imported."""
    name = f"grpoctl_reward_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file named like an installed package must not hide it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def described_target(target: Target, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Import the target and return what `resolve_reward` needs to know: parameters, source file, whether it is a factory."""
    function = load_target(target, kwargs)
    factory = not target.factory and returns_function(_annotation(inspect.signature(function).return_annotation))
    if factory:
        function = function(**kwargs)
    code = cast("Any", inspect.unwrap(function) if inspect.isroutine(function) else type(function))
    try:
        source = inspect.getsourcefile(code)
    except TypeError:  # a callable from C
        source = None
    return {
        "parameters": [
            {
                "name": p.name,
                "kind": _KINDS[p.kind],
                "required": p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD),
                "annotation": _annotation(p.annotation),
            }
            for p in inspect.signature(function).parameters.values()
        ],
        "source": source,
        "factory": factory,
    }


def returns_function(annotation: str) -> bool:
    """Tell whether a return annotation says that the function makes reward functions (TRL's `get_…_reward`)."""
    return "Callable" in annotation


def parameters_from(described: list[dict[str, Any]]) -> tuple[Parameter, ...]:
    """Rebuild the parameters that `described_target` sent over a pipe."""
    return tuple(Parameter(**fields) for fields in described)


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return (
        annotation.__qualname__ if inspect.isclass(annotation) and not str(annotation).count("[") else str(annotation)
    )
