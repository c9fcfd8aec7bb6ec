"""Tests of gemm on a GPU: the battery, poison, streams, graphs, SM counts.  `make gpu-test`.

What ran where: docs/status.md and the notes.
"""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.gemm import config, launch, op, tiles
from tests import contract
from tests.contract import RowOp, SumOp
from tests.oracles import gemm as reference

from . import triton_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = 17
BF16 = torch.bfloat16
#: (M, K, N) of the five target shapes.
SHAPES = {
    "qkv": (4096, 4096, 12288),
    "o_proj": (4096, 4096, 4096),
    "mlp_up": (4096, 4096, 14336),
    "mlp_down": (4096, 14336, 4096),
    "lm_head": (4096, 4096, 32000),
}


#: (K, N) of what decoding multiplies.
DECODE = {name: shape[1:] for name, shape in SHAPES.items()}
DECODE |= {"lm_head_128k": (4096, 128256), "lm_head_152k": (4096, 151936), "router": (4096, 256)}


def randn(*shape: int, seed: int = SEED, dtype=BF16) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def linear_op(n: int, k: int, dtype=BF16, bias: bool = True) -> RowOp:
    weight, b = randn(n, k, seed=1, dtype=dtype), randn(n, seed=2, dtype=dtype)
    run = lambda rows: op.linear(rows, weight, b if bias else None, None, "chain")  # noqa: E731
    return RowOp(f"linear {n}x{k} {dtype}", run, k, dtype, "cuda")


def partials_op(n: int, k: int) -> RowOp:
    """Product into fp32 accumulators by the accumulate epilogue: order changes show here."""
    weight = randn(n, k, seed=1)

    def run(rows):
        return launch.gemm(rows, weight, None, torch.zeros(len(rows), n, device="cuda"))

    return RowOp(f"fp32 partials {n}x{k}", run, k, BF16, "cuda")


def dw_op(tokens: int, n: int, k: int, dtype=BF16) -> SumOp:
    dy, x = randn(tokens, n, seed=3, dtype=dtype), randn(tokens, k, seed=4, dtype=dtype)

    def run(start, pieces):
        state = start.clone()
        for piece in pieces:
            op.linear_dw_(dy[piece], x[piece], state, "chain")
        return state

    return SumOp(f"dW {n}x{k} {dtype}", run, tokens, randn(n, k, seed=5, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1000, 776), (72, 88), (130, 33), (4096, 512)])
def test_battery(n, k, dtype):
    assert contract.check_rows(linear_op(n, k, dtype), 300, SEED) > 60


@pytest.mark.parametrize(("n", "k"), [(1000, 776), (264, 4096)])
def test_battery_of_fp32_partials(n, k):
    assert contract.check_rows(partials_op(n, k), 300, SEED) > 60


def test_every_number_of_rows():
    """Every M in 1..4096 at one shape."""
    assert contract.check_population(linear_op(512, 1024), 4096, SEED, range(1, 4097)) == 4096


@pytest.mark.parametrize("name", SHAPES)
def test_drawn_numbers_of_rows(name):
    """200 drawn M at each target shape, bf16 outputs and, at 20 of them, fp32 partials."""
    m, k, n = SHAPES[name]
    generator = torch.Generator().manual_seed(SEED)
    sizes = torch.randint(1, m + 1, (200,), generator=generator).tolist()
    contract.check_population(linear_op(n, k), m, SEED, sizes)
    contract.check_population(partials_op(n, k), m, SEED, sizes[:20])


def order_op(n: int, k: int, order: str, dtype=BF16) -> RowOp:
    weight, bias = randn(n, k, dtype=dtype), randn(n, seed=4, dtype=dtype)
    run = lambda x: ck.linear(x, weight, bias, order=order)  # noqa: E731
    return RowOp(f"linear, {order}", run, k, dtype, "cuda")


