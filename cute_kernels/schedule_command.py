"""The ``schedule`` command: what each order of work of a mask takes by the model, on any machine.

python -m cute_kernels schedule --mask sliding_window:1024 --seqlen 8192 --heads 16
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .errors import ArgumentValueError, CuteKernelsError, expected, one_of
from .schedulers import mask_rules, picture, report
from .schedulers.kinds import KINDS, WALKS
from .schedulers.machines import TABLE, machine
from .schedulers.mask import BlockMask
from .schedulers.selection import select

# More blocks in one mask, heads or slots are not tried.
MAX_BLOCKS, MAX_HEADS, MAX_SLOTS, MAX_SEED = 1 << 23, 1 << 16, 1 << 16, 2**63 - 1
_MASK = (
    "full, causal, sliding_window:LEFT[:RIGHT], dilated_window:LEFT:STEP, prefix_lm:PREFIX, "
    "document:COUNT[:SEED], random:SHARE[:SEED]; or several joined by &, which all hold."
)
_KIND = f"Only these kinds (repeat the option): {', '.join(KINDS)}, select."


def schedule(
    mask: Annotated[str, typer.Option(help=_MASK)] = "causal",
    seqlen: Annotated[str, typer.Option(metavar="N", help="Queries and keys.")] = "8192",
    heads: Annotated[str, typer.Option(metavar="N", help="(batch, head) pairs.")] = "16",
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help=_KIND)] = None,
    walk: Annotated[str, typer.Option(help="Visits of left_to_right, spt, lpt.")] = "ascending",
    flight: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Heads interleaved; by default 1, and the machine's most."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="A picture: .svg, .png or .pdf.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw every row, not just one.")
    ] = False,
    block: Annotated[
        str | None, typer.Option(metavar="QxKV", help="Block size; the machine's tile by default.")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N", help="CTAs resident at once, for another machine.")
    ] = None,
    machine_name: Annotated[
        str, typer.Option("--machine", metavar="NAME", help="The model's constants.")
    ] = "h200_d128",
) -> None:
    """Predict what each order of work takes on a mask, say which is safe and draw it.

    Needs no GPU.  Times are a model's.
    """
    try:
        _run(mask, seqlen, heads, kind, walk, flight, plot, compare, block, slots, machine_name)
    except CuteKernelsError as error:
        typer.echo(f"schedule: {error}", err=True)
        raise typer.Exit(2) from None


def _run(mask, seqlen, heads, kind, walk, flight, plot, compare, block, slots, name) -> None:
    kinds = tuple(dict.fromkeys(kind or report.CHOICES))
    _among("--machine", TABLE, name)
    _among("--walk", WALKS, walk)
    for each in kinds:
        _among("--kind", report.CHOICES, each)
    changes = {} if slots is None else {"slots": _whole("--slots", slots, 1, MAX_SLOTS)}
    chosen = machine(name, **changes)
    size = chosen.tile if block is None else _pair("--block", block)
    block_mask = parse_mask(mask, _whole("--seqlen", seqlen, 1), size)
    heads = _whole("--heads", heads, 1, MAX_HEADS)
    flights = {min(heads, _whole("--flight", each, 1)) for each in flight or ()}
    flights = tuple(sorted(flights)) or None
    if plot is not None:
        picture.check_path(plot)
    elif compare:
        raise ArgumentValueError(expected("--compare", "--plot FILE to draw into", "none"))
    rows = report.compare(
        block_mask, heads=heads, machine=chosen, kinds=kinds, flights=flights, walk=walk
    )
    typer.echo(f"{mask}: {seqlen} tokens, {heads} heads, {_blocks(block_mask)}")
    typer.echo(f"{chosen.name}: {chosen.slots} slots; times by the model, not measured")
    typer.echo(f"walk of left_to_right, spt and lpt: {walk}")
    _print_rows(rows)
    if any(row.kind == "select" for row in rows):
        _print_choice(select(block_mask, heads=heads, machine=chosen), rows)
    if plot is not None:
        _draw(plot, rows, compare)


def _blocks(block_mask: BlockMask) -> str:
    total = block_mask.kv_count.numel() * block_mask.num_kv_blocks
    q, kv = block_mask.block_size
    return f"{block_mask.num_blocks:,} of {total:,} blocks of {q}x{kv}"


def _print_rows(rows) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in report.HEADER:
        table.add_column(name, justify="right" if name in report.NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*report.cells(row))
    console = Console(highlight=False)
    console.width = max(110, console.width)
    console.print(table)


def _print_choice(selection, rows) -> None:
    for line in report.reasons(selection, rows):
        typer.echo(line)
    typer.echo(f"\nTried:\n{selection}")


def _draw(path: str, rows, every: bool) -> None:
    """Every row that has a time, or of those select's, or the fastest."""
    timed = [row for row in rows if row.simulation]
    if not timed:
        got = "; ".join(f"{row.title}: {row.why}" for row in rows)
        raise ArgumentValueError(expected("--plot", "a schedule that fits the machine", got))
    best = min(timed, key=lambda row: (row.kind != "select", row.simulation.makespan_ns))
    panels = {row.title: row.simulation for row in (timed if every else [best])}
    bound = rows[0].bound.lower_ns
    try:
        picture.gantt(path, panels, bound_ns=bound, columns=2 if len(panels) > 1 else 1)
    except OSError as error:
        raise ArgumentValueError(expected("--plot", "a file to write", error)) from None
    typer.echo(f"\n{path}: {len(panels)} drawn")


