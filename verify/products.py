"""Rule R7: ptxas has left the batches of WGMMA, and the waits for them, as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import ptx, sass
from .report import Finding


class Products(NamedTuple):
    """How many WGMMA a function has, in how many committed batches, and how many waits."""

    products: int
    batches: int
    waits: int


def serialised(module: Iterable[ptx.Function], code: Iterable[sass.Function]) -> Iterator[Finding]:
    """R7: the functions whose machine code has more batches or waits for its products than the PTX.

    Short of registers, or where an accumulator is touched too early, ptxas commits and awaits every
    product by itself (its warnings C7512 and C7514): the values are right and the overlap is gone.
    Code that ptxas repeats, as it does with loops, has its products, batches and waits alike: what
    is compared is their number for each product.
    """
    written = {function.name: _written(function) for function in module}
    for function in code:
        found = _found(function)
        meant = written.get(function.name, Products(0, 0, 0))
        if not found.products:
            continue
        if not meant.products:
            yield Finding("R7", function.name, f"{found.products} products, none in the PTX")
            continue
        for what in ("batches", "waits"):
            have, want = getattr(found, what), getattr(meant, what)
            if have * meant.products > want * found.products:
                why = (
                    f"{have} {what} of {found.products} products, {want} of {meant.products} in "
                    "the PTX: ptxas has serialised WGMMA"
                )
                yield Finding("R7", function.name, why)


def _written(function: ptx.Function) -> Products:
    """WGMMA batches of a function of PTX."""
    kinds = [i.opcode.split(".")[1] for i in function.instructions if i.base == "wgmma"]
    return Products(*(kinds.count(kind) for kind in ("mma_async", "commit_group", "wait_group")))


def _found(function: sass.Function) -> Products:
    """WGMMA batches of SASS: the product that ends a batch names its group's scoreboard."""
    products = [i for i in function.instructions if i.base.endswith("GMMA")]
    batches = sum(any(o.startswith("gsb") for o in i.operands) for i in products)
    waits = sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in function.instructions)
    return Products(len(products), batches, waits)
