"""Tests of moe on a GPU: bytes of gemm's kernels, routing, the battery, graphs, no host sync."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch
from tests import contract, on_gpu
from tests.contract import same_bytes
from tests.old_memory import old_memory
from tests.oracles import moe as oracle

from . import battery, cases, layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
BF16, FP16, FP32 = cases.BF16, cases.FP16, cases.FP32


def triton() -> tuple[SimpleNamespace, SimpleNamespace]:
    """(moe's products in Triton, gemm's)."""
    from cute_kernels.gemm.triton import launch as gemm
    from cute_kernels.moe.triton import launch

    return on_gpu.launcher(launch), on_gpu.launcher(gemm)


def sm90() -> tuple[SimpleNamespace, SimpleNamespace]:
    """(moe's products on SM90, gemm's); dbias is Triton's."""
    if arch.describe(torch.device(DEVICE)).arch != "sm_90a":
        pytest.skip("needs an SM90 GPU")
    from cute_kernels.gemm import launch as gemm
    from cute_kernels.moe import launch

    ours = on_gpu.launcher(launch)
    sums = triton()[0].grouped_column_sum
    return SimpleNamespace(**vars(ours) | {"grouped_column_sum": sums}), on_gpu.launcher(gemm)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("load", cases.LOADS)
def test_triton_rows_of_linear(load, dtype):
    engine, gemm = triton()
    cases.rows_of_linear(engine, load, dtype, gemm=gemm)
    cases.rows_of_linear(engine, load, dtype, 776, 520, gemm=gemm)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("load", cases.LOADS)
def test_sm90_rows_of_linear(load, dtype):
    engine, gemm = sm90()
    for n, k in ((40, 56), (776, 520), (41, 57)):
        cases.rows_of_linear(engine, load, dtype, n, k, gemm=gemm)


def planned(operands: tuple, few) -> Callable:
    """The launch of a grouped product on SM90 by one tile for few rows; None: by that for many."""
    sm90()  # skips elsewhere
    from cute_kernels.moe import launch, tiles

    with mock.patch.object(tiles, "few", lambda *sizes: few):
        return launch.plan_grouped_gemm(*operands).run


def few_tiles() -> tuple:
    """Every tile of the kernel for few rows an expert."""
    from cute_kernels.moe import tiles

    return tiles.FEW


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("tile", few_tiles(), ids=str)
def test_sm90_few_rows_of_linear(tile, dtype):
    """Each tile for few rows gives the bytes of gemm, weights of both majors, with a bias."""
    _, gemm = sm90()
    for load, (n, k) in itertools.product(cases.LOADS, ((40, 56), (776, 520), (41, 57))):
        x, weight, offsets, bias, _ = (t.to(DEVICE) for t in cases.operands(load, dtype, n, k))
        for w in (weight, weight.mT.contiguous().mT):
            operands = x, w, offsets, bias
            got = planned(operands, tile)(*operands).cpu()
            for expert, rows in oracle.experts(offsets.cpu()):
                if rows.start < rows.stop:
                    want = gemm.gemm(x[rows].cpu(), weight[expert].cpu(), bias[expert].cpu(), None)
                    assert same_bytes(got[rows], want), (load, n, k, expert)


@pytest.mark.parametrize("tokens", [1, 16, 128])
@pytest.mark.parametrize(
    "sizes", [(128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880), (256, 8, 7168, 2048)],
    ids=str,
)  # fmt: skip
def test_sm90_decodes_as_it_trains(sizes, tokens):
    """At the sizes of models the launcher's choice has the bytes of tiles of 128 rows."""
    experts, chosen, k, n = sizes
    g = torch.Generator(DEVICE).manual_seed(tokens)

    def drawn(*shape):
        return torch.randn(shape, generator=g, device=DEVICE, dtype=BF16)

    share = 1 / torch.arange(1, experts + 1, device=DEVICE)
    indices = torch.multinomial(share.expand(tokens, experts), chosen, generator=g)
    ends = indices.flatten().bincount(minlength=experts).cumsum(0).int()
    offsets = torch.cat([ends.new_zeros(1), ends])
    operands = drawn(tokens * chosen, k), drawn(experts, n, k), offsets, None
    want = planned(operands, None)(*operands)
    for _ in range(5):
        got = ck.grouped_linear(*operands)
        assert same_bytes(got, want)


