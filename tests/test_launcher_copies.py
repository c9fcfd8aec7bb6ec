"""What GPU launchers copy for their kernels, and where results go that a kernel cannot store to.

The launchers are the product's own.  Kernels are functions of torch here that compute exactly, and
assert what the real ones trust: alignment, strides, dtypes.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.gemm import tiles
from cute_kernels.logp import launch as logp_launch
from cute_kernels.logp.tensors import Head, Rows, Upstream
from cute_kernels.norm import launch as norm_launch
from cute_kernels.norm.config import LAYER, RMS
from cute_kernels.norm.tensors import Rule, Scale
from cute_kernels.runtime.operands import ALIGN
from tests.contract import same_bytes

BF16, FP32 = torch.bfloat16, torch.float32


def integers(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Numbers of -8 to 8: sums of their products are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


#: Layout -> a tensor of a shape and dtype in it, and all of the memory that it lies in.
def rows(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((m, n), 77, dtype=dtype)
    return memory, memory


def columns(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((n, m), 77, dtype=dtype)
    return memory.mT, memory


def shifted(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Not at a multiple of 16 bytes."""
    memory = torch.full((m * n + 9,), 77, dtype=dtype)
    return memory[1 : m * n + 1].view(m, n), memory


def spaced(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second element of a row, and every second row."""
    memory = torch.full((2 * m, 2 * n), 77, dtype=dtype)
    return memory[::2, ::2], memory


LAYOUTS = pytest.mark.parametrize("layout", [rows, columns, shifted, spaced])


def placed(values: torch.Tensor, layout) -> torch.Tensor:
    return layout(*values.shape, values.dtype)[0].copy_(values)


def untouched(t: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the elements of ``memory`` that are none of ``t`` are as they were."""
    copy = t.clone()
    t.fill_(77)
    around = bool((memory == 77).all())
    t.copy_(copy)
    return around


def addressable(t: torch.Tensor) -> bool:
    row, column = t.stride()
    return column == 1 and (row * t.itemsize | t.data_ptr()) % ALIGN == 0


# ---- products ------------------------------------------------------------------------------------


def product_kernel(dtype, a_major, b_major, epilogue, tile, order="chain"):
    def run(a, b, out, bias, clusters):
        for t, major in ((a, a_major), (b, b_major)):
            assert addressable(t if major == "k" else t.mT)
        assert addressable(out) and (bias is None or bias.stride() == (1,))
        made = a.float() @ b.float().mT
        made = made if bias is None else made + bias.float()
        out.copy_(out + made if epilogue == "accumulate" else made)

    return run


def skinny_kernel(dtype, w_major, bias, tile, order):
    def run(weight, x, out, bias, *rest):
        assert addressable(weight if w_major == "k" else weight.mT)
        assert addressable(x) and addressable(out) and (bias is None or bias.stride(1) == 1)
        made = x.float() @ weight.float().mT
        out.copy_(made if bias is None else made + bias.float())

    return run


@contextlib.contextmanager
def sm90_products(tile):
    kernels = {"gemm_kernel": product_kernel, "skinny_kernel": skinny_kernel}
    with (
        mock.patch.multiple(gemm_launch, **kernels, most_ctas=lambda device: 6),
        mock.patch.multiple(tiles, choose=lambda *_: tile, dense=lambda *_: tiles.Dense(256)),
    ):
        yield gemm_launch.gemm


@contextlib.contextmanager
def triton_products(tile):
    launch = pytest.importorskip("cute_kernels.gemm.triton.launch")

    def run(a, b, bias, accumulator, *rest, **options):
        out = a.float() @ b.float().mT
        out = out if bias is None else out + bias.float()
        return out.to(a.dtype) if accumulator is None else accumulator.add_(out)

    with (
        mock.patch.object(launch, "_launch", run),
        mock.patch.object(launch, "_launch_tree", lambda a, b, bias, *_: run(a, b, bias, None)),
        mock.patch.object(launch, "most_ctas", lambda device: 6),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield launch.gemm


DENSE, SKINNY = tiles.Dense(256), tiles.skinny(8, 24, 32, "chain", 6)
PRODUCTS = [
    pytest.param(sm90_products, DENSE, id="sm90-dense"),
    pytest.param(sm90_products, SKINNY, id="sm90-skinny"),
    pytest.param(triton_products, None, id="triton"),
]


@pytest.mark.parametrize(("backend", "tile"), PRODUCTS)
@pytest.mark.parametrize("order", ["chain", "tree"])
@pytest.mark.parametrize("n", [24, 7])
@LAYOUTS
def test_a_product_goes_where_it_is_told(backend, tile, order, n, layout):
    a, b, bias = integers(8, 32, seed=1), integers(n, 32, seed=2), integers(2 * n, seed=3)[::2]
    want = (a.float() @ b.float().mT + bias.float()).to(BF16)
    out, memory = layout(8, n, BF16)
    with backend(tile) as gemm:
        assert gemm(a, b, bias, None, order, out) is out
        assert same_bytes(out, want) and untouched(out, memory)
        placed_a, placed_b = placed(a, layout), placed(b, layout)
        for pair in ((placed_a, placed_b), (placed_a, b), (a, placed_b)):
            assert same_bytes(gemm(*pair, bias, None, order), want)


@pytest.mark.parametrize(("backend", "tile"), [PRODUCTS[0], PRODUCTS[2]])
@pytest.mark.parametrize("n", [24, 7])
@LAYOUTS
def test_an_accumulator_is_added_to_where_it_lies(backend, tile, n, layout):
    a, b, start = integers(8, 32, seed=1), integers(n, 32, seed=2), integers(8, n, seed=3)
    accumulator, memory = layout(8, n, FP32)
    for pair in ((a, b), (placed(a, layout), b), (a, placed(b, layout))):
        accumulator.copy_(start)
        with backend(tile) as gemm:
            assert gemm(*pair, None, accumulator) is accumulator
        assert same_bytes(accumulator, start.float() + a.float() @ b.float().mT)
    assert untouched(accumulator, memory)


# ---- norms ---------------------------------------------------------------------------------------


def sum_kernel(chosen):
    def run(*tensors):
        for parts, out in zip(tensors[::2], tensors[1::2], strict=True):
            if parts is not None:
                assert out.is_contiguous()
                out.copy_(out + parts.sum(0) if chosen.into == "add" else parts.sum(0))

    return run


@contextlib.contextmanager
def sm90_sums():
    with mock.patch.object(norm_launch, "_kernel", sum_kernel):
        yield norm_launch.add_parts


@contextlib.contextmanager
def triton_sums():
    launch = pytest.importorskip("cute_kernels.norm.triton.launch")

    class Kernel:
        def __getitem__(self, grid):
            def run(parts, out, *numbers, ACCUMULATE, **options):
                assert out.is_contiguous()
                out.copy_(out + parts.sum(0) if ACCUMULATE else parts.sum(0))

            return run

    with (
        mock.patch.object(launch.kernels, "add_parts_kernel", Kernel()),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield launch.add_parts


@pytest.mark.parametrize("backend", [sm90_sums, triton_sums])
@pytest.mark.parametrize("strided", [(True,), (False, True), (True, True), (True, None)])
def test_strided_main_grads_are_added_to(backend, strided):
    """One sum, two of one kind, and two of which one is a new tensor."""
    width = 40
    parts = [integers(3, width, seed=i, dtype=FP32) for i in range(len(strided))]
    begun = [integers(width, seed=9 + i, dtype=FP32) for i in range(len(strided))]
    memories = [torch.full((width, 2), 77.0) for _ in strided]
    into = [
        None if step is None else memory[:, 0].copy_(start) if step else start.clone()
        for step, memory, start in zip(strided, memories, begun, strict=True)
    ]
    with backend() as add_parts:
        out = add_parts(parts, into, [torch.empty(width, dtype=BF16)] * len(strided))
    for one, target, part, start in zip(out, into, parts, begun, strict=True):
        assert (one is None) == (target is not None)
        want = (part.sum(0) + start) if one is None else part.sum(0).to(BF16)
        assert same_bytes(target if one is None else one, want)
    assert all((memory[:, 1] == 77).all() for memory in memories)


@pytest.mark.parametrize("x_dtype", [BF16, FP32])
@pytest.mark.parametrize("weight", [None, BF16, FP32])
@pytest.mark.parametrize(
    ("kind", "bias"), [(RMS, None), (LAYER, None), (LAYER, BF16), (LAYER, FP32)]
)
def test_weights_are_never_rounded(kind, x_dtype, weight, bias):
    """Kernels take weight and bias of one dtype: that of x, or fp32 where one of them is."""
    generator = torch.Generator().manual_seed(4)
    inputs = [
        None if dtype is None else torch.randn(64, generator=generator).to(dtype)
        for dtype in (weight, bias)
    ]
    x = torch.randn(3, 64, generator=generator).to(x_dtype)
    taken = norm_launch._scale(Scale(*inputs), x, Rule(kind, 1e-5))
    assert {t.dtype for t in taken if t is not None} <= {x_dtype, FP32}
    assert len({t.dtype for t in taken if t is not None}) == 1
    for value, missing, t in zip(inputs, (1.0, 0.0), taken, strict=True):
        if t is not None:
            want = torch.full((64,), missing) if value is None else value
            assert torch.equal(t.double(), want.double())


# ---- linear_logp ---------------------------------------------------------------------------------


@LAYOUTS
def test_linear_logp_takes_rows_and_a_dense_bias(layout):
    hidden, weight = integers(8, 40, seed=1), integers(24, 40, seed=2)
    bias = integers(48, seed=3)[::2]
    recorded = []

    def kernel(chosen):
        def run(hidden, weight, bias, *others):
            assert addressable(hidden) and addressable(weight) and bias.stride() == (1,)
            recorded.append((hidden, weight, bias))

        return run

    head = Head(placed(weight, layout), bias, 0, 24, 0.0, "chain")
    per_token = Rows(torch.zeros(8, dtype=torch.int64), torch.ones(8))
    upstream = Upstream(torch.zeros(8), torch.zeros(8), None, None)
    names = dict.fromkeys(("_few", "_forward", "_gradient"), kernel)
    names |= dict.fromkeys(("most_ctas", "max_clusters"), lambda device: 3)
    with (
        mock.patch.multiple(logp_launch, **names),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
    ):
        logp_launch.states(placed(hidden, layout), head, per_token, False)
        logp_launch.states(placed(hidden, layout), head, per_token, True)
        logp_launch.gradients(placed(hidden, layout), head, per_token, upstream)
    assert len(recorded) == 3
    for found in recorded:
        assert all(map(same_bytes, found, (hidden, weight, bias)))
