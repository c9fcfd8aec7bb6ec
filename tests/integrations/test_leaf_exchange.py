"""Paths on which ranks add leaves: equal bytes, counted bytes, the choice, and mutants.

Ranks are threads, whose leaves are drawn; test_tensor_parallel.py has products and processes.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.gemm import op
from cute_kernels.integrations import leaf_exchange
from cute_kernels.integrations.leaf_exchange import CHAINED, GATHERED, SCATTERED, Sizes, Sum
from ptxsim.skips import requires_core
from tests.anchors import planted
from tests.contract import same_bytes
from tests.integrations.parallel_cases import paths
from tests.ranks import threads

BF16, FP32 = torch.bfloat16, torch.float32
N = 24

pytestmark = pytest.mark.usefixtures("threaded")


def drawn(leaves: int, rows: int, n: int = N) -> torch.Tensor:
    """Leaves of many magnitudes; a column of -0, of subnormals, of Inf and of NaN."""
    generator = torch.Generator().manual_seed(leaves * 1000 + rows)
    parts = torch.randn(leaves, rows, n, generator=generator)
    parts *= 2.0 ** torch.randint(-12, 13, parts.shape, generator=generator)
    parts[..., 0], parts[..., 1] = -0.0, 1e-41 * parts[..., 1]
    parts[-1, :, 2], parts[0, :, 3] = float("inf"), float("nan")
    return parts


def exchange(path: str, parts, bias, dtype, ranks: int, board=None, pieces: int = 0) -> list:
    """The sum on each of the ranks, which have equal numbers of the leaves.

    pieces: Blocks of rows that are exchanged; 0: several in a chain, else one.
    """
    pieces = pieces or (3 if path == CHAINED else 1)
    count, rows, n = len(parts) // ranks, *parts.shape[1:]
    sizes = Sizes(rows, n, count, ranks)

    def work(rank):
        local = parts[rank.rank() * count :][:count]
        leaves_of = lambda span: local[:, span].clone()  # noqa: E731
        total = Sum(leaves_of, sizes, bias, dtype, torch.device("cpu"), rank)
        return total.run(path, -(-rows // pieces))

    return threads.together(ranks, work, board)


def differing(ranks: int, path: str) -> list[tuple]:
    """Cases in which a rank's bytes are not those of `op.add_leaves` of all leaves."""
    wrong = []
    for leaves in {ranks, 2 * ranks, 8} if ranks < 8 else {8}:
        for rows in (1, 2, 8, 9, 37):
            parts = drawn(leaves, rows)
            for dtype, bias in ((BF16, torch.randn(N).to(BF16)), (FP32, None)):
                want = op.add_leaves(parts, bias, dtype)
                sums = exchange(path, parts, bias, dtype, ranks)
                if not all(same_bytes(got, want) for got in sums):
                    wrong.append((leaves, rows, dtype))
    return wrong


#: Paths and the numbers of ranks that take them.
TAKEN = [(path, ranks) for ranks in (2, 4, 8) for path in paths(ranks)]


@pytest.mark.parametrize(("path", "ranks"), TAKEN)
def test_every_path_has_the_bytes_of_one_rank(path, ranks):
    assert not differing(ranks, path)


@pytest.mark.parametrize("path", paths(2))
@pytest.mark.parametrize("pieces", [1, 2, 5, 37])
def test_no_number_of_pieces_shows(pieces, path):
    parts = drawn(4, 37)
    want = op.add_leaves(parts, None, BF16)
    sums = exchange(path, parts, None, BF16, 2, pieces=pieces)
    assert all(same_bytes(y, want) for y in sums)


