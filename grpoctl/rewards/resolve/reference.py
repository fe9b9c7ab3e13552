"""Resolve what a user wrote for a reward (`accuracy`, `pkg.mod:f`, `file.py:f`, an entry point, a URL) to a checked record.

User modules are read, not imported; where reading cannot tell (re-exports, decorators, factories), a child imports them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from grpoctl.errors import PluginFailed, UsageError
from grpoctl.extras import did_you_mean
from grpoctl.rewards.builtin import registry as builtin
from grpoctl.rewards.resolve.columns_check import RewardReference, check_callable, check_columns
from grpoctl.rewards.resolve.describe import described_in_child
from grpoctl.rewards.resolve.signature import SIGNATURES, Parameter, detected_signature, named
from grpoctl.rewards.resolve.source import module_file, static_parameters, top_level_names
from grpoctl.rewards.resolve.target import Target, parameters_from

__all__ = ["RewardReference", "check_columns", "resolve_reward"]

ENTRY_POINT_GROUP = "grpoctl.rewards"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def resolve_reward(
    ref: str,
    *,
    signature: str = "auto",
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    allow_null: bool = False,
    keep_environment: Sequence[str] = (),
) -> RewardReference:
    """Find a reward and how it is called, without importing user code into this process.

    Args:
        ref: a built-in's or entry point's name, `package.module:function`, `path/file.py:function`, or an http(s) URL.
        signature: auto (by parameter names, see `signature.py`) or one of its signatures.
        kwargs: options of a built-in, or arguments passed to the function by name on every call.
        name: the reward's column; the function's own name if not given.
        allow_null: do not refuse rows whose reference column is null; the function gets the None.
        keep_environment: names of environment variables that look like secrets but are passed on where it is imported.

    Raises:
        UsageError: there is no such file, module, function or option, or the signature cannot be told.
        PluginFailed: the file is no valid Python, or had to be imported and failed.
    """
    given = dict(kwargs or {})
    if signature not in ("auto", *SIGNATURES):
        raise UsageError(f"reward {ref}: signature is {signature!r}; expected auto or one of {', '.join(SIGNATURES)}")
    if ref.startswith(("http://", "https://")):
        found = _endpoint(ref, given)
    elif ref.removeprefix("builtin:") in builtin.BUILTINS:
        found = _builtin(ref, given)
    else:
        found = _function(ref, signature, given, keep_environment)
    if signature not in ("auto", found.signature):
        raise UsageError(f"reward {ref}: signature is {signature!r}, but a {found.kind} is called as {found.signature}")
    found = replace(found, name=name or found.name, allow_null=allow_null)
    if not _NAME.fullmatch(found.name):
        raise UsageError(
            f"reward {ref}: {found.name!r} cannot name a column; give it a `name:` of letters, digits and _"
        )
    return found


def _endpoint(ref: str, kwargs: dict[str, Any]) -> RewardReference:
    if kwargs:
        raise UsageError(f"reward {ref}: an endpoint takes no options; found {', '.join(kwargs)}")
    digest = hashlib.sha256(ref.encode()).hexdigest()
    target = Target(attribute="")
    return RewardReference(
        name="http", ref=ref, kind="http", signature="http", kwargs={}, source_digest=digest, target=target
    )


def _builtin(ref: str, kwargs: dict[str, Any]) -> RewardReference:
    name = ref.removeprefix("builtin:")
    return RewardReference(
        name=name,
        ref=ref,
        kind="builtin",
        signature="row",
        kwargs=builtin.builtin_options(name, kwargs),
        source_digest=builtin.BUILTINS[name].identity,
        target=Target(attribute=name),
        parameters=(Parameter(name="sample", kind="any", required=True, annotation="RewardSample"),),
    )


def _function(ref: str, signature: str, kwargs: dict[str, Any], keep_environment: Sequence[str]) -> RewardReference:
    kind, target, file = _place(ref)
    parameters, factory, files = _understood(ref, target, file, kwargs, keep_environment)
    bound = {} if factory else kwargs
    _check_kwargs(ref, parameters, bound)
    chosen = signature if signature != "auto" else detected_signature(parameters, bound=bound, ref=ref)
    check_callable(ref, chosen, parameters, bound)
    return RewardReference(
        name=ref if kind == "entry_point" else target.attribute.rpartition(".")[2],
        ref=ref,
        kind=kind,
        signature=chosen,
        kwargs=kwargs,
        source_digest=_digest(files) if files else hashlib.sha256(ref.encode()).hexdigest(),
        target=replace(target, factory=factory),
        parameters=parameters,
    )


def _place(ref: str) -> tuple[str, Target, Path]:
    """Return the kind of a reference, its target, and the file that the target names."""
    left, colon, attribute = ref.rpartition(":")
    if colon and attribute and left.endswith(".py"):
        path = Path(left).absolute()
        if not path.is_file():
            raise UsageError(
                f"reward {ref}: there is no file {left}{did_you_mean(path.name, _python_files(path.parent))}"
            )
        return "file", Target(path=str(path), attribute=attribute), path
    if ref.endswith(".py"):
        functions = top_level_names(Path(ref).read_bytes()) if Path(ref).is_file() else []
        said = f"; it has {', '.join(functions)}" if functions else ""
        raise UsageError(f"reward {ref}: say which function, as in {ref}:{(functions or ['reward'])[0]}{said}")
    if colon and attribute:
        return "module", Target(module=left, attribute=attribute), _module_file(ref, left)
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=ref))
    if not found:
        names = [*builtin.BUILTINS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
        raise UsageError(
            f"reward {ref!r}: no built-in and no entry point of that name{did_you_mean(ref, names)}; there are "
            f"{', '.join(names)}; a function of your own is path/file.py:function or package.module:function"
        )
    point = found[0]
    return "entry_point", Target(module=point.module, attribute=point.attr), _module_file(ref, point.module)


def _module_file(ref: str, module: str) -> Path:
    file = module_file(module)
    if file is None:
        raise UsageError(
            f"reward {ref}: there is no module {module} in the working directory or on sys.path; "
            "a file is written path/file.py:function"
        )
    return file


def _understood(
    ref: str, target: Target, file: Path, kwargs: Mapping[str, Any], keep_environment: Sequence[str]
) -> tuple[tuple[Parameter, ...], bool, list[Path]]:
    """Return the parameters, whether the target is a factory, and the files that define it."""
    if file.suffix == ".py":
        try:
            parameters = static_parameters(file.read_bytes(), target.attribute)
        except (SyntaxError, ValueError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            raise PluginFailed(f"reward {ref}: importing it failed: {file}:{line or 1}: {error}") from error
        if parameters is not None:
            return parameters, False, [file]
    told = described_in_child(ref, target, kwargs, keep_environment)
    if told["kind"] == "missing":
        names: list[str] = told["names"]
        raise UsageError(
            f"reward {ref}: {file} has no function {target.attribute!r}{did_you_mean(target.attribute, names)}; "
            f"it has {', '.join(names) or 'none'}"
        )
    files = [file] if told["source"] is None else list(dict.fromkeys([file, Path(told["source"])]))
    return parameters_from(told["parameters"]), told["factory"], files


def _check_kwargs(ref: str, parameters: Sequence[Parameter], kwargs: Mapping[str, Any]) -> None:
    names = [p.name for p in named(parameters)]
    if any(p.kind == "kwargs" for p in parameters):
        return
    for key in kwargs:
        if key not in names:
            raise UsageError(
                f"reward {ref}: it takes no argument {key!r}{did_you_mean(key, names)}; it takes {', '.join(names)}"
            )


def _digest(files: Sequence[Path]) -> str:
    """Return the sha256 of a file; of the digests, where several files define the function."""
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _python_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
