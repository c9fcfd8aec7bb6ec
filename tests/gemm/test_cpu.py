"""The CPU backend under the contract battery, its accuracy, and the mutants that both kill."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import BackendUnavailable
from cute_kernels.gemm import cpu, op
from tests import contract
from tests.contract import ContractViolation, RowOp, SumOp
from tests.oracles import gemm as reference

N, K, SEED = 200, 150, 11
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(N, K, generator=generator).to(dtype)
    return weight, torch.randn(N, generator=generator).to(dtype)


def linear_op(dtype: torch.dtype = torch.float32, bias: bool = True) -> RowOp:
    weight, b = weights(dtype)
    run = lambda rows: op.linear(rows, weight, b if bias else None, None, "chain")  # noqa: E731
    return RowOp(f"linear {dtype}", run, K, dtype)


def dx_op(dtype: torch.dtype = torch.float32) -> RowOp:
    weight, _ = weights(dtype)
    return RowOp(f"dx {dtype}", lambda dy: op.linear_dx(dy, weight, "chain"), N, dtype)


def dw_op(dtype: torch.dtype, tokens: int, start: torch.Tensor) -> SumOp:
    generator = torch.Generator().manual_seed(tokens)
    dy = torch.randn(tokens, 24, generator=generator).to(dtype)
    x = torch.randn(tokens, 40, generator=generator).to(dtype)

    def run(state, pieces):
        state, weight = state.clone(), torch.zeros(24, 40, dtype=dtype).requires_grad_()
        # All forwards run before the first backward, as a pipeline schedule may have it.
        outputs = [ck.linear(x[piece], weight, main_grad=state) for piece in pieces]
        for piece, y in zip(pieces, outputs, strict=True):
            y.backward(dy[piece])
        return state

    return SumOp(f"dW {dtype}", run, tokens, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [linear_op, dx_op])
def test_battery(make, dtype):
    assert contract.check_rows(make(dtype), 150, SEED) > 60


def test_every_number_of_rows():
    """Every M in 1..512, byte for byte the rows it has among 512."""
    assert contract.check_population(linear_op(), 512, SEED, range(1, 513)) == 512


@pytest.mark.parametrize("tokens", [200, 1, 15, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits(dtype, tokens):
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(24, 40, generator=generator)
    target = dw_op(dtype, tokens, start)
    if tokens <= target.cut:
        # Fewer tokens than a block: one piece, the same kernel, right value.
        whole = target.run(start, [slice(0, tokens)])
        assert not contract.same_bytes(whole, start)
        return
    assert contract.check_splits(target, SEED) >= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accuracy(dtype):
    generator = torch.Generator().manual_seed(9)
    a = torch.randn(96, 1000, generator=generator).to(dtype)
    b = torch.randn(72, 1000, generator=generator).to(dtype)
    exact, bound = reference.gemm(a, b), reference.error_bound(a, b)
    contract.check_accuracy(cpu.gemm(a, b, None, None), exact, bound, 0.01)
    short = cpu.gemm(a[:, :-1], b[:, :-1], None, None)
    with pytest.raises(AssertionError, match="bound"):
        contract.check_accuracy(short, exact, bound, 0.01)


def test_bias_is_added_before_the_one_rounding():
    """1 + 2⁻⁸ needs the fp32 sum: rounding first to bf16 would lose the product or the bias."""
    x = torch.tensor([[1.0]]).bfloat16()
    weight = torch.tensor([[2.0**-8]]).bfloat16()
    bias = torch.tensor([1.0 + 2.0**-7]).bfloat16()
    exact = 1 + 2.0**-7 + 2.0**-8
    got = op.linear(x, weight, bias, None, "chain").item()
    assert got == torch.tensor(exact).bfloat16().item()
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    weight = torch.tensor([[1.0, 1.0]]).bfloat16()
    bias = torch.tensor([2.0**-9]).bfloat16()
    assert op.linear(x, weight, bias, None, "chain").item() == 1 + 2.0**-8 - 2.0**-8
    bias = torch.tensor([2.0**-8]).bfloat16()
    assert op.linear(x, weight, bias, None, "chain").item() == 1 + 2.0**-7


def test_thread_counts_keep_their_own_bits():
    """For a thread count that stays the same, the battery holds; both counts are tried."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            contract.check_population(linear_op(), 130, SEED, [1, 63, 64, 65, 129])
    finally:
        torch.set_num_threads(before)


