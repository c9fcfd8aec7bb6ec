"""Pictures of schedules on a machine: slots by time, coloured by head, waits hatched or grey.

``gantt`` shows whole launches, one panel each on one time axis; ``steps`` shows every visit of a
small one, with its row and the turns that it waits for.  Files are SVG, PNG or PDF, and the same
bytes on every call.  matplotlib is imported at the first picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

import numpy as np

from cute_kernels.errors import BackendUnavailable, ScheduleError, expected

from ..model.machines import Machine
from ..model.simulation import Simulation, simulate
from ..order.schedule import Schedule

SUFFIXES = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, safe for colour-blind readers, without black and the palest.
HEAD_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
WAIT, WAIT_LINE, INK, FAINT = "#cfcfcf", "#868686", "#222222", "#6b6b6b"
HATCH = {"facecolor": WAIT, "edgecolor": WAIT_LINE, "linewidth": 0, "hatch": "//////"}
# Panels of more slots or shapes are stored as pixels; more visits are not shown one by one.
_SLOTS, _SHAPES, MAX_STEPS = 40, 1500, 400
_DPI = 200
# Letters of a title's line in the narrowest panel.
_TITLE = 64
# Bands of a slot's compute and reductions, in slots; the reductions are paler.
_COMPUTE, _REDUCE, _PALE = (-0.42, 0.16), (0.20, 0.42), 0.55


def gantt(
    path: str | Path,
    panels: Mapping[str, Simulation],
    *,
    bound_ns: int | None = None,
    columns: int = 1,
) -> None:
    """Write whole launches, one panel per title, all on one time axis.

    bound_ns: a time to mark in every panel as the lower bound.  Raises ScheduleError for no panel
    or a path that cannot be, BackendUnavailable without matplotlib, OSError.
    """
    path = _checked(path, panels)
    heads = max(int(s.order[:, 0].max(initial=0)) + 1 for s in panels.values())
    colours = head_colours(heads)
    slots = max(simulation.machine.slots for simulation in panels.values())
    rows = -(-len(panels) // columns)
    height = min(2.6, 0.6 + 0.22 * slots) + 0.55
    size = (max(9.6, 5.6 * columns + 1.6), height * rows + 0.7)
    figure, axes = _figure(rows, columns, size)
    end = max(max(s.makespan_ns for s in panels.values()), bound_ns or 0, 1000)
    for axis, (title, simulation) in zip(axes, panels.items(), strict=False):
        _launch(axis, simulation, colours, end)
        _decorate(axis, title, facts(simulation, bound_ns), simulation.machine.slots, end)
        if bound_ns is not None:
            axis.axvline(bound_ns / 1e3, color=INK, lw=1, ls=(0, (4, 3)))
    _label_edges(axes, len(panels), columns, "slot")
    items = [*_head_key(colours), _patch(facecolor=WAIT, lw=0, label="waiting for a turn")]
    if bound_ns is not None:
        label = f"lower bound, {time_text(bound_ns)}"
        items.append(_line(lw=1, ls=(0, (4, 3)), label=label))
    _save(figure, items, path)


def steps(
    path: str | Path,
    panels: Mapping[str, Schedule],
    *,
    machine: Machine | str = "h200_d128",
    columns: int = 1,
) -> None:
    """Write small schedules visit by visit: computation above, additions to dQ below.

    Numbers are query blocks; an arrow leads from a reduction to one that waited for it.  Raises as
    ``gantt`` and ``simulate``, and ScheduleError for more than ``MAX_STEPS`` visits.
    """
    path = _checked(path, panels)
    times = {title: simulate(schedule, machine) for title, schedule in panels.items()}
    for title, simulation in times.items():
        if len(simulation.computed_ns) > MAX_STEPS:
            want = f"at most {MAX_STEPS} visits to draw one by one"
            raise ScheduleError(expected(title, want, len(simulation.computed_ns)))
    heads = max(schedule.heads for schedule in panels.values())
    colours = head_colours(heads)
    used = max(int(s.slot.max(initial=0)) + 1 for s in times.values())
    rows = -(-len(panels) // columns)
    size = (6.2 * columns + 1.0, (0.36 * used + 1.0) * rows + 0.5)
    figure, axes = _figure(rows, columns, size)
    end = max(1000, *(s.makespan_ns for s in times.values()))
    for axis, (title, simulation) in zip(axes, times.items(), strict=False):
        _visits(axis, panels[title], simulation, colours)
        _decorate(axis, title, facts(simulation), used, end)
        slots = simulation.slot.tolist()
        if len(set(slots)) == len(slots):
            # Each slot has one key block: its name.
            names = dict(sorted(zip(slots, simulation.order[:, 1].tolist(), strict=True)))
            axis.set_yticks(list(names), [f"slot {s}: kv block {n}" for s, n in names.items()])
    _label_edges(axes, len(panels), columns, "")
    items = [
        *(_head_key(colours) if heads > 1 else []),
        _patch(facecolor=colours[0], label="compute (of that query block)"),
        _patch(facecolor=colours[0], alpha=_PALE, label="add to dQ"),
        _patch(label="wait", **HATCH),
        _line(lw=0.9, marker=">", ms=4, label="handoff"),
    ]
    _save(figure, items, path)


def head_colours(heads: int) -> list[str]:
    """Return a colour for each head: distinct ones for few, a scale from dark to light for many."""
    if heads <= len(HEAD_COLOURS):
        return list(HEAD_COLOURS[:heads])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(c) for c in colormaps["viridis"](np.linspace(0.0, 0.93, heads))]


def facts(simulation: Simulation, bound_ns: int | None = None) -> str:
    """Return one line: predicted time, ratios to the unordered launch and a bound, wait share."""
    texts = [time_text(simulation.makespan_ns), f"{simulation.ratio:.2f} × unordered"]
    if bound_ns:
        texts.append(f"{simulation.makespan_ns / bound_ns:.2f} × bound")
    texts.append(f"{simulation.stall_share:.0%} waiting")
    return "  ·  ".join(texts)


def time_text(ns: int) -> str:
    """Format as microseconds, with a decimal below 100."""
    return f"{ns / 1e3:,.1f} µs" if ns < 100_000 else f"{ns / 1e3:,.0f} µs"


def check_path(path: str | Path) -> Path:
    """Return the path; raise if a picture cannot be written there, or matplotlib is missing."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ScheduleError(expected("path", f"a file ending in {', '.join(SUFFIXES)}", path))
    if not path.parent.is_dir():
        raise ScheduleError(expected("path", "a file in a folder that exists", path))
    if path.is_dir():
        raise ScheduleError(expected("path", "a file", f"{path}, a folder"))
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        need = "matplotlib, which is in the extra cute-kernels[schedule]"
        raise BackendUnavailable(expected("picture", need, str(error))) from None
    return path