def received(path: str, ranks: int, item: int) -> float:
    """Bytes that a rank receives for an element of a sum of eight leaves; in a chain, rank 1."""
    others, leaves = ranks - 1, 8 // ranks
    if path == GATHERED:
        return others * leaves * 4
    if path == SCATTERED:  # others' leaves of this rank's rows; others' rounded rows
        return others * (leaves * 4 + item) / ranks
    return 4


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("path", "ranks"), TAKEN)
def test_the_bytes_that_ranks_receive_are_counted(path, ranks, dtype):
    """The rank that receives most counts."""
    board, parts = threads.Board(ranks), drawn(8, 16 * ranks)
    exchange(path, parts, None, dtype, ranks, board)
    elements = 16 * ranks * N
    assert max(board.received) == elements * received(path, ranks, dtype.itemsize)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(
    ("path", "ranks", "launches"),
    [(GATHERED, 4, 4), (SCATTERED, 4, 3), (CHAINED, 2, 6)],
    ids=[GATHERED, SCATTERED, CHAINED],
)
def test_ranks_add_in_one_launch_on_a_gpu(monkeypatch, path, ranks, launches):
    """The Triton kernel's sm_90 code, equal bytes: of each rank that has rows, or of its pieces."""
    pytest.importorskip("triton")
    import cute_kernels.gemm.triton as package
    from cute_kernels.gemm.triton import launch
    from tests.triton_runner import Runner

    lock = threading.Lock()  # ranks are threads, and the simulator's device guard is one

    def add_leaves(out, sums, bias):
        with lock:
            return launch.add_leaves(out, sums, bias)

    parts, bias = drawn(8, 9, 97), torch.randn(97).to(BF16)
    parts[0, :, 3] = 1.0  # the payload of NaN is the device's
    want = op.add_leaves(parts, bias, BF16)
    monkeypatch.setattr(op, "_adds_by_triton", lambda device: True)
    monkeypatch.setattr(op, "_triton_launcher", lambda: SimpleNamespace(add_leaves=add_leaves))
    with Runner(package, {"root_kernel": ("out_ptr",)}).simulated() as kernels:
        sums = exchange(path, parts, bias, BF16, ranks)
    assert len(kernels) == launches
    assert all(same_bytes(got, want) for got in sums)


# ---- the choice ---------------------------------------------------------------------------------


def test_few_bytes_are_gathered_and_so_are_fewer_rows_than_ranks():
    sizes = Sizes(64, 4096, 2, 4)
    assert leaf_exchange.choose(sizes, sizes.all_leaves()) == GATHERED
    assert leaf_exchange.choose(sizes, sizes.all_leaves() - 1) != GATHERED
    assert leaf_exchange.choose(Sizes(3, 1 << 20, 2, 4), 0) == GATHERED


def test_two_ranks_pass_a_sum_on_and_more_scatter():
    chosen = {
        (rows, ranks): leaf_exchange.choose(Sizes(rows, 4096, 8 // ranks, ranks), 0)
        for rows in (64, 1 << 16)
        for ranks in (2, 4, 8)
    }
    assert chosen == {(rows, ranks): CHAINED if ranks == 2 else SCATTERED for rows, ranks in chosen}


# ---- mutants ------------------------------------------------------------------------------------

EARLY = """running += 0 if total.bias is None else total.bias
                part = op.add_leaves_into(out[span], addends, None)"""
FROM_ZERO = "(leaves[0], (torch.zeros_like(leaves[:1]), leaves), None)"
OTHER_PIECE = "spans[index ^ 1 if index ^ 1 < len(spans) and rank == 1 else index] if"
BY_RANK, COLUMNS = "(received.flatten(0, 1),), total.bias", ".unflatten(1, (ranks, share))"
OF_RANK = "(received.roll(-total.group.rank(), 0).flatten(0, 1),), total.bias"
#: (path, of the source, what stands there instead, what that is).
MUTANTS = [
    (CHAINED, "(leaves[0], (leaves,), None)", FROM_ZERO, "from zero"),
    (CHAINED, "running.unsqueeze(0), leaves", "leaves, running.unsqueeze(0)", "own leaves first"),
    (CHAINED, ".unsqueeze(0), leaves", ".unsqueeze(0), leaves.flip(0)", "descending"),
    (CHAINED, "(leaves,), None)", "(leaves,), None).bfloat16().float()", "rounded on the way"),
    (CHAINED, "part = op.add_leaves_into(out[span], addends, total.bias)", EARLY, "bias first"),
    (CHAINED, "addends, total.bias", "addends, None", "no bias"),
    (CHAINED, "spans[index] if", OTHER_PIECE, "pieces exchanged"),
    (SCATTERED, BY_RANK, OF_RANK, "by arrival"),
    (SCATTERED, BY_RANK, BY_RANK.replace("flatten", "transpose(0, 1).flatten"), "leaf by leaf"),
    (SCATTERED, "(*parts, total.group)()", "(*parts, total.group)", "before they have arrived"),
    (SCATTERED, COLUMNS, f"{COLUMNS}.roll(1, 1)", "another rank's rows"),
    (SCATTERED, "in spans])", "in reversed(spans)])", "uneven rows of another rank"),
    (SCATTERED, ".transpose(0, 1).reshape", ".reshape", "leaves before ranks"),
    (SCATTERED, BY_RANK, BY_RANK.replace("total.bias", "None"), "scattered without the bias"),
]


@pytest.mark.parametrize(("path", "old", "new", "name"), MUTANTS)
def test_a_mutant_is_killed(path, old, new, name):
    with planted(leaf_exchange, (old, new)):
        try:
            killed = bool(differing(2 if path == CHAINED else 4, path))
        except (AssertionError, RuntimeError):  # of the transport, or of the adds: another shape
            killed = True
    assert killed