@pytest.mark.parametrize("backend", [triton, sm90], ids=lambda backend: backend.__name__)
@pytest.mark.parametrize("check", cases.PRODUCTS)
def test_products(check, backend):
    check(backend()[0], BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("load", cases.LOADS)
@pytest.mark.parametrize("backend", [triton, sm90], ids=lambda backend: backend.__name__)
def test_rows_of_tree(backend, load, dtype):
    """Rows of y and dx, and leaves, have the bytes of gemm's tree on the same backend."""
    ours, gemm = backend()
    for n, k in ((40, 56), (776, 520), (41, 57), (264, 2888)):
        cases.rows_of_tree(ours, load, dtype, n, k, gemm=gemm)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_tree_is_that_of_linear(dtype):
    """The public function, forward and backward, at sizes of a model; any rows of the batch."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    experts, n, k = 16, 1536, 2048
    counts = [300, 0, 1, 129, *range(5, 65, 5)]
    offsets = cases.offsets_of(counts).to(DEVICE)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    x, weight, dy = drawn(sum(counts), k), drawn(experts, n, k), drawn(sum(counts), n)
    rows = x.clone().requires_grad_()
    y = ck.grouped_linear(rows, weight, offsets, order="tree")
    y.backward(dy)
    for expert, span in oracle.experts(offsets.cpu()):
        one = x[span].clone().requires_grad_()
        want = ck.linear(one, weight[expert], order="tree")
        want.backward(dy[span])
        assert same_bytes(y.detach()[span], want.detach()), expert
        assert same_bytes(rows.grad[span], one.grad), expert
    cases.permuted(
        lambda *t: ck.grouped_linear(*(u.to(DEVICE) for u in t), order="tree").cpu(), dtype
    )


def test_routing():
    from cute_kernels.moe.triton import routing

    engine = on_gpu.launcher(routing)
    for check in cases.SINGLE:
        check(engine)
    for seed, check in itertools.product(range(100), cases.DRAWN):
        check(engine, seed)
    indices = torch.randint(0, 128, (16384, 8), generator=cases.generator(1))
    offsets, order, positions = engine.sort(indices, 128)
    assert torch.equal(order.long(), indices.flatten().sort(stable=True).indices)
    assert torch.equal(positions.flatten()[order.long()], torch.arange(131072, dtype=torch.int32))
    assert torch.equal(offsets.diff().long(), indices.flatten().bincount(minlength=128))


def on_device(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: t.to(DEVICE) for name, t in layer.parameters(dtype).items()}


def test_battery():
    p = on_device(BF16)
    op = contract.RowOp("experts", lambda x: layer.experts(x, p), layer.WIDTH, BF16, DEVICE)
    assert contract.check_rows(op, 600, seed=3) > 50


@pytest.mark.parametrize("first", range(0, battery.DRAWS, 250))
def test_drawn_layers(first):
    for seed in range(first, first + 250):
        battery.check(battery.draw(seed, DEVICE))


def test_no_host_sync():
    """Forward and backward of a layer never wait for the device."""
    p = {name: t.requires_grad_() for name, t in on_device(BF16).items()}
    x = cases.drawn(200, layer.WIDTH, seed=1, dtype=BF16).to(DEVICE).requires_grad_()
    layer.experts(x, p).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.experts(x, p).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("value", [float("nan"), 1000.0])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_slots_without_an_expert(dtype, value):
    """Rows of no expert hold what their memory held: NaN, or a number that shows in a sum."""
    with old_memory(value):
        layer.with_strays(dtype, DEVICE)


def test_a_graph_follows_its_routing():
    """A captured layer, replayed on other tokens, routes those."""
    p = on_device(BF16)
    first, second = (
        cases.drawn(64, layer.WIDTH, seed=seed, dtype=BF16).to(DEVICE) for seed in (1, 7)
    )
    want = [layer.experts(x, p) for x in (first, second)]
    x, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.experts(x, p)
    for tokens, value in zip((first, second), want, strict=True):
        x.copy_(tokens)
        graph.replay()
        assert same_bytes(out, value)


def test_a_graph_follows_its_offsets():
    """A captured product of few rows, replayed with other loads of its experts."""
    x, weight = (
        cases.drawn(*s, seed=1, dtype=BF16).to(DEVICE) for s in ((24, 512), (16, 384, 512))
    )
    loads = [[24] + [0] * 15, [0] * 15 + [24], [0, 3] * 8, [1] * 8 + [2] * 8]
    every = [cases.offsets_of(load).to(DEVICE) for load in loads]
    want = [ck.grouped_linear(x, weight, offsets) for offsets in every]
    offsets, graph = every[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ck.grouped_linear(x, weight, offsets)
    for values, result in zip(every, want, strict=True):
        offsets.copy_(values)
        graph.replay()
        assert same_bytes(out, result)


def test_bad_offsets():
    """They change results only: neighbours in memory keep their bytes."""
    x, weight, _, _, dy = (t.to(DEVICE) for t in cases.operands("few", BF16))
    for values in ([-5, 3, 1, 9, 2, 4, 2**31 - 1], [7, -(2**31), 8, 8, 8, 8, 100]):
        offsets = torch.tensor(values, dtype=torch.int32, device=DEVICE)
        holder = torch.full((len(weight) + 2, *weight.shape[1:]), 7.0, device=DEVICE)
        w = weight.clone().requires_grad_()
        ck.grouped_linear(x, w, offsets, main_grad=holder[1:-1]).backward(dy)
        torch.cuda.synchronize()
        assert (holder[[0, -1]] == 7).all()