@pytest.mark.parametrize("order", config.ORDERS)
@pytest.mark.parametrize("n", [4096, 12288, 1032])
def test_rows_across_a_change_of_tile(n, order):
    """The tile and the kernel follow M; the bytes of a row do not."""
    k, most = 1024, 4096
    units = launch.most_ctas(torch.device("cuda:0"))
    tile = {m: tiles.choose(m, n, k, order, units) for m in range(1, most + 1)}
    changes = [m for m in range(1, most) if tile[m] != tile[m + 1]]
    assert len(set(tile.values())) > 3
    sizes = sorted({size for m in changes for size in (m - 1, m, m + 1, m + 2) if size > 0})
    for target in (order_op(n, k, order), order_op(n, k, order, torch.float16)):
        contract.check_population(target, most, SEED, sizes)


@pytest.mark.parametrize("order", config.ORDERS)
@pytest.mark.parametrize("name", DECODE)
def test_every_number_of_few_rows_and_drawn_ones(name, order):
    """Rows 1 to 128 and 200 drawn numbers up to 16384 have the bytes that they have among all."""
    k, n = DECODE[name]
    x, weight = randn(16384, k), randn(n, k, seed=2)
    generator = torch.Generator().manual_seed(SEED)
    sizes = [*range(1, 129), *torch.randint(129, 16385, (200,), generator=generator).tolist()]
    # Compared on the device: hundreds of gigabytes would cross the bus otherwise.
    whole = ck.linear(x, weight, order=order).view(torch.int16)
    for m in sizes:
        assert (ck.linear(x[:m], weight, order=order).view(torch.int16) == whole[:m]).all(), m
    if order == "tree":
        for m in range(1, 129):
            assert (ck.skinny_linear(x[:m], weight).view(torch.int16) == whole[:m]).all(), m


def operands_of(majors: str, dtype, m: int = 1000, n: int = 1032, k: int = 776):
    a, b = randn(m, k, dtype=dtype), randn(n, k, seed=2, dtype=dtype)
    a = a.mT.contiguous().mT if majors.startswith("mn") else a
    return a, b.mT.contiguous().mT if majors.endswith("mn") else b


@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
@pytest.mark.parametrize("majors", ["kk", "kmn", "mnk", "mnmn"])
def test_all_dense_tiles_give_the_same_bytes(majors, epilogue, monkeypatch):
    """The whole catalogue at every width, in fp32 where the epilogue stores it."""
    for dtype in (BF16, torch.float16):
        a, b = operands_of(majors, dtype)
        bias = randn(1032, seed=3, dtype=dtype) if epilogue == "bias" else None
        start = randn(1000, 1032, seed=4, dtype=torch.float32)
        out = []
        for tile in tiles.dense_tiles("chain"):
            for choice in ("choose", "dense"):
                monkeypatch.setattr(tiles, choice, lambda *_, tile=tile: tile)
            state = start.clone() if epilogue == "accumulate" else None
            out.append(launch.gemm(a, b, bias, state))
        assert all(contract.same_bytes(out[0], other) for other in out[1:]), dtype


@pytest.mark.parametrize("order", config.ORDERS)
@pytest.mark.parametrize("majors", ["kk", "kmn"])
@pytest.mark.parametrize("rows", [1, 13, 103, 300])
def test_every_tile_of_both_kernels_gives_the_same_bytes(order, majors, rows, monkeypatch):
    every = [*tiles.dense_tiles(order), *tiles.skinny_tiles(order)]
    for dtype in (BF16, torch.float16):
        a, b = operands_of(majors, dtype, rows, 1030, 2328)
        bias = randn(1030, seed=3, dtype=dtype)
        out = {}
        for tile in every:
            monkeypatch.setattr(tiles, "choose", lambda *_, tile=tile: tile)
            monkeypatch.setattr(tiles, "dense", lambda *_, tile=tile: tile)
            out[tile] = launch.gemm(a, b, bias, None, order)
        want = out.pop(every[0])
        wrong = [tile for tile, other in out.items() if not contract.same_bytes(want, other)]
        assert not wrong, (dtype, wrong)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "n", "k"), [(4096, 1024, 512), (1000, 264, 776), (100, 33, 65)])
