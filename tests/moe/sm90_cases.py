"""The SM90 kernels of grouped products in the simulator: operands, bytes, configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch

import ptxsim
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.gemm import op as gemm_op
from cute_kernels.gemm import tiles as gemm_tiles
from cute_kernels.moe import config, cpu, launch, tiles
from cute_kernels.schedulers.tiles import leaves
from tests import contract
from tests.kernels.operands import far_apart as in_sparse_memory
from tests.oracles import gemm as reference
from tests.oracles import moe as oracle

from ..gemm import simulated as gemm_simulated
from . import cases
from .simulated import simulated

BF16 = cases.BF16
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
NARROW, *_, WIDE = tiles.FEW


@dataclass(frozen=True)
class Product:
    """A grouped product on SM90.

    call: Operands -> result.
    want: Operands -> the bytes of the result.
    entry: The kernel, of `simulated.CONFIGS`.
    options: Those of `simulated`.
    """

    call: Callable[..., torch.Tensor]
    want: Callable[..., torch.Tensor]
    entry: str
    options: dict = field(default_factory=dict)

    def operands(self, load: str, n: int, k: int, dtype=BF16, major="k", more=True) -> tuple:
        """(x, weight, offsets, bias), or of dW (dy, x, offsets, start).

        major: Of the experts' weights.  more: Whether there is a bias, or a start.
        """
        x, weight, offsets, bias, dy = cases.operands(load, dtype, n, k)
        if self.entry == "grouped_dw":
            return dy, x, offsets, cases.drawn(*weight.shape, seed=9) if more else None
        weight = weight if major == "k" else weight.mT.contiguous().mT
        return x, weight, offsets, bias if more else None

    def run(self, operands: tuple, **options) -> torch.Tensor:
        """The result, in the simulator."""
        with simulated(**self.options | options):
            return self.call(*operands)


def chain(x, weight, offsets, bias=None) -> torch.Tensor:
    """Rows by ``chain``, expert by expert."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype)
    for expert, rows in oracle.experts(offsets):
        bias_e = None if bias is None else bias[expert]
        out[rows] = reference.chain(x[rows], weight[expert], bias_e).to(x.dtype)
    return out


def leaf_chains(x, weight, offsets, bias=None) -> torch.Tensor:
    """Leaves of the rows, each a chain."""
    k = x.shape[1]
    length, count = leaves.length(k), leaves.count(k)
    out = torch.empty(count, len(x), weight.shape[1])
    for leaf, (expert, rows) in ((i, e) for e in oracle.experts(offsets) for i in range(count)):
        span = slice(leaf * length, (leaf + 1) * length)
        out[leaf, rows] = reference.chain(x[rows, span], weight[expert][:, span])
    return out


def tree(x, weight, offsets, bias=None) -> torch.Tensor:
    """Rows by ``tree``."""
    parts, out = leaf_chains(x, weight, offsets), chain(x, weight, offsets)
    for expert, rows in oracle.experts(offsets):
        bias_e = None if bias is None else bias[expert]
        out[rows] = gemm_op.add_leaves(parts[:, rows].contiguous(), bias_e, x.dtype)
    return out


def dw_chain(dy, x, offsets, start) -> torch.Tensor:
    """Gradients by ``chain``, expert by expert."""
    out = [
        reference.chain(dy[rows].mT, x[rows].mT, None, None if start is None else start[expert])
        for expert, rows in oracle.experts(offsets)
    ]
    return torch.stack(out).to(dy.dtype if start is None else torch.float32)


def _dw(dy, x, offsets, start) -> torch.Tensor:
    state = None if start is None else start.clone()
    got = launch.grouped_dw(dy, x, offsets, state)
    assert state is None or got is state
    return got


def _leaf_sums(x, weight, offsets, bias) -> torch.Tensor:
    return launch.grouped_leaf_sums(x, weight, offsets, leaves.length(x.shape[1]))


def _rows(entry: str, **options) -> Product:
    return Product(lambda *operands: launch.grouped_gemm(*operands), chain, entry, options)


PRODUCTS = {
    "many": _rows("grouped"),
    "few": _rows("grouped_few", few=NARROW),
    "few, wide": _rows("grouped_few", few=WIDE),
    "dw": Product(_dw, dw_chain, "grouped_dw"),
    "tree": Product(lambda *operands: launch.grouped_tree(*operands), tree, "grouped_tree"),
    "leaves": Product(_leaf_sums, leaf_chains, "grouped_tree"),
}


