"""Model time of each order of work of a mask, on any machine.

python -m cute_kernels.schedulers --mask sliding_window:1024 --seqlen 8192 --heads 16
"""

from __future__ import annotations

import json
import operator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..cli.common import one_line, say, writing
from ..errors import ArgumentValueError, expected, one_of
from ..sparse_attn.config import MACHINES
from ..sparse_attn.masks import BLOCK
from .masks import rules
from .masks.mask import BlockMask
from .model.machines import TABLE, machine
from .model.selection import Selection, select
from .order.kinds import KINDS, WALKS
from .report import picture
from .report import rows as report

# More blocks in one mask, heads or slots are not tried.
MAX_BLOCKS, MAX_HEADS, MAX_SLOTS, MAX_SEED = 1 << 23, 1 << 16, 1 << 16, 2**63 - 1
# The schedules of block_sparse_attention, at a head size of 128.
MACHINE = MACHINES[128]
_MASK = (
    "full, causal, sliding_window:LEFT[:RIGHT], dilated_window:LEFT:STEP, prefix_lm:PREFIX, "
    "document:COUNT[:SEED], random:SHARE[:SEED]; or several joined by &, which all hold."
)
_KIND = f"Only these kinds (repeat the option): {', '.join(KINDS)}, select."
_WALK = f"Visits of {', '.join(report.WALKED)}: one of {', '.join(WALKS)}."
_MACHINE = f"The model's constants: {', '.join(TABLE)}."
_SELECTED = "what select takes, or the fastest of the kinds asked for"
# Headings of two lines, so that the table has 80 columns.
_SHORT = {"in flight": "in\nflight", "/ unordered": "/ un-\nordered", "/ bound": "/\nbound"}


@one_line(
    path="--plot",
    block_mask="--seqlen, --heads",
    block_size="--block",
    left="--mask left",
    right="--mask right",
    prefix="--mask prefix",
)
def schedule(
    mask: Annotated[str, typer.Option(help=_MASK)] = "causal",
    seqlen: Annotated[str, typer.Option(metavar="N", help="Queries and keys.")] = "8192",
    heads: Annotated[str, typer.Option(metavar="N", help="(batch, head) pairs.")] = "16",
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help=_KIND)] = None,
    walk: Annotated[str, typer.Option(help=_WALK)] = "ascending",
    flight: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Heads interleaved; by default 1, and the machine's most."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"A picture of {_SELECTED}: .svg, .png or .pdf."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw every row, not just one.")
    ] = False,
    save: Annotated[
        str | None, typer.Option(metavar="FILE.npz", help=f"For Schedule.load: {_SELECTED}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; times in ns.")] = False,
    block: Annotated[
        str, typer.Option(metavar="QxKV", help="Block size.")
    ] = f"{BLOCK[0]}x{BLOCK[1]}",
    slots: Annotated[
        str | None, typer.Option(metavar="N", help="CTAs resident at once, for another machine.")
    ] = None,
    machine_name: Annotated[
        str, typer.Option("--machine", metavar="NAME", help=_MACHINE)
    ] = MACHINE,
) -> None:
    """Predict what each order of work takes on a mask, say which is safe, draw it and keep it.

    Needs no GPU.  Times are a model's.
    """
    kinds = tuple(dict.fromkeys(kind or report.CHOICES))
    _among("--machine", TABLE, machine_name)
    _among("--walk", WALKS, walk)
    for each in kinds:
        _among("--kind", report.CHOICES, each)
    changes = {} if slots is None else {"slots": _parse_integer("--slots", slots, 1, MAX_SLOTS)}
    chosen = machine(machine_name, **changes)
    block_mask = parse_mask(mask, _parse_integer("--seqlen", seqlen, 1), _pair("--block", block))
    count = _parse_integer("--heads", heads, 1, MAX_HEADS)
    flights = {min(count, _parse_integer("--flight", each, 1)) for each in flight or ()}
    _paths(plot, compare, save)
    options = {"heads": count, "machine": chosen}
    rows = report.compare(
        block_mask, kinds=kinds, flights=tuple(sorted(flights)) or None, walk=walk, **options
    )
    selection = select(block_mask, **options) if "select" in kinds else None
    if as_json:
        head = {"mask": mask, "seqlen": int(seqlen), "heads": count, "walk": walk}
        typer.echo(json.dumps(head | _facts(block_mask, chosen, rows, selection), indent=1))
    else:
        say(f"{mask}: {seqlen} tokens, {count} heads, {_blocks(block_mask)}")
        say(f"{chosen.name}: {chosen.slots} slots; times by the model, not measured")
        say(f"walk of {', '.join(report.WALKED)}: {walk}")
        _print_rows(rows)
        if selection is not None:
            for line in report.reasons(selection, rows):
                say(line)
            say(f"\nTried:\n{selection}")
    _write(plot, compare, save, rows, quiet=as_json)


