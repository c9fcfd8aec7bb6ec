"""The battery itself: a correct op passes every transform, and each mutant dies by one of them."""

from __future__ import annotations

import json
import random

import pytest
import torch

import cute_kernels as ck
from cute_kernels import contracts
from tests import contract
from tests.contract import ContractViolation, RowOp, SumOp
from tests.public_calls import CASES, leaves_of, results_of

K, N, ROWS, SEED = 96, 40, 150, 7
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
GROUP = 16


def chain(rows: torch.Tensor, order=None) -> torch.Tensor:
    """Σ over groups of 16, each rounded to fp32: elementwise, so rows cannot meet."""
    total = torch.zeros(len(rows), N)
    for first in order if order is not None else range(0, K, GROUP):
        products = rows[:, None, first : first + GROUP].double() * WEIGHT[:, first : first + GROUP]
        total = (total.double() + products.sum(-1)).float()
    return total


def by_population(rows):
    """K order chosen by M, as an autotuner keyed on M does."""
    order = range(0, K, GROUP) if len(rows) <= 64 else reversed(range(0, K, GROUP))
    return chain(rows, order)


def split_by_population(rows):
    """Split-K chosen by M, as cuBLAS does for skinny shapes."""
    if len(rows) > 32:
        return chain(rows)
    return chain(rows, range(0, K // 2, GROUP)) + chain(rows, range(K // 2, K, GROUP))


def tail_elsewhere(rows):
    """The rows of the last partial tile go to another kernel."""
    whole = len(rows) // 64 * 64
    return torch.cat([chain(rows[:whole]), chain(rows[whole:], reversed(range(0, K, GROUP)))])


def by_position(rows):
    """Odd rows of a tile walk K the other way."""
    out = chain(rows)
    out[1::2] = chain(rows, reversed(range(0, K, GROUP)))[1::2]
    return out


def selected_by_product(rows):
    """Rows picked by a product with a 0/1 matrix: 0 · NaN is NaN."""
    return chain(torch.eye(len(rows)) @ rows)


def scaled_by_batch(rows):
    """A scale shared by the batch, as dynamic quantisation has it."""
    scale = rows.nan_to_num(0, 0, 0).abs().amax().clamp_min(1e-30) / 3
    return chain(rows / scale) * scale


def by_layout(rows):
    """Another kernel for strides that the fast one does not take."""
    return chain(rows) if rows.is_contiguous() else by_position(rows)


def by_alignment(rows):
    """Another kernel for pointers that are not 16-byte aligned."""
    return chain(rows) if rows.data_ptr() % 16 == 0 else by_position(rows)


def arrival_order(rows):
    """Atomics: groups are added in the order in which they arrive."""
    order = list(range(0, K, GROUP))
    random.shuffle(order)
    return chain(rows, order)


class Stateful:
    """A workspace that the last call left dirty."""

    left = 0.0

    def __call__(self, rows):
        out = chain(rows) + self.left
        self.left = float(out.sum()) * 1e-6
        return out


def op(run) -> RowOp:
    return RowOp(getattr(run, "__name__", "op"), run, K, torch.float32)


def test_a_correct_op_passes():
    assert contract.check_rows(op(chain), ROWS, SEED) > 60


KILLS = {
    "T1 population": [by_population, split_by_population, tail_elsewhere],
    "T2 position": [by_position, tail_elsewhere],
    "T3 neighbour content": [selected_by_product, scaled_by_batch],
    "T4 padding": [selected_by_product, tail_elsewhere],
    "T5 chunks": [by_population, split_by_population, tail_elsewhere],
    "layout": [by_layout, by_alignment],
    "repeat": [arrival_order, Stateful()],
}


def check_one(transform: str, target: RowOp) -> None:
    inputs = target.rows(ROWS, SEED)
    if transform == "T1 population":
        contract.check_population(target, ROWS, SEED, contract.boundary_sizes(ROWS))
    elif transform == "T5 chunks":
        contract.check_chunks(target, inputs, target.run(inputs), SEED)
    elif transform == "repeat":
        contract.check_repeat(target, ROWS, SEED)
    else:
        contract.check_transform(target, transform, inputs, target.run(inputs), SEED)


@pytest.mark.parametrize(
    ("transform", "mutant"),
    [(t, m) for t, mutants in KILLS.items() for m in mutants],
    ids=lambda v: v if isinstance(v, str) else getattr(v, "__name__", type(v).__name__),
)
def test_each_transform_kills_its_mutants(transform, mutant):
    with pytest.raises(ContractViolation):
        check_one(transform, op(mutant))


# ---- streams of tokens --------------------------------------------------------------------------

TOKENS = 200
DY = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(2))
X = torch.randn(TOKENS, 20, generator=torch.Generator().manual_seed(3))
START = torch.randn(12, 20, generator=torch.Generator().manual_seed(4))


def add_groups(state, dy, x, order=None):
    for first in order if order is not None else range(0, len(dy), GROUP):
        g = slice(first, first + GROUP)
        products = dy[g, :, None].double() * x[g, None, :]
        state = (state.double() + products.sum(0)).float()
    return state


def sum_op(step) -> SumOp:
    def run(start, pieces):
        state = start.clone()
        for piece in pieces:
            state = step(state, DY[piece], X[piece])
        return state

    return SumOp(step.__name__, run, TOKENS, START)


def sum_then_add(state, dy, x):
    """A product per piece, added to main_grad afterwards: what cuBLAS plus an add does."""
    return state + add_groups(torch.zeros_like(state), dy, x)


def by_tokens(state, dy, x):
    """The order inside a piece follows its length."""
    order = range(0, len(dy), GROUP)
    return add_groups(state, dy, x, order if len(dy) > 64 else reversed(order))


def other_groups(state, dy, x):
    """Groups of 64 tokens: right for one shot, another sum for a cut at 16."""
    for first in range(0, len(dy), 64):
        g = slice(first, first + 64)
        state = (state.double() + (dy[g, :, None].double() * x[g, None, :]).sum(0)).float()
    return state


def test_a_correct_sum_passes():
    assert contract.check_splits(sum_op(add_groups), SEED) == 7


@pytest.mark.parametrize("mutant", [sum_then_add, by_tokens, other_groups])
def test_splits_kill_their_mutants(mutant):
    with pytest.raises(ContractViolation):
        contract.check_splits(sum_op(mutant), SEED)


def test_zero_groups_show_on_negative_zero():
    """A group of zeros added to -0 gives +0: only a byte comparison sees it."""

    def padded(state, dy, x):
        return add_groups(state, dy, x) + 0.0

    dead = torch.zeros(TOKENS, 12)

    def run(start, pieces):
        state = start.clone()
        for piece in pieces:
            state = padded(state, dead[piece], X[piece]) if len(pieces) > 1 else state
        return state

    target = SumOp("padded", run, TOKENS, torch.full((12, 20), -0.0))
    with pytest.raises(ContractViolation):
        contract.check_splits(target, SEED)


# ---- reports and comparisons --------------------------------------------------------------------


def test_the_report_names_the_first_difference_and_replays():
    target = op(by_population)
    with pytest.raises(ContractViolation) as caught:
        check_one("T1 population", target)
    report = json.loads(str(caught.value))
    assert report["op"] == "by_population" and report["seed"] == SEED
    rows = target.rows(ROWS, report["seed"])
    size = int(report["case"].split()[1])
    index = tuple(report["index"])
    got, want = target.run(rows[:size])[index], target.run(rows)[index]
    assert f"0x{int(contract.bits(got)) & 0xFFFFFFFF:08x}" == report["got_bits"]
    assert f"0x{int(contract.bits(want)) & 0xFFFFFFFF:08x}" == report["want_bits"]
    assert report["differing"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_tell_zeros_and_nans_apart(dtype):
    zero = torch.tensor([0.0, 1.0], dtype=dtype)
    assert not contract.same_bytes(zero, torch.tensor([-0.0, 1.0], dtype=dtype))
    nan = torch.tensor([float("nan")], dtype=dtype)
    other = (contract.bits(nan) ^ 1).view(dtype)
    assert torch.isnan(other) and contract.same_bytes(nan, nan.clone())
    assert not contract.same_bytes(nan, other)
    assert not contract.same_bytes(zero, zero.double())


def exact_case():
    generator = torch.Generator().manual_seed(5)
    a = torch.rand(64, 4096, generator=generator).bfloat16()
    b = torch.rand(48, 4096, generator=generator).bfloat16()
    exact = a.double() @ b.double().mT
    bound = 5.25 * 256 * 2.0**-23 * (a.double().abs() @ b.double().abs().mT)
    return a, b, exact, bound


def test_accuracy_passes_one_rounding_and_kills_known_bugs():
    """The table of reliability.md section 5: what an atol of 0.1 lets through must fail here."""
    a, b, exact, bound = exact_case()
    contract.check_accuracy((a.float() @ b.float().mT).bfloat16(), exact, bound, 0.01)
    bugs = {
        "last k dropped": a[:, :-1].double() @ b[:, :-1].double().mT,
        "bf16 partials": sum(
            (a[:, s].double() @ b[:, s].double().mT).bfloat16().double()
            for s in (slice(i, i + 1024) for i in range(0, 4096, 1024))
        ),
    }
    for label, wrong in bugs.items():
        with pytest.raises(AssertionError, match=r"bound|misrounded"):
            contract.check_accuracy(wrong.bfloat16(), exact, bound, 0.01)
            pytest.fail(f"{label} passed")
    one_off = exact.bfloat16()
    one_off[3, 5] = (a[3, :-1].double() @ b[5, :-1].double() * 0.9).bfloat16()
    with pytest.raises(AssertionError, match="times the bound"):
        contract.check_accuracy(one_off, exact, bound, 0.01)


@pytest.mark.parametrize("call", [ck.guarantees, ck.contract_id])
@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (("linear", "gpu"), ck.errors.ArgumentValueError, "device"),
        (("linear", 0.5), ck.errors.ArgumentTypeError, "device"),
        (("linear", True), ck.errors.ArgumentTypeError, "device"),
        (("linear", -1), ck.errors.ArgumentValueError, "device"),
        (("linear", 256), ck.errors.ArgumentValueError, "device"),
        ((["linear"],), ck.errors.ArgumentTypeError, "op"),
    ],
)
def test_bad_arguments_are_named(call, arguments, error, name):
    with pytest.raises(error, match=f"^{name}: expected "):
        call(*arguments)


