"""The commands, run by the names that their errors have."""

from __future__ import annotations

from typer.testing import CliRunner

from cute_kernels.__main__ import app
from cute_kernels.schedulers.__main__ import app as schedule_app
from verify.__main__ import app as certify_app

#: Commands that are modules of their own: ``python -m verify``, ``cute_kernels.schedulers``.
MODULES = {"certify": certify_app, "schedule": schedule_app}


def run(name: str, *options: str):
    """Run a command."""
    if name in MODULES:
        return CliRunner().invoke(MODULES[name], options)
    return CliRunner().invoke(app, [name, *options])