def _paths(plot: str | None, compare: bool, save: str | None) -> None:
    """Check that both files can be written, before anything is computed."""
    if plot is not None:
        picture.check_path(plot)
    elif compare:
        raise ArgumentValueError(expected("--compare", "--plot FILE to draw into", "none"))
    if save is not None and (Path(save).suffix != ".npz" or not Path(save).parent.is_dir()):
        want = "a file ending in .npz in a folder that exists"
        raise ArgumentValueError(expected("--save", want, save))


def _facts(block_mask: BlockMask, chosen, rows, selection: Selection | None) -> dict[str, object]:
    """Return the printed facts as plain values."""
    bound = rows[0].bound
    selected = selection and {
        "name": selection.schedule.name,
        "hash": selection.schedule.hash,
        "predicted_ns": selection.predicted_ns,
        "over_bound": selection.over_bound,
        "trials": [asdict(trial) for trial in selection.trials],
    }
    return {
        "block_size": block_mask.block_size,
        "blocks": block_mask.num_blocks,
        "machine": asdict(chosen),
        "bound_ns": bound.lower_ns,
        "bound": bound.binding(),
        "rows": [report.facts(row) for row in rows],
        "select": selected,
    }


def _blocks(block_mask: BlockMask) -> str:
    total = block_mask.kv_count.numel() * block_mask.num_kv_blocks
    q, kv = block_mask.block_size
    return f"{block_mask.num_blocks:,} of {total:,} blocks of {q}x{kv}"


def _print_rows(rows) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in report.HEADER:
        last = name == report.HEADER[-1]
        side = "right" if name in report.NUMBERS else "left"
        heading = _SHORT.get(name, name)
        table.add_column(heading, justify=side, no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*report.cells(row))
    Console(highlight=False).print(table)


def _write(plot: str | None, every: bool, save: str | None, rows, quiet: bool) -> None:
    """Write the picture and the schedule: ``_SELECTED``."""
    if plot is None and save is None:
        return
    timed = [row for row in rows if row.simulation]
    if not timed:
        failures = "; ".join(f"{row.title}: {row.why}" for row in rows)
        name = "--save" if plot is None else "--plot"
        raise ArgumentValueError(expected(name, "a schedule that fits the machine", failures))
    best = min(timed, key=lambda row: (row.kind != "select", row.simulation.makespan_ns))
    lines = []
    if plot is not None:
        panels = {row.title: row.simulation for row in (timed if every else [best])}
        look = {"bound_ns": rows[0].bound.lower_ns, "columns": 2 if len(panels) > 1 else 1}
        with writing(plot):
            picture.gantt(plot, panels, **look)
        lines.append(f"{plot}: {len(panels)} drawn")
    if save is not None:
        with writing(save):
            best.schedule.save(save)
        lines.append(f"{save}: {best.title}; hash {best.schedule.hash}")
    if not quiet:
        say("\n" + "\n".join(lines))


