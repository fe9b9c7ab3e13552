"""Engines by name, and the settings that name one. The modules that hold them are imported when an engine is used.

A new engine is a line here, or an entry point of a package: group `grpoctl.training_engines` or `grpoctl.sampling_engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

TRAINING: Final = {
    "torch": "grpoctl.engines.torch.engine",
    "deepspeed": "grpoctl.engines.deepspeed.engine",
    "megatron": "grpoctl.engines.megatron.engine",
}
"""Training engines, each with the module whose ENGINE is its record."""
SAMPLING: Final = {
    "hf": "grpoctl.engines.hf.engine",
    "vllm": "grpoctl.engines.vllm.engine",
    "server": "grpoctl.engines.servers.engine",
}
"""Sampling engines, each with the module whose ENGINE is its record."""
FORWARDS_OF_ANOTHER: Final = frozenset({"deepspeed"})
"""Training engines around another one's forward (torch's), which `logprob` names then."""


@cache
def training_engines() -> dict[str, str]:
    """Return the module of every training engine by its name, those of installed packages too."""
    return TRAINING | {point.name: point.value for point in entry_points(group="grpoctl.training_engines")}


@cache
def sampling_engines() -> dict[str, str]:
    """Return the module of every sampling engine by its name, those of installed packages too."""
    return SAMPLING | {point.name: point.value for point in entry_points(group="grpoctl.sampling_engines")}


def forward_engines() -> list[str]:
    """Return the training engines with a forward of their own."""
    return [name for name in training_engines() if name not in FORWARDS_OF_ANOTHER]


class OneOf:
    """A text that must be one of some names, which are looked up when it is checked."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.names())}

    def _checked(self, name: Any) -> Any:
        known = list(self.names())
        if name not in known:
            *most, last = (f"'{one}'" for one in known)
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return name


TrainingEngineName = Annotated[str, OneOf(training_engines)]
SamplingEngineName = Annotated[str, OneOf(sampling_engines)]
ForwardEngineName = Annotated[str, OneOf(forward_engines)]