def test_a_blas_that_depends_on_the_row_is_refused(monkeypatch):
    """The self-proof is not for show: a product with a row-dependent order fails the call."""
    true_mm = cpu.mm

    def mm(a, b, out=None):
        result = true_mm(a, b)
        if len(result) > 1:
            result[1::2] = true_mm(a.flip(1), b.flip(0))[1::2]
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(cpu, "mm", mm)
    cpu._prove_row_position.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="batch_invariant"):
            linear_op().run(torch.randn(4, K))
    finally:
        cpu._prove_row_position.cache_clear()


def test_blocks_that_follow_m_are_killed(monkeypatch):
    """Mutant: one product over all rows at once, as torch.mm has it."""

    def whole(a, b, bias, order, team, out=None):
        out = torch.mm(a.float(), b.float().mT)
        return (out if bias is None else out + bias.float()).to(a.dtype)

    monkeypatch.setattr(cpu, "_blocked", whole)
    with pytest.raises(ContractViolation):
        contract.check_rows(linear_op(), 150, SEED)
        contract.check_population(linear_op(), 512, SEED, range(1, 513))


@pytest.mark.parametrize("same", [True, False])
def test_four_blocks_at_once_only_where_the_bits_agree(monkeypatch, same):
    """A BLAS whose wide products differ is noticed, and then every block goes alone."""
    true_mm, sizes = cpu.mm, set()

    def mm(a, b, out=None):
        sizes.add(len(a))
        result = true_mm(a, b)
        if len(a) >= 256 and not same:
            result = true_mm(a.flip(1), b.flip(0))
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(cpu, "mm", mm)
    cpu._wide_is_same.cache_clear()
    try:
        target = linear_op()
        target.run(target.rows(300, SEED))
        sizes.clear()
        contract.check_population(target, 600, SEED, [1, 63, 255, 256, 257, 320, 512, 600])
    finally:
        cpu._wide_is_same.cache_clear()
    assert (256 in sizes) == same and 64 in sizes


def test_sum_then_add_is_killed(monkeypatch):
    """Mutant: the piece's product first, then one add into main_grad."""

    def add(a, b, accumulator):
        return accumulator.add_(torch.mm(a.float(), b.float().mT))

    monkeypatch.setattr(cpu, "_accumulate", add)
    target = dw_op(torch.float32, 200, torch.randn(24, 40))
    with pytest.raises(ContractViolation):
        contract.check_splits(target, SEED)


def resumed(dirty: float) -> torch.Tensor:
    """Accumulate 21 tokens into a main_grad; the first 16 are ``dirty`` in some columns."""
    generator = torch.Generator().manual_seed(8)
    dy, x = torch.randn(21, 24, generator=generator), torch.randn(21, 40, generator=generator)
    dy[:16, 3], x[:16, 7] = dirty, dirty
    state = torch.zeros(24, 40)
    op.linear_dw_(dy, x, state, "chain")
    return state


def test_the_tail_of_a_token_group_counts_as_zeros():
    """What the group before left in the buffers is not multiplied again, NaN and Inf included."""
    generator = torch.Generator().manual_seed(8)
    dy, x = torch.randn(21, 24, generator=generator), torch.randn(21, 40, generator=generator)
    whole, cut = torch.zeros(24, 40), torch.zeros(24, 40)
    op.linear_dw_(dy, x, whole, "chain")
    for piece in (slice(0, 16), slice(16, 21)):
        op.linear_dw_(dy[piece], x[piece], cut, "chain")
    assert contract.same_bytes(whole, cut)
    assert (whole.double() - dy.double().mT @ x.double()).abs().max() < 1e-5
    for dirty in (float("nan"), float("inf"), 1e30):
        got = resumed(dirty)
        clean = torch.ones(24, 40, dtype=torch.bool)
        clean[3], clean[:, 7] = False, False
        assert contract.same_bytes(got[clean], whole[clean])