def parse_mask(text: str, seqlen: int, block_size: tuple[int, int]) -> BlockMask:
    """Parse a mask from a text such as ``sliding_window:1024`` or ``document:8 & causal``."""
    blocks = rules.Grid(seqlen, seqlen, block_size)
    if blocks.num_q_blocks * blocks.num_kv_blocks > MAX_BLOCKS:
        want = f"a length of at most {MAX_BLOCKS:,} blocks of {block_size}"
        raise ArgumentValueError(expected("--seqlen", want, seqlen))
    grid = {"q_len": seqlen, "kv_len": seqlen, "block_size": block_size, "device": "cpu"}
    return reduce(operator.and_, [_parse_part(part.strip(), grid) for part in text.split("&")])


def _parse_part(text: str, grid: dict) -> BlockMask:
    name, *values = text.split(":")
    _among("--mask", _MASKS, name)
    make, names, optional = _MASKS[name]
    least = len(names) - optional
    if not least <= len(values) <= len(names):
        words = [f":{word}" if i < least else f"[:{word}]" for i, word in enumerate(names)]
        want = name + "".join(words).upper()
        raise ArgumentValueError(expected("--mask", want, text))
    return make(**dict(zip(names, values, strict=False)), **grid)


def _window(left: str, right: str = "0", step: str = "1", **grid) -> BlockMask:
    left, right = _parse_integer("--mask left", left), _parse_integer("--mask right", right)
    step = _parse_integer("--mask step", step, 1)
    return BlockMask.dilated_window(left=left, right=right, dilation=step, **grid)


def _prefix_lm(prefix: str, **grid) -> BlockMask:
    return BlockMask.prefix_lm(prefix=_parse_integer("--mask prefix", prefix), **grid)


def _document(count: str, seed: str = "0", *, q_len: int, block_size, **_) -> BlockMask:
    """Mask of ``count`` documents, cut at drawn places."""
    count = _parse_integer("--mask count", count, 1, q_len)
    cuts = torch.randperm(q_len - 1, generator=_generator(seed), device="cpu")[: count - 1] + 1
    edges = torch.tensor([0, *sorted(cuts.tolist()), q_len], dtype=torch.int64, device="cpu")
    return BlockMask.document(cu_seqlens=edges, block_size=block_size)


def _random(share: str, seed: str = "0", *, q_len: int, block_size, **_) -> BlockMask:
    """Mask that has each block with probability ``share``."""
    try:
        chance = float(share)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise ArgumentValueError(expected("--mask share", "a number from 0 to 1", repr(share)))
    blocks = rules.Grid(q_len, q_len, block_size)
    shape = (1, 1, blocks.num_q_blocks, blocks.num_kv_blocks)
    drawn = torch.rand(shape, generator=_generator(seed), dtype=torch.float32, device="cpu")
    present = drawn < chance
    index = present.int().argsort(dim=3, descending=True, stable=True).int()
    return BlockMask.from_blocks(present.sum(3).int(), index, q_len, q_len, block_size=block_size)


def _generator(seed: str) -> torch.Generator:
    seed = _parse_integer("--mask seed", seed, 0, MAX_SEED)
    return torch.Generator(device="cpu").manual_seed(seed)


#: Name -> (maker, parameters, how many of the last ones are optional).
_MASKS = {
    "full": (BlockMask.full, (), 0),
    "causal": (BlockMask.causal, (), 0),
    "sliding_window": (_window, ("left", "right"), 1),
    "dilated_window": (_window, ("left", "step"), 0),
    "prefix_lm": (_prefix_lm, ("prefix",), 0),
    "document": (_document, ("count", "seed"), 1),
    "random": (_random, ("share", "seed"), 1),
}


def _among(name: str, choices, text: str) -> None:
    if text not in choices:
        raise ArgumentValueError(one_of(name, choices, text))


def _parse_integer(name: str, text: str, least: int = 0, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        span = f"of at least {least}" + (f" and at most {most}" if most is not None else "")
        raise ArgumentValueError(expected(name, f"a whole number {span}", repr(text[:40])))
    return value


def _pair(name: str, text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2:
        raise ArgumentValueError(expected(name, "QxKV, such as 64x128", repr(text)))
    return _parse_integer(name, parts[0], 1), _parse_integer(name, parts[1], 1)


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(schedule)

if __name__ == "__main__":
    app()
