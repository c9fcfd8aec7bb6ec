"""The battery on the CPU backend: no row sees another, no thread count and no cut shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import cute_kernels as ck
from cute_kernels.cpu import elementary
from cute_kernels.rowwise import cpu, op
from tests import contract
from tests.anchors import planted
from tests.contract import ContractViolation, SumOp, same_bytes

from . import cases
from .cases import BF16, FP16, FP32, RUNS, drawn, indices, rows_op, threads

ROWS = 70
#: Those that have other shapes than their neighbours in the list: in bf16 and with threads by day.
BY_DAY = {"softmax", "log_softmax, gradient", "silu", "gelu_mul, gradient", "rotary", "tanh"}
BY_DAY |= {"rotary_pos_emb", "rotary_pos_emb, gradient"}


def by_night(names, night: bool = True):
    """Parameters of a test, of which these names are left to the night; or the others."""
    marks = {True: pytest.mark.nightly, False: ()}
    return [pytest.param(name, marks=marks[(name in names) == night]) for name in RUNS]


@pytest.mark.parametrize("name", by_night(BY_DAY))
def test_fp32(name):
    """By day those that the test below has by night."""
    assert contract.check_rows(rows_op(name), ROWS, seed=3) > 60


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in by_night(BY_DAY, False) if "inside" not in name.values[0]]
)
def test_half(name, dtype):
    assert contract.check_rows(rows_op(name, dtype), ROWS, seed=4) > 60


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["softmax, few", "silu", "exp inside", "lane sums inside"])
def test_every_number_of_rows(name):
    assert contract.check_population(rows_op(name), 512, 5, range(1, 513)) == 512


@pytest.mark.parametrize("name", by_night(BY_DAY, False))
def test_threads_do_not_show(name):
    """Of 3,000 rows, so that torch cuts the work."""
    rows = rows_op(name)
    inputs = rows.rows(3000 if rows.width < 600 else 300, 6)
    with threads(1):
        one = rows.run(inputs)
    with threads(2):
        assert same_bytes(rows.run(inputs), one)


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


@pytest.mark.parametrize(
    ("dtype", "padding", "cuts"),
    [
        (FP32, None, (1,)),
        (BF16, 7, (16,)),
        (FP16, -1, (7,)),
        *(
            pytest.param(*of, (16, 7, 1), marks=pytest.mark.nightly)
            for of in itertools.product(cases.DTYPES, (None, 7, -1))
        ),
    ],
)
def test_every_split(dtype, padding, cuts):
    """Cut anywhere: multiples of 16, of 7, and of 1, every token for itself among them."""
    for cut in cuts:
        assert contract.check_splits(sum_op(dtype, cut, padding), seed=8) >= 6


def test_threads_do_not_show_in_a_gradient():
    ids, dy = indices(50, 4000, seed=1), drawn(4000, 64, seed=2)
    with threads(1):
        want = op.embedding_gradient(dy, ids, -1, 50)
    with threads(2):
        assert same_bytes(op.embedding_gradient(dy, ids, -1, 50), want)


# ---- mutants -------------------------------------------------------------------------------------


def rows_of(name: str, dtype: torch.dtype = FP32) -> Callable[[], object]:
    return lambda: contract.check_rows(rows_op(name, dtype), ROWS, seed=3)


def tokens() -> None:
    contract.check_splits(sum_op(FP32, 1), seed=8)


EXP = ("    y = x * LOG2E\n", "    return torch.exp2(x * LOG2E)\n")
ACTIVATION = "return _by_element(lambda v: elementary.value(kind, v), (x,), 1)[0]"
POWER = "power = elementary.exp(block - block.amax(1, keepdim=True))\n        return power / "
CHUNKS = "sum(p.float().sum(1, keepdim=True) for p in power.chunk(1 + (len(block) > 8), 1))"
STEP = "return v.to(dtype).to(torch.float32)"
ORDER = "    order = ids.argsort(stable=True)\n"
HALVES = (
    "    parts = torch.zeros(2, *into.shape)\n"
    "    for part, rows in zip(parts, (slice(len(ids) // 2), slice(len(ids) // 2, None))):\n"
    "        part.index_add_(0, ids[rows], dy[rows].float())\n"
    "    into += parts[0] + parts[1]\n"
    "    return\n"
)
#: Bug -> (module, edits, the check that kills it).
MUTANTS = {
    # torch's 2^y takes another function behind the last whole vector register.
    "torch's 2^y": (elementary, [EXP], rows_of("exp inside")),
    "torch's 2^y in a sigmoid": (elementary, [EXP], rows_of("sigmoid inside")),
    "torch's silu": (cpu, [(ACTIVATION, "return torch.nn.functional.silu(x)")], rows_of("silu")),
    "torch's gelu": (cpu, [(ACTIVATION, "return torch.nn.functional.gelu(x)")], rows_of("gelu")),
    # As torch's reductions on CUDA.
    "lanes by the number of rows": (
        cpu,
        [("count = lanes(n)", "count = 16 if m >= 16 else 32")],
        rows_of("lane sums inside"),
    ),
    "chunks by the number of rows": (
        cpu,
        [("return power / _lane_sums(power)\n", f"return power.float() / {CHUNKS}\n")],
        rows_of("softmax"),
    ),
    "a maximum over rows": (
        cpu,
        [(POWER, POWER.replace("1, keepdim=True", ""))],
        rows_of("softmax"),
    ),
    "rotary steps by the number of rows": (
        cpu,
        [(STEP, f"{STEP} if v.numel() > 300 else v")],
        rows_of("rotary_pos_emb", BF16),
    ),
    "rotary steps back by the number of rows": (
        cpu,
        [(STEP, f"{STEP} if v.numel() > 300 else v")],
        rows_of("rotary_pos_emb, gradient", BF16),
    ),
    "tokens descending": (
        cpu,
        [(ORDER, "    order = len(ids) - 1 - ids.flip(0).argsort(stable=True)\n")],
        tokens,
    ),
    "a call summed first": (
        cpu,
        [
            ("sums = into[entry[starts]].to(torch.float32)", "sums = into[entry[starts]] * 0.0"),
            ("into[entry[starts]] = _rounded(", "into[entry[starts]] += _rounded("),
        ],
        tokens,
    ),
    "two halves of the tokens": (cpu, [(ORDER, HALVES + ORDER)], tokens),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name):
    module, edits, check = MUTANTS[name]
    with planted(module, *edits), pytest.raises(ContractViolation):
        check()
