"""Find a reward function's source file and parameters without importing anything of the user's."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpoctl.rewards.resolve.signature import Parameter
from grpoctl.rewards.resolve.target import returns_function

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_file(name: str) -> Path | None:
    """Return the file of a dotted module, looking in the working directory too; parents are not imported."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        spec = _hooked_spec(top)
    full = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations)
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None
    return Path(spec.origin)


def _hooked_spec(top: str) -> importlib.machinery.ModuleSpec | None:
    """Ask the other finders (editable installs); a top-level name has no parent that this could import."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # __main__ and the like
        return None


def top_level_names(source: bytes) -> list[str]:
    """Return the public functions that a file defines at its top level.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    return [node.name for node in ast.parse(source).body if isinstance(node, _FUNCTIONS) and node.name[0] != "_"]


def static_parameters(source: bytes, name: str) -> tuple[Parameter, ...] | None:
    """Return a top-level function's parameters from its source; None where only an import can tell.

    That is so for names that are assigned, imported, decorated or bound twice, and for functions that return functions.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    module = ast.parse(source)
    bindings = [node for node in _module_scope(module) if name in _bound_names(node)]
    function = bindings[0] if len(bindings) == 1 else None
    if not isinstance(function, _FUNCTIONS) or function not in module.body:
        return None
    if function.decorator_list or (function.returns is not None and returns_function(ast.unparse(function.returns))):
        return None
    return _parameters(function.args)


def _module_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs at import: everything but the inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _module_scope(child)


def _bound_names(node: ast.AST) -> Sequence[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []


def _parameters(args: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    found = [
        _parameter(arg, "positional" if i < len(args.posonlyargs) else "any", required=i < first_default)
        for i, arg in enumerate(positional)
    ]
    if args.vararg is not None:
        found.append(_parameter(args.vararg, "args", required=False))
    found += [
        _parameter(arg, "keyword", required=default is None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        found.append(_parameter(args.kwarg, "kwargs", required=False))
    return tuple(found)


def _parameter(arg: ast.arg, kind: str, *, required: bool) -> Parameter:
    annotation = ast.unparse(arg.annotation) if arg.annotation is not None else ""
    return Parameter(name=arg.arg, kind=kind, required=required, annotation=annotation.strip("'\""))