def test_splits(tokens, n, k, dtype):
    assert contract.check_splits(dw_op(tokens, n, k, dtype), SEED) >= 6


def test_fresh_process():
    contract.check_fresh_process(linear_default(), 300, SEED, f"{__name__}:linear_default")


def linear_default() -> RowOp:
    return linear_op(1000, 776)


@pytest.mark.parametrize("ctas", [1, 2, 3, 8, 16, 24, 32, 48, 64, 78, 96, 100, 114, 120, 130, 132])
def test_sm_counts(ctas, monkeypatch):
    """schedule_invariant: 16 caps of the persistent grid."""
    target = partials_op(1000, 776)
    rows = target.rows(700, SEED)
    want = target.run(rows)
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(ctas))
    got = target.run(rows)
    contract.require_same(
        got, want, op=target.name, transform="SM count", case=str(ctas), seed=SEED
    )


def test_green_contexts():
    """The same bytes on a part of the chip."""
    green = pytest.importorskip("torch.cuda.green_contexts")
    target = partials_op(1000, 776)
    rows = target.rows(700, SEED)
    want = target.run(rows)
    for sms in (8, 16, 64):
        context = green.GreenContext.create(num_sms=sms, device_id=0)
        context.set_context()
        try:
            got = target.run(rows)
            torch.cuda.synchronize()
        finally:
            context.pop_context()
        contract.require_same(
            got, want, op=target.name, transform="green context", case=str(sms), seed=SEED
        )


def test_repeats_beside_other_work():
    """1,000 repeats while another stream keeps the GPU busy."""
    target = partials_op(1000, 776)
    rows = target.rows(700, SEED)
    want = target.run(rows)
    other = torch.cuda.Stream()
    noise = randn(4096, 4096)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        got = target.run(rows)
        differing += (got.view(torch.int32) != want.view(torch.int32)).sum()
    assert int(differing) == 0


def test_two_streams():
    target = linear_op(1000, 776)
    rows = target.rows(700, SEED)
    want = target.run(rows)
    streams, out = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            out.append(target.run(rows))
    torch.cuda.synchronize()
    for i, got in enumerate(out):
        contract.require_same(
            got, want, op=target.name, transform="streams", case=str(i), seed=SEED
        )


def test_cuda_graph():
    """Captured forward and backward, replayed on new inputs."""
    weight = randn(1000, 776, seed=1).requires_grad_()
    state = torch.zeros(1000, 776, device="cuda")
    x = randn(300, 776, seed=7)
    dy = randn(300, 1000, seed=8)

    def step():
        state.zero_()
        y = ck.linear(x, weight, main_grad=state)
        y.backward(dy)
        return y

    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in range(20):
        x.copy_(randn(300, 776, seed=seed))
        graph.replay()
        got, got_state = y.detach().clone(), state.clone()
        want = step().detach()
        assert contract.same_bytes(got, want) and contract.same_bytes(got_state, state)


@pytest.mark.parametrize("fill", [float("nan"), 0x7F], ids=["nan", "0x7f"])
def test_poisoned_outputs(fill, monkeypatch):
    """Every output is written, whatever the memory held."""
    true_allocator = launch.allocator

    def allocator(*args):
        def new():
            held = true_allocator(*args)()
            raw = held if isinstance(fill, float) else held.view(torch.int16)
            raw.fill_(fill if isinstance(fill, float) else 0x7F7F)
            return held

        return new

    a, b = randn(300, 776), randn(520, 776, seed=2)
    want = launch.gemm(a, b, None, None)
    monkeypatch.setattr(launch, "allocator", allocator)
    assert contract.same_bytes(launch.gemm(a, b, None, None), want)