def _checked(path: str | Path, panels: Mapping) -> Path:
    if not panels:
        raise ScheduleError(expected("panels", "at least one schedule", "none"))
    return check_path(path)


def _figure(rows: int, columns: int, size: tuple[float, float]):
    """Create ``(figure, axes)``, a grid of panels, without pyplot and its global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).reshape(-1)
    return figure, list(axes)


def _launch(axis, simulation: Simulation, colours: list[str], end_ns: int) -> None:
    """Draw the tickets and waits of one launch."""
    from matplotlib.collections import PolyCollection

    waits = np.array(simulation.waits(), np.int64).reshape(-1, 3)
    slots, tickets = simulation.machine.slots, len(simulation.slot)
    dense = slots > _SLOTS or tickets + len(waits) > _SHAPES
    thick = 1.0 if slots > _SLOTS else 0.84
    # A gap between tickets, so that those of one head are distinct.
    duration = simulation.end_ns - simulation.start_ns
    stop = simulation.end_ns - np.minimum(end_ns // 600, duration // 8)
    boxes = _boxes(simulation.slot, simulation.start_ns, stop, thick)
    colour = np.array(colours)[simulation.order[:, 0]].tolist()
    shapes = {"linewidths": 0, "rasterized": dense}
    axis.add_collection(PolyCollection(boxes, facecolors=colour, **shapes))
    look = {"facecolor": WAIT} if dense else HATCH
    axis.add_collection(PolyCollection(_boxes(*waits.T, thick), **(shapes | look)))


def _visits(axis, schedule: Schedule, simulation: Simulation, colours: list[str]) -> None:
    """Draw every visit of one launch, and its turns."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patheffects import withStroke

    visit = visit_table(schedule, simulation)
    slot, fill = visit["slot"], np.array(colours)[visit["head"]].tolist()
    for name, band, alpha in (("compute", _COMPUTE, 1.0), ("reduce", _REDUCE, _PALE)):
        boxes = _boxes(slot, *visit[name], 1.0, band)
        look = {"facecolor": fill, "edgecolor": "white", "linewidth": 0.6, "alpha": alpha}
        axis.add_collection(PolyCollection(boxes, **look))
    for name, band in (("buffer", _COMPUTE), ("turn", _REDUCE)):
        begin, end = visit[name]
        late = end > begin
        boxes = _boxes(slot[late], begin[late], end[late], 1.0, band)
        axis.add_collection(PolyCollection(boxes, **HATCH))
    middle = (visit["compute"][0] + visit["compute"][1]) / 2e3
    label = {"ha": "center", "va": "center", "color": "white", "size": 8, "zorder": 9}
    for x, y, row, around in zip(
        middle, slot + np.mean(_COMPUTE), visit["row"].tolist(), fill, strict=True
    ):
        halo = [withStroke(linewidth=3, foreground=around)]
        axis.text(x, y, str(row), path_effects=halo, **label)
    line = {"arrowstyle": "-|>", "lw": 0.7, "color": INK, "shrinkA": 0, "shrinkB": 0}
    down = np.mean(_REDUCE)
    for begin, end, from_slot, to_slot in visit["handoffs"]:
        tail, tip = (begin / 1e3, from_slot + down), (end / 1e3, to_slot + down)
        axis.annotate("", xy=tip, xytext=tail, arrowprops=line)


