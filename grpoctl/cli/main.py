"""The command line. Imports typer and errors only, so `grpoctl --help` is instant; a command's module comes when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Final, NoReturn

import typer

from grpoctl import __version__
from grpoctl.errors import GrpoctlError
from grpoctl.processes import launcher
from grpoctl.processes.stop import STOP
from grpoctl.stages.registry import STAGES

OTHERS: Final[dict[str, str]] = {
    "run": "Pipeline file in, a whole run of these stages out; continues where the files end.",
    "plan": "Pipeline file in, a line for each stage out: done or to run.",
    "example-data": "Nothing in, a Parquet file of addition prompts out, to try the other commands on.",
    "status": "Run directory in, what it holds out.",
    "reward": "Try a reward function on rows of a file (grpoctl reward test).",
    "reward-model": "Train a reward model on pairs of answers (grpoctl reward-model train).",
}
"""Commands that aren't a stage's own."""
STOPPABLE: Final = ("run", "reward-model")
"""Those of them that end between shards and steps when they are asked to, as every stage does."""


def commands() -> dict[str, str]:
    """Return every command and its help; its options are rendered from the settings when it is the one being run."""
    return {name: listed.help for name, listed in STAGES.items() if " " not in name} | OTHERS


def build(selected: str | None) -> typer.Typer:
    """Return the application with the selected command in full and the others as names with help."""
    app = typer.Typer(
        name="grpoctl",
        help="GRPO training as stage-separated batch jobs over files.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name, text in commands().items():
        if name == selected:
            importlib.import_module("grpoctl.cli.run").add(app, name, text)
        else:
            app.command(name, help=text)(_stub(name))
    return app


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        print(f"grpoctl {__version__}")
        raise typer.Exit


def _stub(name: str) -> Callable[[], None]:
    def command() -> None:
        raise AssertionError(f"{name} was not selected")

    return command


def main() -> NoReturn:
    """Run the command that the arguments name."""
    launcher.open_standard_streams()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads on a busy machine cost ten times the work
    selected = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if selected in (*STAGES, *STOPPABLE):
        STOP.install()  # before anything heavy is imported: libraries swallow an exception that comes meanwhile
    try:
        build(selected)()
        code: object = 0
    except SystemExit as ending:
        code = ending.code
    except GrpoctlError as error:  # stopped while the command's own module was still being imported
        if not launcher.has_speaker():
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    if isinstance(code, int):
        launcher.end(code)
    sys.exit(code)  # pyright: ignore[reportArgumentType]  what SystemExit carried
