"""Bytes of linear_logp among other rows, tokens, layouts, padding, cuts, blocks and settings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import chunks, cpu, exact, op
from cute_kernels.logp.config import CPU
from cute_kernels.logp.tensors import Head
from cute_kernels.runtime import products
from tests import contract
from tests.contract import RowOp, SumOp, same_bytes
from tests.logp import cases
from tests.logp.cases import BF16, DTYPES, FP16, FP32, IGNORED

SEED = 11
#: Device -> (V, D) of the batteries.
SIZES = {"cpu": (200, 40), "cuda": (5003, 520)}
ORDERS = ("chain", "tree")


def drawn(*shape: int, seed: int = 3, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


# ---- rows ---------------------------------------------------------------------------------------

#: What a row op returns: log p and the entropy, or dhidden.
KINDS = ("forward", "dhidden")


def row_op(
    kind: str = "forward",
    dtype: torch.dtype = FP32,
    order: str = "chain",
    device: str = "cpu",
) -> RowOp:
    """A row's target and temperature are made of its own bits: both go where the row goes."""
    vocab, width = SIZES[device]
    weight = (drawn(vocab, width, device=device) * min(1.0, 4 * width**-0.5)).to(dtype)
    offset = drawn(vocab, seed=4, device=device).to(dtype) if order == "chain" else None

    def run(rows):
        raw = rows[:, :2].contiguous().to(FP32).view(torch.int32).to(torch.int64)
        target = (raw[:, 0] // 65536 + raw[:, 1] // 65536) % vocab
        temperature = 0.5 + (raw[:, 1] % 65521).float() / 65521
        leaf = rows.detach().requires_grad_(kind == "dhidden")
        results = ck.linear_logp(
            leaf, weight, target, offset, order=order, softcap=20.0, temperature=temperature,
            return_entropy=True,
        )  # fmt: skip
        if kind == "forward":
            return torch.stack(results, 1)
        return torch.autograd.grad(results, leaf, [temperature * 2, temperature - 1])[0]

    return RowOp(f"{kind} {dtype} {order}", run, width, dtype, device)


def every_kind():
    """Each kind in each dtype, in one of the orders on a CPU; in the other by night."""
    for at, (kind, dtype) in enumerate(itertools.product(KINDS, DTYPES)):
        for order in ORDERS:
            marks = () if order == ORDERS[at % 2] else pytest.mark.nightly
            yield pytest.param(kind, dtype, order, "cpu", marks=marks)
            yield pytest.param(kind, dtype, order, "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("kind", "dtype", "order", "device"), list(every_kind()), ids=str)
def test_battery(kind, dtype, order, device):
    rows = {"cpu": 150, "cuda": 700}[device]
    assert contract.check_rows(row_op(kind, dtype, order, device), rows, SEED) > 60


@pytest.mark.parametrize(
    ("kind", "dtype", "order", "device", "sizes"),
    [
        ("forward", BF16, "tree", "cpu", range(1, 151)),
        ("dhidden", FP32, "tree", "cpu", [*range(1, 130, 4), 15, 16, 63, 64, 127, 128, 150]),
        pytest.param("dhidden", BF16, "chain", "cpu", range(1, 513), marks=pytest.mark.nightly),
        # Blocks of 64 rows, and 256 at once.
        ("forward", FP32, "chain", "cpu", [*range(1, 300, 7), 255, 256, 257, 319, 321, 512, 600]),
        *(
            pytest.param("forward", BF16, order, "cuda", range(1, 301), marks=pytest.mark.gpu)
            for order in ORDERS
        ),
    ],
)
def test_every_number_of_rows(kind, dtype, order, device, sizes):
    target = row_op(kind, dtype, order, device)
    assert contract.check_population(target, max(sizes), SEED, sizes) == len(sizes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_of_tokens(dtype, order):
    """(2, 3), (3, 2), (1, 6), transposed, with padding anywhere: one set of bytes."""
    case = cases.Case(7, 6, 48, 1040, 1087, dtype, order, True, 3.0, "tensor", False, 0.3)
    x = cases.inputs_of(case)
    want = cases.run(case, x)

    def shaped(view):
        tokens = [view(t) for t in (x.target, x.temperature)]
        of = x._replace(hidden=view(x.hidden), target=tokens[0], temperature=tokens[1])
        return cases.run(case, of._replace(upstream=tuple(map(view, x.upstream))))

    for shape in ((2, 3), (3, 2), (1, 6), (1, 2, 3), (6,)):
        got = shaped(lambda t, shape=shape: t.view(*shape, *t.shape[1:]))
        assert got.logp.shape == got.entropy.shape == got.hidden.shape[:-1] == shape
        assert all(map(same_bytes, (t.reshape_as(e) for t, e in zip(got, want, strict=True)), want))
    # Transposed tokens, as of a batch-first model's [S, B, D].
    got = shaped(lambda t: t.view(2, 3, *t.shape[1:]).transpose(0, 1))
    for a, e in zip(got[:3], want[:3], strict=True):
        assert same_bytes(a.transpose(0, 1).reshape_as(e), e)


def test_one_token_without_a_dimension():
    """hidden [D] and a target of no dimension, as of one sampled token."""
    hidden, weight, target = drawn(1, 16), drawn(50, 16), torch.tensor([7])
    want = ck.linear_logp(hidden, weight, target)
    leaf, logits = hidden[0].requires_grad_(), drawn(50).requires_grad_()
    got = ck.linear_logp(leaf, weight, target[0])
    assert got.shape == () and same_bytes(got.detach(), want[0])
    logp, entropy = ck.log_probs(logits, target[0], return_entropy=True)
    assert logp.shape == entropy.shape == ()
    (got + logp + entropy).backward()
    assert leaf.grad.shape == (16,) and logits.grad.shape == (50,)


@pytest.mark.parametrize("dirty", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_with_ignored_tokens_anywhere(dtype, dirty):
    """log p 0, entropy 0, and gradients of exactly +0 in their rows; none of it in others, dW too.

    Padding is put between tokens in whole groups of 16, so that dW is the same chain.
    """
    case = cases.Case(9, 32, 40, 129, 140, dtype, "chain", True, 0.0, "tensor", False, 0.3)
    x = cases.inputs_of(case)
    want = cases.run(case, x)
    for widths in ((16, 0, 0), (0, 0, 5), (32, 16, 1), (0, 48, 37)):

        def around(t, fill, widths=widths):
            a, b, c = (t.new_full((n, *t.shape[1:]), fill) for n in widths)
            return torch.cat([a, t[:16], b, t[16:], c])

        target = around(x.target, IGNORED)
        upstream = tuple(around(t, math.nan) for t in x.upstream)
        given = x._replace(hidden=around(x.hidden, dirty), target=target, upstream=upstream)
        got = cases.run(case, given._replace(temperature=around(x.temperature, 1)))
        real = target != IGNORED
        for name in ("logp", "entropy", "hidden"):
            t = getattr(got, name)
            assert same_bytes(t[real], getattr(want, name)), name
            assert not contract.bits(t[~real]).any(), name
        assert same_bytes(got.weight, want.weight)
        assert not got.bias.isnan().any()


def test_an_ignored_index_that_is_an_entry():
    """ignore_index may be any number, as in torch's cross_entropy."""
    weight, hidden, target = drawn(50, 16), drawn(6, 16), torch.tensor([7, 3, 7, 0, 49, 7])
    got = ck.linear_logp(hidden, weight, target, ignore_index=7)
    want = ck.linear_logp(hidden, weight, target)
    assert same_bytes(got[target != 7], want[target != 7]) and not got[target == 7].any()
    wide = ck.linear_logp(hidden, weight, target.int(), ignore_index=2**40)
    assert same_bytes(wide, want)


# ---- tokens: dW into main_grad ------------------------------------------------------------------


def dw_op(dtype: torch.dtype, order: str, tokens: int, device: str = "cpu") -> SumOp:
    vocab, width = SIZES[device]
    hidden = drawn(tokens, width, seed=1, device=device).to(dtype)
    leaf = drawn(vocab, width, device=device).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(2))
    target = target.to(device)
    target[::5], hidden[::5] = IGNORED, math.nan
    upstream = [drawn(tokens, seed=seed, device=device) for seed in (5, 6)]

    def run(state, pieces):
        state = state.clone()
        options = {"order": order, "main_grad": state, "return_entropy": True}
        for piece in pieces:
            results = ck.linear_logp(hidden[piece], leaf, target[piece], **options)
            torch.autograd.backward(results, [g[piece] for g in upstream])
        assert leaf.grad is None
        return state

    start = drawn(vocab, width, seed=7, device=device)
    return SumOp(f"dW {dtype} {order}", run, tokens, start)


def streams():
    """(dtype, order, tokens, device); by night each of them on a CPU."""
    by_day = {(FP32, "chain", 200), (FP32, "tree", 33), (BF16, "tree", 200), (FP16, "chain", 33)}
    for dtype, order in itertools.product(DTYPES, ORDERS):
        for tokens in (200, 33):
            marks = () if (dtype, order, tokens) in by_day else pytest.mark.nightly
            yield pytest.param(dtype, order, tokens, "cpu", marks=marks)
        yield pytest.param(dtype, order, 600, "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("dtype", "order", "tokens", "device"), list(streams()))
def test_splits_of_the_tokens(dtype, order, tokens, device):
    assert contract.check_splits(dw_op(dtype, order, tokens, device), SEED) >= 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_main_grad_is_the_gradient(dtype):
    """Into zeros, and rounded to the dtype, it is weight.grad but for the chain's roundings."""
    case = cases.Case(9, 17, 40, 129, 140, dtype, "tree", True, 0.0, "one", True, 0.3)
    x = cases.inputs_of(case)
    want, state = cases.run(case, x), torch.zeros(140, 40)
    got = cases.run(case, x, main_grad=state)
    assert got.weight is None and same_bytes(got.hidden, want.hidden)
    assert same_bytes(got.bias, want.bias)
    exact_, bounds = cases.exact(case, x)
    assert ((state - exact_.weight).abs() <= bounds.weight * 1.01 + 2.0**-60).all()
    before = state.clone()
    before[129:] = -0.0
    cases.run(case, x, main_grad=before)
    assert same_bytes(before[129:], torch.full((11, 40), -0.0))  # nobody wrote there


# ---- strides ------------------------------------------------------------------------------------


def strided(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensor column-major, and as every second column and row of NaN."""
    room = torch.full((2 * t.shape[0], 2 * t.shape[1] + 1), math.nan, dtype=t.dtype)
    return [t.mT.contiguous().mT, room[::2, 1::2].copy_(t)]


@pytest.mark.parametrize("name", ["hidden", "weight", "main_grad"])
@pytest.mark.parametrize("order", ORDERS)
def test_strides(name, order):
    case = cases.Case(5, 17, 48, 1040, 1040, BF16, order, True, 0.0, "one", True, 0.3)
    x, start = cases.inputs_of(case), drawn(1040, 48)
    state = start.clone()
    want = cases.run(case, x, main_grad=state)
    for view in strided(start if name == "main_grad" else getattr(x, name)):
        given = {"hidden": x.hidden, "weight": x.weight, "main_grad": start.clone()} | {name: view}
        leaves = [given[key].detach().requires_grad_() for key in ("hidden", "weight")]
        results = ck.linear_logp(
            *leaves, x.target, x.bias, order=order, return_entropy=True,
            main_grad=given["main_grad"],
        )  # fmt: skip
        torch.autograd.backward(results, x.upstream)
        for got, expected in zip((*results, leaves[0].grad), want, strict=False):
            assert same_bytes(got.detach(), expected)
        assert same_bytes(given["main_grad"], state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_half_logits_and_of_any_strides(dtype):
    logits, target = drawn(6, 50).to(dtype), torch.arange(6)
    want = ck.log_probs(logits, target)
    for other in (logits.float(), *strided(logits)):
        assert same_bytes(ck.log_probs(other, target), want)
    folded = ck.log_probs(logits.view(2, 3, 50), target.view(2, 3))
    assert folded.shape == (2, 3) and same_bytes(folded.view(6), want)
    expected = torch.log_softmax(logits.double(), 1).gather(1, target[:, None])[:, 0]
    assert (want - expected).abs().max() < 1e-5


# ---- the vocabulary -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 1024, 1030])
def test_what_padding_of_the_vocabulary_holds_never_shows(vocab, dtype, order):
    """Nor how much of it there is: NaN or zeros, none or 60 rows.  Its gradients are +0."""
    plain = cases.Case(5, 5, 40, vocab, vocab, dtype, order, True, 3.0, "tensor", True, 0.3)
    base = cases.inputs_of(plain._replace(rows=vocab + 60))
    results = []
    for rows, dirty in ((0, 0.0), (1, math.nan), (60, math.nan), (60, math.inf), (17, 1e4)):
        weight, bias = base.weight[: vocab + rows].clone(), base.bias[: vocab + rows].clone()
        weight[vocab:], bias[vocab:] = dirty, dirty
        case = plain._replace(rows=vocab + rows)
        results.append(cases.run(case, base._replace(weight=weight, bias=bias)))
    want = results[0]
    for got in results:
        assert all(map(same_bytes, got[:3], want[:3]))
        for a, e in ((got.weight, want.weight), (got.bias, want.bias)):
            assert same_bytes(a[:vocab], e) and not contract.bits(a[vocab:]).any()


def parts_of(x: cases.Inputs, case: cases.Case, cuts: list[int]) -> list[torch.Tensor]:
    rows = op.rows_of(x.target, x.temperature, 1.0, IGNORED, case.vocab)
    parts = []
    for a, b in itertools.pairwise([0, *cuts, case.rows]):
        bias = None if x.bias is None else x.bias[a:b].clone()
        head = Head(x.weight[a:b].clone(), bias, a, case.vocab, case.softcap, case.order)
        parts.append(cpu.states(x.hidden, head, rows, True))
    return [rows, *parts]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cut_at_any_multiple_of_16_is_the_same(dtype, order):
    """Single cuts, and drawn sets of cuts; merged in any order."""
    case = cases.Case(5, 60, 33, 1040, 1087, dtype, order, True, 0.0, "tensor", False, 0.3)
    x = cases.inputs_of(case)
    want = cases.run(case, x)
    generator = torch.Generator().manual_seed(1)
    found = [[at] for at in range(16, case.rows, 80)]
    for _ in range(15):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        at = torch.randperm(case.rows // 16, generator=generator)[:count].add(1) * 16
        found.append(sorted(set(at.tolist())))
    for cuts in found:
        rows, *parts = parts_of(x, case, cuts)
        order_of = torch.randperm(len(parts), generator=generator).tolist()
        logp, _, entropy = exact.finish(torch.cat([parts[i] for i in order_of]), rows)
        assert same_bytes(logp, want.logp) and same_bytes(entropy, want.entropy), cuts


def test_a_cut_elsewhere_shows():
    """The control: a unit that is cut is two units, of other roundings."""
    case = cases.Case(5, 17, 33, 1040, 1040, FP32, "chain", False, 0.0, "tensor", False, 0.3)
    x = cases.inputs_of(case)
    rows, *parts = parts_of(x, case, [8, 24, 100])
    whole, merged = exact.merge(parts_of(x, case, [])[1]), exact.merge(torch.cat(parts))
    assert not same_bytes(merged, whole)
    got, want = (exact.finish(state[None], rows)[0] for state in (merged, whole))
    assert (got - want).abs().max() < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("vocab", [131072, 151936, 2**19])
def test_vocabularies_of_models(vocab):
    """Against float64, and cut into eight; uniform logits have log p of -ln V."""
    case = cases.Case(5, 3, 16, vocab, vocab, BF16, "tree", False, 0.0, "tensor", False, 1.0)
    x = cases.inputs_of(case)
    got = cases.run(case, x)
    assert max(cases.shares(got, *cases.exact(case, x)).values()) <= 1
    rows, *parts = parts_of(x, case, [vocab // 128 * 16 * i for i in range(1, 8)])
    logp, _, entropy = exact.finish(torch.cat(parts[::-1]), rows)
    assert same_bytes(logp, got.logp) and same_bytes(entropy, got.entropy)
    flat = ck.linear_logp(torch.zeros(1, 16, dtype=BF16), x.weight, torch.tensor([vocab - 1]))
    assert abs(flat.item() + math.log(vocab)) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_log_probs_of_these_logits_is_linear_logp(dtype, order, softcap):
    """Of the fp32 sums, and gradients of the logits as they are before their rounding."""
    case = cases.Case(5, 17, 33, 1040, 1087, dtype, order, False, softcap, "tensor", True, 0.3)
    x = cases.inputs_of(case)
    want = cases.run(case, x)
    logits = products.sums(x.hidden, x.weight, order).requires_grad_()
    options = {"softcap": softcap, "temperature": x.temperature, "vocab_size": case.vocab}
    logp, entropy = ck.log_probs(logits, x.target, return_entropy=True, **options)
    assert same_bytes(logp.detach(), want.logp) and same_bytes(entropy.detach(), want.entropy)
    torch.autograd.backward((logp, entropy), x.upstream)
    masked, again = x.target == IGNORED, logits.detach().clone()
    again[:, case.vocab :], again[masked] = math.nan, math.nan
    results = ck.log_probs(again.requires_grad_(), x.target, return_entropy=True, **options)
    torch.autograd.backward(results, x.upstream)
    assert same_bytes(results[0], logp) and same_bytes(results[1], entropy)
    assert same_bytes(again.grad, logits.grad)
    assert not contract.bits(logits.grad[:, case.vocab :]).any()
    assert not contract.bits(logits.grad[masked]).any()
    hidden = torch.where(masked[:, None], 0.0, x.hidden)
    assert same_bytes(products.product(logits.grad.to(dtype).mT, hidden.mT), want.weight)


# ---- temperature, blocks, settings --------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 3, 1e-3])
def test_a_temperature_is_one_whether_a_number_or_a_tensor(temperature):
    """fp32 of it; and a bf16 tensor's is that of its values."""
    case = cases.Case(5, 17, 33, 1000, 1000, BF16, "chain", True, 0.0, "one", True, 0.3)
    x = cases.inputs_of(case)
    for dtype in (FP32, BF16):
        each = torch.full((17,), temperature, dtype=dtype)
        number = temperature if dtype == FP32 else each[0].item()
        pair = [cases.run(case, x._replace(temperature=t)) for t in (each, number)]
        assert all(map(same_bytes, *pair))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_blocks_of_tokens_do_not_show(monkeypatch, dtype, order):
    """dhidden in blocks of 16 tokens and dW in a pass of its own, as for a large batch."""
    case = cases.Case(5, 100, 33, 1040, 1087, dtype, order, True, 0.0, "tensor", True, 0.3)
    x, seen, true = cases.inputs_of(case), [], chunks.Pass.slice_tokens
    want, whole = cases.run(case, x), torch.zeros(1087, 33)
    cases.run(case, x, main_grad=whole)
    monkeypatch.setattr(
        chunks.Pass, "slice_tokens", lambda self, some: seen.append(some) or true(self, some)
    )
    for workspace in (1 << 10, 1 << 14):
        monkeypatch.setattr(chunks, "WORKSPACE", workspace)
        assert all(map(same_bytes, cases.run(case, x), want))
        state = torch.zeros(1087, 33)
        cases.run(case, x, main_grad=state)
        assert same_bytes(state, whole)
    assert len(seen) > 10


def test_blocks_of_the_vocabulary_are_part_of_the_plan():
    """1024 columns from a leaf's start: a number of the contract, as dhidden's bits show it."""
    names = {"run_to_run", "batch_invariant", "split_invariant", "tp_invariant"}
    assert CPU.columns == 1024 and set(ck.guarantees("linear_logp")) == names
    for name in ("linear_logp", "log_probs"):
        assert ck.contract_id(name, "cpu").startswith(f"{name}/cpu/") and ck.guarantees(name)


# ---- values at the edges ------------------------------------------------------------------------


def test_a_certain_token_has_log_p_of_zero():
    """Clamped: no rounding makes a probability above 1; and the sum over all tokens is 1."""
    weight = torch.zeros(64, 8)
    weight[3] = 200.0
    for scale in (0.01, 0.1, 0.123, 1.0, 3.0):
        hidden = torch.full((4, 8), scale)
        logp, entropy = ck.linear_logp(hidden, weight, torch.full((4,), 3), return_entropy=True)
        assert (logp <= 0).all() and (entropy >= 0).all()
    hidden, head = drawn(1, 32).expand(500, 32), drawn(500, 32) * 0.3
    p = ck.linear_logp(hidden, head, torch.arange(500)).double().exp()
    assert abs(p.sum().item() - 1) < 1e-6
    one = ck.linear_logp(drawn(3, 8), drawn(1, 8), torch.zeros(3, dtype=torch.long))
    assert (one <= 0).all() and (one >= -(2.0**-22)).all()


def test_logits_far_apart_and_out_of_range():
    rows = [
        ([0.0, -1e5, -math.inf, 3.0], True),
        ([1e6, 1e6, 0.0, -1e6], True),
        ([-1e6, -1e6, -1e6, -math.inf], True),
        ([math.nan, 0.0, 0.0, 0.0], False),
        ([math.inf, 0.0, 0.0, 0.0], False),
        ([-math.inf] * 4, False),
        ([3e38, 0.0, 0.0, 0.0], False),
    ]
    logits = torch.tensor([row for row, _ in rows])
    for chosen in range(4):
        target = torch.full((len(rows),), chosen)
        got = ck.log_probs(logits, target)
        want = torch.log_softmax(logits.double(), 1).gather(1, target[:, None])[:, 0]
        for i, (_, finite) in enumerate(rows):
            if not finite:
                assert got[i].isnan()
            elif want[i].isinf():
                assert got[i] == want[i]
            else:
                assert (got[i] - want[i]).abs() <= 1e-6 * want[i].abs() + 1e-6


def test_fp16_gradients_do_not_overflow_within():
    """A gradient beyond fp16 is inf where it belongs, and elsewhere nothing is."""
    case = cases.Case(5, 5, 33, 100, 100, FP16, "chain", False, 0.0, "one", False, 0.3)
    x = cases.inputs_of(case)
    upstream = tuple(t.clone() for t in x.upstream)
    upstream[0][2] = 1e9
    got, want = cases.run(case, x._replace(upstream=upstream)), cases.run(case, x)
    rest = torch.tensor([0, 1, 3, 4])
    assert same_bytes(got.hidden[rest], want.hidden[rest])
    assert not got.hidden[2].isfinite().all()