def configurations() -> Iterator[tuple[str, object, dict, dict, bool]]:
    """(name of a product, configuration, options of `simulated`, of `operands`, by day)."""
    # The narrowest first: the kernel that most other tests run.
    for c in sorted(launch.configs(), key=lambda c: c.tile_n):
        # bf16, and of wide tiles one layout and epilogue each.
        often = c.tile_n == 64 or (c.b_major, c.bias) == ("k", c.tile_n < 256)
        yield "many", c, {"width": c.tile_n}, {"major": c.b_major, "more": c.bias}, often
    for c in launch.few_configs():
        tile = tiles.Few(c.tile_m, c.tile_n, c.tile_k)
        often = c.bias == (c.w_major == "k")
        yield "few", c, {"few": tile}, {"major": c.w_major, "more": c.bias}, often
    for c in launch.dw_configs():
        yield "dw", c, {"width": c.tile_n}, {"more": c.accumulate}, True
    for c in launch.tree_configs():
        # The narrowest and the widest tile of each epilogue.
        widths = tiles.tree_widths(c.epilogue)
        often = c.tile_n == min(widths) and (c.b_major, c.epilogue) != ("mn", "bias")
        often |= c.tile_n == max(widths) and c.b_major == "k"
        of = {"major": c.b_major, "more": c.epilogue == "bias"}
        name = "leaves" if c.epilogue == "leaves" else "tree"
        yield name, c, {"width": c.tile_n}, of, often


def engine(**options) -> SimpleNamespace:
    """The launcher's functions in the simulator; sums of rows are the CPU's."""

    def inside(function):
        def run(*operands):
            with simulated(**options):
                return function(*operands)

        return run

    names = "grouped_gemm", "grouped_dw", "grouped_tree", "grouped_leaf_sums"
    products = {name: inside(getattr(launch, name)) for name in names}
    return SimpleNamespace(**products, grouped_column_sum=cpu.grouped_column_sum)


def gemm(**options) -> SimpleNamespace:
    """gemm's products on SM90, in the simulator; sums of rows are the CPU's."""
    from cute_kernels.gemm import cpu as gemm_cpu

    def product(a, b, bias, accumulator, order="chain"):
        tile = gemm_simulated.WIDE if order == "chain" else gemm_tiles.Dense(64)
        with gemm_simulated.simulated(tile=tile, **options):
            return gemm_launch.gemm(a, b, bias, accumulator, order)

    def leaf_sums(a, b, length):
        with gemm_simulated.simulated(**options):
            return gemm_launch.leaf_sums(a, b, length)

    return SimpleNamespace(gemm=product, leaf_sums=leaf_sums, column_sum=gemm_cpu.column_sum)


def by_content(weight: torch.Tensor, **options) -> contract.RowOp:
    """Each row by the expert that its first two numbers choose."""

    def run(rows):
        chosen = 2 * (rows[:, 0] > 0).int() + (rows[:, 1] > 0).int()
        offsets, order, positions = oracle.permutation(chosen[:, None], len(weight))
        with simulated(**options):
            out = launch.grouped_gemm(rows[order.long()], weight, offsets, None)
        return out[positions[:, 0].long()]

    return contract.RowOp("grouped_gemm", run, weight.shape[2], BF16)


@contextlib.contextmanager
def poisoned(fill: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """While it lasts, results begin as ``fill``; yields the list of their memory."""
    out = []

    def allocator(shape, dtype, device):
        def new():
            out.append(torch.empty(shape, dtype=dtype).copy_(fill))
            return out[-1]

        return new

    with mock.patch.object(launch, "allocator", allocator):
        yield out


def far_apart(name: str, kernel: Callable | None = None) -> bool:
    """Whether a product is right where offsets of weights, biases, results pass 2^31 elements."""
    product = PRODUCTS[name]

    def spread(t: torch.Tensor) -> torch.Tensor:
        return in_sparse_memory(t, (2**30 + 8192, *t.stride()[1:]))

    x, weight, bias = (
        cases.drawn(*shape, seed=i, dtype=BF16)
        for i, shape in enumerate(((3, 64), (3, 72, 64), (3, 72)))
    )
    operands = x, spread(weight), cases.offsets_of([1] * 3), spread(bias)
    want = product.want(x, weight, operands[2], bias)
    out = spread(torch.zeros_like(want))
    kernels = {} if kernel is None else {product.entry: kernel}
    try:
        with mock.patch.object(launch, "allocator", lambda *_: lambda: out):
            got = product.run(operands, kernels=kernels)
    except ptxsim.PtxsimError:
        return False
    return contract.same_bytes(got, want)
