"""`python -m perf bench mhc`: check the bits, compare the rivals with ours, time them in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..core import passes
from .cases import Case
from .rivals import RIVALS

SUITE = passes.Suite("mhc", "mhc", RIVALS)


def mhc(todo: Iterable[Case], names: list[str], **options: object) -> Iterator[dict]:
    """Measures every case on the device; ``options``: of `passes.bench`."""
    # TransformerEngine's gradient of phi is a product of cuBLAS, in TF32 as in its own library.
    torch.backends.cuda.matmul.allow_tf32 = True
    yield from passes.bench(SUITE, todo, names, **options)
