"""The command line: audit, demo, info, aot, contract.

python -m cute_kernels info
"""

from __future__ import annotations

import importlib
from typing import Annotated

import typer
from typer.core import TyperGroup

from . import __version__

#: Command -> the module of the function of its name, and a line of help.
COMMANDS = {
    "info": ("cli.info", "What runs here, and what is not as tested."),
    "demo": ("demo.run", "Train a small model; compare rollout and training bits."),
    "aot": ("cli.aot", "Compile the catalogue for another machine to load."),
    "audit": ("cli.audit", "Name the modules whose bits follow the batch."),
    "contract": ("cli.contract", "What bits depend on here: print, write, compare."),
}


class Commands(TyperGroup):
    """Group of commands that are imported when they are run: ``--version`` imports no torch."""

    def list_commands(self, ctx: object) -> list[str]:
        """Names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str):
        """Return a command, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, line = COMMANDS[cmd_name]
        function = getattr(importlib.import_module(f".{module}", __package__), cmd_name)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, short_help=line)(function)
        return typer.main.get_command(single)


# Without rich's markup a flag has no `<bool>` in the help, and an error of usage no frame.
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cute-kernels {__version__}")
        raise typer.Exit


Version = typer.Option(
    "--version", is_eager=True, callback=_print_version, help="Print the version."
)


@app.callback()
def _root(version: Annotated[bool, Version] = False) -> None:
    """GPU kernels whose bits you can rely on."""


def main() -> None:
    """The entry point of the `cute-kernels` script."""
    app()


if __name__ == "__main__":
    main()
