"""The ``info`` command: what runs here, and what differs from the tested configuration.

python -m cute_kernels info --all
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import about, settings
from .common import one_line, say

#: Packages that a machine without a GPU need not have.
_OF_GPUS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")


@one_line
def info(
    everything: Annotated[
        bool, typer.Option("--all", help="A table for each op and device, with contract ids.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all there is.")] = False,
) -> None:
    """Show what runs on this machine, and what differs from the tested configuration."""
    facts = about.info()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif everything:
        _print_tables(facts)
    else:
        for line in summary(facts):
            say(line)


def summary(facts: dict) -> list[str]:
    """Lines of the short form, from `about.info`."""
    versions = facts["versions"]
    lines = [
        f"cute_kernels {versions['cute-kernels']}, Python {versions['python']}, "
        f"CUDA {versions['cuda']}",
        *_differing_versions(versions, facts["devices"]),
        *_differing_settings(facts["settings"]),
        f"cache: {facts['cache_dir']}",
    ]
    if facts["extension"] is not None and list(facts["devices"]) != ["cpu"]:
        lines.append(f"launch plans: looked up in Python ({facts['extension']})")
    for name, device in facts["devices"].items():
        lines += _device(name, device, facts["ops"])
    return [*lines, "every op, reason and contract id: --all, or --json"]


def _differing_versions(versions: dict, devices: dict) -> list[str]:
    """One line for each version that is not a tested one, or one that none differs."""
    lines = []
    for name, tested in about.TESTED.items():
        version = versions[name]
        needless = name == "transformers" or (name in _OF_GPUS and list(devices) == ["cpu"])
        if version == "none" and needless:
            continue
        if not any(f"{version.partition('+')[0]}.".startswith(f"{prefix}.") for prefix in tested):
            lines.append(f"version: {name} {version}, tested with {', '.join(tested)}")
    tested_versions = ", ".join(f"{name} {versions[name]}" for name in about.TESTED)
    return lines or [f"versions: as tested ({tested_versions})"]


def _differing_settings(values: dict) -> list[str]:
    """One line for each setting that is not at its default, or one that none differs."""
    lines = [
        f"setting: {settings.PREFIX}{s.name}={values[s.name]}, default {s.default!r}"
        for s in settings.TABLE
        if values[s.name] != s.default
    ]
    return lines or ["settings: all at their defaults"]


def _device(name: str, device: dict, ops: dict) -> list[str]:
    """The device, how many ops each backend runs there, and the ops that none does."""
    backends: Counter[str] = Counter()
    without = []
    for op, support in ops.items():
        reasons = support[name]["backends"]
        backend = next((b for b, reason in reasons.items() if reason is None), None)
        if backend is None:
            refusals = "; ".join(f"{b}: {w}" for b, w in reasons.items())
            without.append(f"  no backend for {op}: {refusals}")
        else:
            backends[backend] += 1
    counts = ", ".join(f"{count} ops on {backend}" for backend, count in backends.items())
    return [f"{name}: {device['arch']}: {counts or 'no op has a backend'}", *without]


def _print_tables(facts: dict) -> None:
    console = Console()
    console.print(_pairs(f"cute_kernels {facts['versions']['cute-kernels']}", facts["versions"]))
    missing = facts["extension"]
    plans = "in C" if missing is None else f"in Python: {missing}"
    rows = facts["settings"] | {"cache folder": facts["cache_dir"], "launch plans": plans}
    console.print(_pairs(f"Settings ({settings.PREFIX}...)", rows))
    for name, device in facts["devices"].items():
        console.print(_pairs(f"Device {name}", device))
    for op, devices in facts["ops"].items():
        for device, support in devices.items():
            console.print(_backends(op, device, support))


def _pairs(title: str, rows: dict) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(str(name), str(value) if value != "" else "-")
    return table


def _backends(op: str, device: str, support: dict) -> Table:
    reasons = support["backends"]
    rows = {
        "runs on": next((name for name, reason in reasons.items() if reason is None), "nothing")
    }
    rows |= {f"not {name}": reason for name, reason in reasons.items() if reason}
    rows |= {"guarantees": ", ".join(support["guarantees"]), "contract id": support["contract_id"]}
    return _pairs(f"{op} on {device} (bf16)", rows)
