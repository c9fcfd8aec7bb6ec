"""The battery on the CPU backend: no row sees another, no thread count and no cut shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.rowwise import cpu, functions, op
from cute_kernels.rowwise.config import LOG2E
from tests import contract
from tests.contract import ContractViolation, SumOp, same_bytes

from . import cases
from .cases import BF16, FP16, FP32, RUNS, drawn, indices, rows_op, threads

ROWS = 70
#: Those that have other shapes than their neighbours in the list; the others by night.
BY_DAY = {"softmax", "log_softmax, gradient", "silu", "gelu_mul, gradient", "rotary", "tanh"}
BY_DAY |= {"rotary_pos_emb", "rotary_pos_emb, gradient"}


@pytest.mark.parametrize("name", list(RUNS))
def test_fp32(name):
    assert contract.check_rows(rows_op(name), ROWS, seed=3) > 60


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in RUNS
        if "inside" not in name
    ],
)
def test_half(name, dtype):
    assert contract.check_rows(rows_op(name, dtype), ROWS, seed=4) > 60


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["softmax, few", "silu", "exp inside", "lane sums inside"])
def test_every_number_of_rows(name):
    assert contract.check_population(rows_op(name), 512, 5, range(1, 513)) == 512


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in RUNS],
)
def test_threads_do_not_show(name):
    """Of 3,000 rows, so that torch cuts the work."""
    rows = rows_op(name)
    inputs = rows.rows(3000 if rows.width < 600 else 300, 6)
    with threads(1):
        one = rows.run(inputs)
    with threads(2):
        assert same_bytes(rows.run(inputs), one)


@pytest.mark.parametrize(
    "make", [pytest.param("fresh_silu", marks=pytest.mark.nightly), "fresh_softmax"]
)
def test_a_fresh_process(make):
    contract.check_fresh_process(getattr(cases, make)(), 9, 7, f"tests.rowwise.cases:{make}")


# ---- mutants of rows -----------------------------------------------------------------------------


def killed(name: str, rows: int = ROWS) -> bool:
    try:
        contract.check_rows(rows_op(name), rows, seed=3)
    except ContractViolation:
        return True
    return False


def test_a_tail_that_rounds_otherwise_is_killed(monkeypatch):
    """torch's 2^y and sigmoid take another function behind the last whole vector register."""
    monkeypatch.setattr(functions, "exp", lambda x: torch.exp2(x * LOG2E))
    monkeypatch.setitem(RUNS, "exp inside", (cases.inside(functions.exp), 37))
    assert killed("exp inside") and killed("sigmoid inside")


@pytest.mark.parametrize(("name", "theirs"), [("silu", F.silu), ("gelu", F.gelu)])
def test_torch_is_killed(monkeypatch, name, theirs):
    monkeypatch.setattr(cpu, "activation", lambda x, kind: theirs(x))
    assert killed(name)


def test_lanes_by_rows_are_killed(monkeypatch):
    """As torch's reductions on CUDA, whose lanes for a row follow the number of rows."""

    def lane_sums(v):
        lanes = 16 if len(v) >= 16 else 32
        padded = F.pad(v, (0, -v.shape[1] % lanes)).view(len(v), -1, lanes)
        return padded.sum(1).sum(1, keepdim=True)

    monkeypatch.setattr(cpu, "_lane_sums", lane_sums)
    assert killed("lane sums inside")


def test_a_softmax_of_chunks_by_rows_is_killed(monkeypatch):
    def softmax(x, dtype):
        parts = x.float().exp().chunk(1 + (len(x) > 8), 1)
        return (x.float().exp() / sum(p.sum(1, keepdim=True) for p in parts)).to(dtype)

    monkeypatch.setattr(cpu, "softmax", softmax)
    assert killed("softmax")


def test_a_maximum_over_rows_is_killed(monkeypatch):
    """One maximum for the block: the same formula, other roundings, and a neighbour's NaN."""

    def softmax(x, dtype):
        power = functions.exp(x.double() - x.double().amax())
        return (power / cpu._lane_sums(power)).to(dtype)

    monkeypatch.setattr(cpu, "softmax", softmax)
    assert killed("softmax")


# ---- embedding: a stream of tokens ---------------------------------------------------------------

TOKENS, VOCAB, WIDTH = 150, 23, 19


def stream(dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and dy: one entry in a third of the tokens, the others anywhere."""
    ids = indices(VOCAB, TOKENS, seed=1)
    ids[indices(TOKENS, TOKENS // 3, seed=2)] = 7
    scale = drawn(TOKENS, 1, seed=3).exp2()
    return ids, (drawn(TOKENS, WIDTH, seed=4) * scale).to(dtype)


def sum_op(dtype: torch.dtype, cut: int, padding: int | None = None) -> SumOp:
    ids, dy = stream(dtype)
    weight = drawn(VOCAB, WIDTH, seed=5, dtype=dtype).requires_grad_()

    def run(start, pieces):
        state = start.clone()
        for piece in pieces:
            y = ck.embedding(ids[piece], weight, padding_idx=padding, main_grad=state)
            y.backward(dy[piece])
        assert weight.grad is None
        return state

    return SumOp("embedding", run, TOKENS, drawn(VOCAB, WIDTH, seed=6), cut)


@pytest.mark.parametrize("padding", [None, 7, -1])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_every_split(dtype, padding):
    """Cut anywhere: multiples of 16, of 7, and of 1, every token for itself among them."""
    for cut in (16, 7, 1):
        assert contract.check_splits(sum_op(dtype, cut, padding), seed=8) >= 6


@pytest.mark.parametrize("at", range(1, TOKENS))
def test_two_pieces_cut_anywhere(at):
    given = sum_op(BF16, 1)
    want = given.run(given.start, [slice(0, TOKENS)])
    assert same_bytes(given.run(given.start, [slice(0, at), slice(at, TOKENS)]), want)


@pytest.mark.parametrize("count", [1, 2])
def test_threads_do_not_show_in_a_gradient(count):
    ids, dy = indices(50, 4000, seed=1), drawn(4000, 64, seed=2)
    with threads(1):
        want = op.embedding_gradient(dy, ids, -1, 50)
    with threads(count):
        assert same_bytes(op.embedding_gradient(dy, ids, -1, 50), want)


def _reversed(dy, ids, padding, into):
    into.index_add_(0, ids.flip(0), dy.flip(0).to(into.dtype))


def _summed_first(dy, ids, padding, into):
    into += torch.zeros_like(into).index_add_(0, ids, dy.to(into.dtype))


def _by_thread(dy, ids, padding, into):
    """Two halves of the tokens, added at the end."""
    half = len(ids) // 2
    for part in (slice(0, half), slice(half, None)):
        into += torch.zeros_like(into).index_add_(0, ids[part], dy[part].to(into.dtype))


@pytest.mark.parametrize("mutant", [_reversed, _summed_first, _by_thread])
def test_another_order_of_tokens_is_killed(monkeypatch, mutant):
    monkeypatch.setattr(cpu, "embedding_gradient", mutant)
    with pytest.raises(ContractViolation):
        contract.check_splits(sum_op(FP32, 1), seed=8)