class Buffers:
    """Watches what the BLAS is given; ``left`` in the last rows of a group that is not whole."""

    def __init__(self, monkeypatch):
        self.seen, self.true = [], cpu.mm
        monkeypatch.setattr(cpu, "mm", self)

    def __call__(self, a, b, out=None, *, add=False):
        self.seen.append((a.clone(), b.clone(), [t.data_ptr() % 64 for t in (a, b)], a.stride()))
        return self.true(a, b, out, add=add)


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
def test_the_blas_sees_one_alignment(monkeypatch, offset):
    """A weight that needs no padding is used where it lies only if it is aligned like a copy."""
    memory = torch.randn(256 * 32 + 32, generator=torch.Generator().manual_seed(4))
    memory = memory[(-memory.data_ptr() // 4) % 16 :]  # from an address of 64 bytes on
    weight = memory[offset : offset + 256 * 32].view(256, 32)
    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(5))
    want = op.linear(x, weight.clone(), None, None, "chain")
    watched = Buffers(monkeypatch)
    assert contract.same_bytes(op.linear(x, weight, None, None, "chain"), want)
    assert {tuple(index) for *_, index, _ in watched.seen} == {(0, 0)}
    assert {stride for *_, stride in watched.seen} == {(32, 1)}


def test_main_grad_is_added_to_at_one_alignment(monkeypatch):
    memory = torch.zeros(24 * 40 + 17)
    state = memory[1 + (-memory.data_ptr() // 4) % 16 :][: 24 * 40].view(24, 40)
    assert state.data_ptr() % 64
    recorded, true_mm = [], cpu.mm

    def mm(a, b, out=None, *, add=False):
        recorded.append(out.data_ptr() % 64)
        return true_mm(a, b, out, add=add)

    monkeypatch.setattr(cpu, "mm", mm)
    generator = torch.Generator().manual_seed(8)
    dy, x = torch.randn(21, 24, generator=generator), torch.randn(21, 40, generator=generator)
    op.linear_dw_(dy, x, state, "chain")
    assert set(recorded) == {0} and state.all()


def test_column_sum_in_order():
    x = torch.randn(300, 37, generator=torch.Generator().manual_seed(1))
    exact = x.double().sum(0)
    got = cpu.column_sum(x)
    assert ((got - exact).abs() <= 300 * 2.0**-24 * x.double().abs().sum(0)).all()
    assert contract.same_bytes(got, cpu.column_sum(x.mT.contiguous().mT))


@pytest.mark.parametrize(("m", "wide"), [(1024, True), (1000, True), (5, False)])
def test_a_product_multiplies_once(monkeypatch, m, wide):
    """A BLAS gets each element once, in blocks: it is within 2x of torch.mm at 1024 x 4096."""
    true_mm, blocks = cpu.mm, []

    def mm(a, b, out=None):
        blocks.append((*a.shape, b.shape[1]))
        return true_mm(a, b, out)

    a, b = torch.randn(m, 256), torch.randn(512, 256)
    cpu.gemm(a, b, None, None)  # proves the BLAS
    monkeypatch.setattr(cpu, "mm", mm)
    cpu.gemm(a, b, None, None)
    padded = -(-m // cpu.CPU.rows) * cpu.CPU.rows
    assert sum(rows * k * n for rows, k, n in blocks) == padded * 256 * 512
    assert wide <= any(rows == cpu.CPU.wide for rows, _, _ in blocks)
    assert len(blocks) <= -(-m // cpu.CPU.wide) + cpu.CPU.wide // cpu.CPU.rows
