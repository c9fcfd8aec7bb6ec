"""Selection of the cases and rivals of one call, and the card's facts that the run needs."""

from __future__ import annotations

import torch

from ..core import timing
from . import targets
from .bench import Options
from .cases import Case

QUICK_RIVALS = ("ours", "ours_unordered", "fa4")
PATIENCE_S = 100.0


def chosen(
    masks: list[str],
    *,
    s: list[int],
    d: list[int],
    heads: list[int],
    group: list[int],
    quick: bool = False,
    held_out: bool = False,
) -> list[Case]:
    """The suite's cases that have these sizes; an empty list asks for all, lengths are free.

    Packs and wide heads are among them only where their mask, or their size, is asked for; the
    quick suite has none.  The held-out cases are a suite of their own.
    """
    out, more = [], []
    suite = targets.HELD_OUT if held_out else targets.cases(quick)
    if not quick and not held_out:
        more += targets.PACKS if targets.PACK in masks else ()
        more += [size for size in targets.WIDE if size[2] in d]
    for mask, suite_length, dim, queries, kv_heads in [*suite, *more]:
        fits = (not masks or mask in masks) and (not d or dim in d)
        fits &= (not heads or queries in heads) and (not group or queries // kv_heads in group)
        if fits:
            out += [Case(mask, length, dim, queries, kv_heads) for length in s or [suite_length]]
    return list(dict.fromkeys(out))


def options(rivals: list[str], passes: list[str], *, by_default: bool, check_only: bool) -> Options:
    """A run on the card; ``by_default``: rivals only where the suite has them."""

    def wanted(rival: str, case: Case) -> bool:
        size = (case.dim, case.heads, case.kv_heads)
        return not by_default or targets.rival_wanted(rival, case.mask, size)

    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return Options(
        rivals,
        passes,
        check_only=check_only,
        l2_bytes=l2_bytes,
        ceilings=None if check_only else timing.ceilings(),
        wanted=wanted,
        patience_s=PATIENCE_S,
    )