def parse_mask(text: str, seqlen: int, block_size: tuple[int, int]) -> BlockMask:
    """The mask of a text such as ``sliding_window:1024`` or ``document:8 & causal``."""
    grid = mask_rules.Grid(seqlen, seqlen, block_size)
    if grid.num_q_blocks * grid.num_kv_blocks > MAX_BLOCKS:
        want = f"a length of at most {MAX_BLOCKS:,} blocks of {block_size}"
        raise ArgumentValueError(expected("--seqlen", want, seqlen))
    found = None
    for part in text.split("&"):
        one = _parse_one(part.strip(), seqlen, block_size)
        found = one if found is None else found & one
    return found


def _parse_one(text: str, seqlen: int, block_size: tuple[int, int]) -> BlockMask:
    name, *values = text.split(":")
    _among("--mask", _MASKS, name)
    make, names, optional = _MASKS[name]
    least = len(names) - optional
    if not least <= len(values) <= len(names):
        words = [f":{word}" if i < least else f"[:{word}]" for i, word in enumerate(names)]
        want = name + "".join(words).upper()
        raise ArgumentValueError(expected("--mask", want, text))
    return make(seqlen, block_size, *values)


def _full(seqlen: int, size: tuple[int, int]) -> BlockMask:
    return BlockMask.full(seqlen, seqlen, block_size=size)


def _causal(seqlen: int, size: tuple[int, int]) -> BlockMask:
    return BlockMask.causal(seqlen, seqlen, block_size=size)


def _window(seqlen: int, size: tuple[int, int], left: str, right: str = "0") -> BlockMask:
    sides = {"left": _whole("--mask left", left), "right": _whole("--mask right", right)}
    return BlockMask.sliding_window(seqlen, seqlen, **sides, block_size=size)


def _dilated(seqlen: int, size: tuple[int, int], left: str, step: str) -> BlockMask:
    window = {"left": _whole("--mask left", left), "right": 0}
    step = _whole("--mask step", step, 1)
    return BlockMask.dilated_window(seqlen, seqlen, **window, dilation=step, block_size=size)


def _prefix_lm(seqlen: int, size: tuple[int, int], prefix: str) -> BlockMask:
    prefix = _whole("--mask prefix", prefix)
    return BlockMask.prefix_lm(seqlen, seqlen, prefix=prefix, block_size=size)


def _document(seqlen: int, size: tuple[int, int], count: str, seed: str = "0") -> BlockMask:
    """``count`` documents, cut at drawn places."""
    count = _whole("--mask count", count, 1, seqlen)
    generator = torch.Generator().manual_seed(_whole("--mask seed", seed, 0, MAX_SEED))
    cuts = torch.randperm(seqlen - 1, generator=generator)[: count - 1] + 1
    edges = torch.cat((torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])))
    return BlockMask.document(cu_seqlens=edges.int(), block_size=size)


def _random(seqlen: int, size: tuple[int, int], share: str, seed: str = "0") -> BlockMask:
    """Each block with probability ``share``."""
    try:
        chance = float(share)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise ArgumentValueError(expected("--mask share", "a number from 0 to 1", repr(share)))
    grid = mask_rules.Grid(seqlen, seqlen, size)
    generator = torch.Generator().manual_seed(_whole("--mask seed", seed, 0, MAX_SEED))
    shape = (1, 1, grid.num_q_blocks, grid.num_kv_blocks)
    kept = torch.rand(shape, generator=generator) < chance
    index = kept.int().argsort(dim=3, descending=True, stable=True).int()
    return BlockMask.from_blocks(kept.sum(3).int(), index, seqlen, seqlen, block_size=size)


#: Name -> (maker, parameters, how many of the last ones are optional).
_MASKS = {
    "full": (_full, (), 0),
    "causal": (_causal, (), 0),
    "sliding_window": (_window, ("left", "right"), 1),
    "dilated_window": (_dilated, ("left", "step"), 0),
    "prefix_lm": (_prefix_lm, ("prefix",), 0),
    "document": (_document, ("count", "seed"), 1),
    "random": (_random, ("share", "seed"), 1),
}


def _among(name: str, choices, text: str) -> None:
    if text not in choices:
        raise ArgumentValueError(one_of(name, choices, text))


def _whole(name: str, text: str, least: int = 0, most: int | None = None) -> int:
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
    return _whole(name, parts[0], 1), _whole(name, parts[1], 1)