@pytest.mark.parametrize("call", [ck.guarantees, ck.contract_id])
@pytest.mark.parametrize("index", [0, 1])
def test_an_integer_is_the_index_of_a_cuda_device(call, index, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(
            ck.errors.BackendUnavailable, match=f"linear: no backend for cuda:{index}"
        ):
            call("linear", index)
    recorded = []
    monkeypatch.setattr(
        contracts, "_backend", lambda contract, device, dtype: recorded.append(device) or "triton"
    )
    assert call("linear", index) == call("linear", f"cuda:{index}")
    assert recorded == [torch.device("cuda", index)] * 2


PAGES = torch.zeros(2, 32, 2, 64).bfloat16()
WITH_GRADIENT = torch.nn.Parameter(torch.ones(4))
WITH_GRADIENT.grad = torch.ones(4)
#: Calls of ops that have no gradient, or no case of their own.
OTHERS = {
    "rotary_table": lambda: ck.rotary_table(torch.arange(3), torch.ones(4)),
    "clip_grad_norm_": lambda: ck.clip_grad_norm_([WITH_GRADIENT], 1.0),
    "paged_attention": lambda: ck.paged_attention(
        PAGES[0], PAGES, PAGES, *(torch.tensor(t).int() for t in ([[0, 1]], [64], [0, 32]))
    ),
    "write_kv_cache": lambda: ck.write_kv_cache(
        *torch.zeros(2, 2, 2, 64).bfloat16(), PAGES[:1], PAGES[1:], torch.tensor([0, 1])
    ),
}
#: Made of other ops.
OF_OTHERS = {f"mhc.{name}" for name in ("connect", "head", "post_pre", "mix_and_aggregate")}
OF_OTHERS.add("mhc.expand_from_embedding")


@pytest.mark.parametrize("name", sorted({*CASES, *OTHERS} - OF_OTHERS))
def test_a_missing_backend_names_the_op_that_was_called(name, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    op = name.partition(",")[0]
    with pytest.raises(ck.errors.BackendUnavailable, match=f"^{op}: no backend for cpu\n"):
        OTHERS[name]() if name in OTHERS else results_of(name, leaves_of(name))
    op = op.partition(".")[0]
    for ask in (ck.guarantees, ck.contract_id):
        with pytest.raises(ck.errors.BackendUnavailable, match=f"^{op}: no backend for cpu\n"):
            ask(op, "cpu")


def test_a_missing_backend_of_a_gradient_names_the_contract(monkeypatch):
    """No frame of the backward is the public function's."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(6)).requires_grad_()
    y = ck.rms_norm(x, None)
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    with pytest.raises(ck.errors.BackendUnavailable, match=r"^rms_norm: no backend for cpu\n"):
        y.sum().backward()