@pytest.mark.parametrize("name", SHAPES)
def test_accuracy(name):
    """The bound T and the misround rate of reliability.md section 5, on 256 rows."""
    _, k, n = SHAPES[name]
    a, b = randn(256, k), randn(n, k, seed=2)
    got = ck.linear(a, b).cpu()
    exact, bound = reference.gemm(a.cpu(), b.cpu()), reference.error_bound(a.cpu(), b.cpu())
    contract.check_accuracy(got, exact, bound, 0.02)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(1, 8), (1000, 264), (4096, 1000)])
def test_bias_gradient(tokens, n, dtype):
    """The bytes of the documented order: lane l adds rows l, l + 32, ...; then lanes 0 to 31."""
    x, weight = randn(tokens, 64, dtype=dtype), randn(n, 64, seed=2, dtype=dtype)
    dy = randn(tokens, n, seed=3, dtype=dtype)
    bias = torch.zeros(n, dtype=dtype, device="cuda", requires_grad=True)
    ck.linear(x, weight, bias).backward(dy)
    assert contract.same_bytes(bias.grad, lane_sum(dy.float()).to(dtype))


def lane_sum(rows: torch.Tensor, lanes: int = 32) -> torch.Tensor:
    state = torch.zeros(lanes, rows.shape[1], device=rows.device)
    for piece in rows.split(lanes):
        state[: len(piece)] += piece
    total = torch.zeros_like(state[0])
    for lane in state:
        total += lane
    return total


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [97, 4096])
def test_leaves_are_added_with_the_bytes_of_a_cpu(n, dtype):
    """Of three tensors, as ranks exchange them; the second one's are rows of others."""
    for split in triton_cases.SPLITS:
        parts, bias = triton_cases.leaves_of(sum(split), 37, n), triton_cases.leaf_bias(n).to(dtype)
        on_gpu = parts.cuda()
        sums = [part[:, 3:20] for part in on_gpu.split(split)]
        sums = [part if i == 1 else part.contiguous() for i, part in enumerate(sums)]
        for addend in (None, bias):
            want = torch.empty(17, n, dtype=dtype)
            op.add_leaves_into(want, [parts[:, 3:20]], addend)
            out = torch.full((17, n), torch.nan, dtype=dtype, device="cuda")
            op.add_leaves_into(out, sums, None if addend is None else addend.cuda())
            triton_cases.same_sums(out.cpu(), want)


def test_offsets_beyond_int32():
    """x has more than 2³¹ elements; its last rows are right."""
    rows, k, n = 2**31 // 4096 + 300, 4096, 264
    x = torch.empty(rows, k, dtype=BF16, device="cuda")
    x[-300:] = randn(300, k)
    weight = randn(n, k, seed=2)
    assert contract.same_bytes(ck.linear(x, weight)[-300:], ck.linear(x[-300:], weight))
    dy = torch.empty(rows, n, dtype=BF16, device="cuda").zero_()
    dy[-300:] = randn(300, n, seed=3)
    x[:-300] = 0
    state = torch.zeros(n, k, device="cuda")
    op.linear_dw_(dy, x, state, "chain")
    small = torch.zeros(n, k, device="cuda")
    first = (rows - 300) // 16 * 16
    op.linear_dw_(dy[first:], x[first:], small, "chain")
    assert contract.same_bytes(state, small)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_inputs_device_is_used():
    a, b = randn(64, 64).to("cuda:1"), randn(64, 64, seed=2).to("cuda:1")
    got = ck.linear(a, b)
    assert got.device == a.device
    assert contract.same_bytes(got.cpu(), ck.linear(a.to("cuda:0"), b.to("cuda:0")).cpu())
    with pytest.raises(ck.errors.DeviceError, match="weight"):
        ck.linear(a, b.to("cuda:0"))