def visit_table(schedule: Schedule, simulation: Simulation) -> dict:
    """Table of the visits and their times.

    slot, head, row int64 [V]; compute, buffer (its wait), reduce, turn (its wait) as pairs
    ``(begin_ns, end_ns)`` of [V]; handoffs ``(begin, end, slot, slot)``, those waited for.
    """
    machine, visits = simulation.machine, simulation.visits
    ticket = np.repeat(np.arange(len(visits)), visits)
    entries = [entry for _, _, visits_of_ticket in schedule.tickets() for entry in visits_of_ticket]
    tiles = len(ticket) // max(1, len(entries))
    row = np.repeat(np.array([entry[0] for entry in entries], np.int64), tiles)
    rank = np.repeat(np.array([entry[2] for entry in entries], np.int64), tiles)
    row = row * tiles + np.tile(np.arange(tiles), len(entries))
    head = simulation.order[:, 0][ticket]
    first = np.r_[True, ticket[1:] != ticket[:-1]][: len(ticket)]
    computed, landed = simulation.computed_ns, simulation.landed_ns
    start = np.where(first, simulation.start_ns[ticket] + machine.tile_start_ns, 0)
    begin = np.where(first, start, np.roll(computed, 1))
    ready = begin + simulation.compute_ns
    free = np.where(first, 0, np.roll(landed, 1))
    reduce = landed - machine.reduce_ns
    slot = simulation.slot[ticket]
    writer = {key: v for v, key in enumerate(zip(head, row, rank, strict=True))}
    handoffs = []
    for visit in range(len(ticket)):
        before = writer.get((head[visit], row[visit], rank[visit] - 1))
        if before is None:
            continue
        turn = int(landed[before]) + machine.handoff_ns
        if turn == reduce[visit] and turn > max(computed[visit], free[visit]):
            handoffs.append((int(landed[before]), turn, int(slot[before]), int(slot[visit])))
    return {
        "slot": slot,
        "head": head,
        "row": row,
        "compute": (begin, ready),
        "buffer": (ready, computed),
        "turn": (np.maximum(computed, free), reduce),
        "reduce": (reduce, landed),
        "handoffs": handoffs,
    }


def _boxes(slot, begin_ns, end_ns, thick: float, band=(-0.5, 0.5)) -> np.ndarray:
    """Return corners [shapes, 4, 2] in microseconds and slots."""
    x0, x1 = np.asarray(begin_ns) / 1e3, np.asarray(end_ns) / 1e3
    y0, y1 = (np.asarray(slot) + thick * side for side in band)
    corners = [np.stack(xy, axis=-1) for xy in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))]
    return np.stack(corners, axis=-2)


def _decorate(axis, title: str, below: str, slots: int, end_ns: int) -> None:
    title = "\n".join(fill(line, _TITLE) for line in title.splitlines())
    axis.set_title(title, loc="left", size=10, weight="bold", color=INK, pad=19)
    corner = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 5)}
    axis.annotate(below, textcoords="offset points", size=9, color=FAINT, **corner)
    axis.set_xlim(0, end_ns / 1e3 * 1.01)
    axis.set_ylim(slots - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(colors=FAINT, labelcolor=INK, labelsize=8)
    if slots <= 12:
        axis.set_yticks(range(slots))


def _label_edges(axes, count: int, columns: int, name: str) -> None:
    for axis in axes[count:]:
        axis.set_visible(False)
    for index, axis in enumerate(axes[:count]):
        last = index + columns >= count
        axis.tick_params(labelbottom=last)
        axis.set_xlabel("time, µs" if last else "", size=9, color=INK)
        axis.set_ylabel(name if index % columns == 0 else "", size=9, color=INK)


def _patch(**look):
    from matplotlib.patches import Patch

    return Patch(**look)


def _line(**look):
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, **look)


def _head_key(colours: list[str]) -> list:
    last = len(colours) - 1
    fits_palette = len(colours) <= len(HEAD_COLOURS)
    heads = range(last + 1) if fits_palette else sorted({0, last // 3, 2 * last // 3, last})
    return [_patch(facecolor=colours[head], label=f"head {head}") for head in heads]


def _save(figure, items: list, path: Path) -> None:
    """Write a figure with a legend of ``items``, the same bytes on every call."""
    from matplotlib import rc_context

    columns = min(len(items), int(figure.get_figwidth() / 1.2))
    options = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1.4}
    look = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.8}
    figure.legend(handles=items, **options, **look)
    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    with rc_context({"svg.hashsalt": "cute_kernels"}):
        figure.savefig(path, dpi=_DPI, metadata=stamp[path.suffix.lower()])
