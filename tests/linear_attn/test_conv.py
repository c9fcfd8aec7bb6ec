"""The causal convolution on a CPU: values, bytes of parts and packs, gradients, what is refused."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, DtypeError, ShapeError
from cute_kernels.linear_attn import config, cpu
from cute_kernels.linear_attn.tensors import Conv, ConvGradients
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from .cases import BF16, CASES, FP32, Case, Operands, one_sum_a_micro_batch, operands

FP16 = torch.float16
TAPS, BIAS = drawn(8, 4, seed=1), drawn(8, seed=2)


def inputs(length: int, batch: int = 1, dtype=BF16, channels: int = 40, width: int = 4) -> Operands:
    """x [B, D, T] in channel-last memory, and what goes with it."""
    case = Case((length,), batch, channels, width, dtype)
    o = operands(case)
    return o._replace(x=o.x.view(batch, length, channels).mT, dy=o.dy.view(batch, length, -1).mT)


def conv(o: Operands, part: slice = slice(None), initial=None, **options):
    """(rows of a part of the sequences, their last inputs)."""
    initial = o.initial if initial is None else initial
    return ck.causal_conv1d_fn(o.x[..., part], o.weight, o.bias, initial, True, "silu", **options)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", config.CONV_WIDTHS)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_against_float64(dtype, width, activation):
    o = inputs(23, 2, dtype, width=width)
    y = ck.causal_conv1d_fn(o.x, o.weight, o.bias, o.initial, activation=activation)
    exact = oracle.conv(o.x, o.weight, o.bias, o.initial, activation is not None)
    terms = oracle.conv(o.x.abs(), o.weight.abs(), o.bias.abs(), o.initial.abs(), False)
    assert ((y.double() - exact).abs() <= oracle.conv_bound(exact, terms, dtype)).all()
    assert y.dtype == dtype and y.mT.is_contiguous()


@pytest.mark.parametrize("name", CASES)
def test_gradients_against_float64(name):
    """Of a batch and of a pack: dx, and the sums onto main_grads that are not zero."""
    case, o = CASES[name], operands(CASES[name], seed=3)
    leaves = [None if t is None else t.double().requires_grad_() for t in o[:4]]
    x, weight, bias, initial = leaves
    rows = [
        oracle.conv(
            x[first:end].mT[None], weight, bias,
            None if initial is None else initial[s, None], case.silu,
        )[0].mT
        for s, (first, end) in enumerate(case.sequences.bounds()) if end > first
    ]  # fmt: skip
    exact = torch.cat(rows)
    exact.backward(o.dy[: len(exact)].double())
    start = drawn(case.channels, case.width, dtype=FP32), drawn(case.channels, dtype=FP32)
    sums = [t.clone() for t in start]
    dx = torch.full_like(o.x, float("nan"))
    d_initial = None if initial is None else torch.full_like(o.initial, float("nan"))
    gradients = ConvGradients(dx, *sums, d_initial)
    cpu.conv_backward(o.dy, Conv(*o[:4]), case.sequences, case.silu, gradients)
    eps = torch.finfo(case.dtype).eps
    assert torch.equal(dx[len(exact) :], torch.zeros_like(dx[len(exact) :]))
    assert (dx.double() - x.grad).abs().max() <= 2 * eps * x.grad.abs().max()
    grads = weight.grad, o.dy.new_zeros(1) if bias is None else bias.grad
    for total, before, grad in zip(sums, start, grads, strict=True):
        if grad.numel() > 1:
            error = (total.double() - before.double() - grad).abs().max()
            assert error <= 2.0**-21 * (grad.abs().max() + 1)
    if initial is not None:
        assert (d_initial.double() - initial.grad).abs().max() <= 2 * eps * initial.grad.abs().max()


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (2, 3, 20), (64, 65), tuple(range(1, 70))], ids=str)
def test_parts_and_single_rows_have_the_bytes_of_the_whole(cuts):
    o = inputs(70, 2)
    whole, last = conv(o)
    parts, state = [], o.initial
    for first, end in zip((0, *cuts), (*cuts, 70), strict=True):
        part, state = conv(o, slice(first, end), state)
        parts.append(part)
    assert same_bytes(torch.cat(parts, 2), whole) and same_bytes(state, last)


@pytest.mark.parametrize("length", [3, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_updates_have_the_bytes_of_the_whole(length, rows):
    """Slots in another order, a state longer than the taps, several rows at once."""
    o = inputs(21, 3)
    whole, _ = conv(o, initial=torch.zeros_like(o.initial))
    states = torch.full((5, 40, length), float("nan"), dtype=BF16)
    slots = torch.tensor([4, 0, 2])
    states[slots] = 0
    out = []
    for t in range(0, 21, rows):
        x = o.x[..., t] if rows == 1 else o.x[..., t : t + rows]
        y = ck.causal_conv1d_update(x, states, o.weight, o.bias, "silu", conv_state_indices=slots)
        out.append(y.view(3, 40, rows))
    assert same_bytes(torch.cat(out, 2), whole)
    assert same_bytes(states[slots], o.x[..., -length:]) and states[[1, 3]].isnan().all()


def packed(o: Operands, lengths: tuple[int, ...], filling: float) -> tuple[torch.Tensor, ...]:
    """A pack of the first sequence among others that are ``filling``, and its offsets."""
    others = torch.full((1, 40, max(lengths)), filling, dtype=BF16)
    at = len(lengths) // 2
    pieces = [o.x[:1] if i == at else others[..., :n] for i, n in enumerate(lengths)]
    behind = others[..., :5]
    return torch.cat([*pieces, behind], 2), torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("lengths", [(3, 70, 2), (0, 64, 70, 0, 9), (70,)], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_a_sequence_has_its_bytes_in_a_pack_beside_nan(lengths, kind):
    """Forward, dx and the gradient of its state; rows behind the last sequence are 0."""
    o = inputs(70)
    x, offsets = packed(o, lengths, float("nan"))
    at, count = len(lengths) // 2, len(lengths)
    first, end = offsets[at : at + 2].tolist()
    states = torch.full((count, 40, 3), float("nan"), dtype=BF16)
    states[at] = o.initial[0]
    results = []
    for rows, state, cu in ((o.x, o.initial, None), (x, states, offsets.to(kind))):
        leaves = rows.detach().requires_grad_(), state.detach().requires_grad_()
        y, last = ck.causal_conv1d_fn(
            leaves[0], o.weight, o.bias, leaves[1], True, "silu", cu_seqlens=cu
        )
        part = slice(None) if cu is None else slice(first, end)
        dx, d_state = torch.autograd.grad(y[..., part], leaves, o.dy)
        s = 0 if cu is None else at
        results.append((y[..., part], last[s], dx[..., part], d_state[s]))
        if cu is not None:
            assert not y[..., offsets[-1] :].any() and not dx[..., offsets[-1] :].any()
    assert all(map(same_bytes, *results))


def test_other_strides_have_the_same_bytes():
    o = inputs(9, 2)
    want, _ = conv(o)
    dense, _ = conv(o._replace(x=o.x.contiguous()))
    wide = torch.stack([o.x.mT, o.x.mT], 3)[..., 0].mT
    assert same_bytes(dense, want) and same_bytes(conv(o._replace(x=wide))[0], want)


def sequences_of(rows: torch.Tensor) -> torch.Tensor:
    """Convolution of sequences of 5 rows of 8 channels, one in each row given."""
    y = ck.causal_conv1d_fn(rows.view(-1, 5, 8).mT, TAPS, BIAS, activation="silu")
    return y.mT.reshape(len(rows), 40)


def test_the_battery_of_rows():
    """A sequence is a row: batches, neighbours, NaN among them, strides, repeated calls."""
    op = contract.RowOp("causal_conv1d_fn", sequences_of, width=40, dtype=BF16)
    assert contract.check_rows(op, 70, seed=1) > 50


# ---- sums over rows ------------------------------------------------------------------------------


def accumulated(x: torch.Tensor, offsets: torch.Tensor, groups, o: Operands, dy) -> tuple:
    """main_grads after micro-batches of groups of sequences."""
    mains = drawn(40, 4, seed=5, dtype=FP32), drawn(40, seed=6, dtype=FP32)
    weight, bias = (t.detach().requires_grad_() for t in (o.weight, o.bias))
    for group in groups:
        first, end = offsets[group[0]].item(), offsets[group[-1] + 1].item()
        y = ck.causal_conv1d_fn(
            x[..., first:end], weight, bias, activation="silu",
            cu_seqlens=offsets[group[0] : group[-1] + 2] - first,
            main_grad=mains[0], bias_main_grad=mains[1],
        )  # fmt: skip
        y.backward(dy[..., first:end])
    assert weight.grad is bias.grad is None
    return mains


#: Cuts of five sequences into micro-batches.
GROUPS = ([[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[0, 1, 2], [3], [4]])


def split_invariant() -> bool:
    lengths = torch.tensor([0, 70, 3, 64, 129, 1])
    offsets = lengths.cumsum(0)
    o = inputs(int(offsets[-1]))
    whole = accumulated(o.x, offsets, [[0, 1, 2, 3, 4]], o, o.dy)
    parts = [accumulated(o.x, offsets, groups, o, o.dy) for groups in GROUPS]
    return all(all(map(same_bytes, part, whole)) for part in parts)


def test_gradients_of_weights_are_split_invariant_between_sequences():
    assert split_invariant()


def test_one_sum_a_micro_batch_is_killed():
    with one_sum_a_micro_batch(cpu, "conv_backward", "weight", "bias"):
        assert not split_invariant()


#: Edits of cpu.py.
MUTANTS = {
    "rows of the sequence before": (
        "        rows[:tail] = initial[sequence].mT\n",
        "        rows[:tail] = x[first - tail : first] if first >= tail else 0\n",
    ),
    "the first sequence's state": ("initial[sequence].mT", "initial[0].mT"),
    "the newest input first": ("weight.double().unbind(1)", "weight.double().flip(1).unbind(1)"),
    "a state of the other end": ("= gradient[:tail].mT", "= gradient[-tail:].mT"),
    "a sum of rows that were rounded": ("(of_bias, slope)", "(of_bias, slope.bfloat16().double())"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    with planted(cpu, MUTANTS[name]), pytest.raises(AssertionError):
        test_against_float64(FP32, 4, "silu")
        test_gradients_against_float64("pack")
        test_a_sequence_has_its_bytes_in_a_pack_beside_nan((3, 70, 2), torch.int32)


# ---- what is refused -----------------------------------------------------------------------------

X, W = torch.zeros(2, 8, 5), torch.zeros(8, 4)
OFFSETS = torch.tensor([0, 2, 5])
#: Wrong arguments -> (error, the message's beginning).
REFUSED = {
    "two dimensions": ({"x": X[0]}, ShapeError, "x: expected 3 dimensions [B, D, T]"),
    "another D": ({"weight": W[:4]}, ShapeError, "weight: expected shape [8, W]"),
    "five taps": ({"weight": torch.zeros(8, 5)}, ShapeError, "weight: expected shape [8, W]"),
    "a bias of another D": ({"bias": torch.zeros(4)}, ShapeError, "bias: expected shape [8]"),
    "one state": (
        {"initial_states": torch.zeros(1, 8, 3)}, ShapeError, "initial_states: expected shape [2",
    ),
    "a state of another dtype": (
        {"initial_states": torch.zeros(2, 8, 3).bfloat16()}, DtypeError, "initial_states: expected",
    ),
    "a batch and offsets": ({"cu_seqlens": OFFSETS}, ShapeError, "cu_seqlens: expected batch 1"),
    "no sequence": (
        {"x": X[:1], "cu_seqlens": OFFSETS[:1]}, ShapeError, "cu_seqlens: expected shape [S + 1]",
    ),
    "offsets beyond x": (
        {"x": X[:1], "cu_seqlens": OFFSETS * 2}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "offsets that descend": (
        {"x": X[:1], "cu_seqlens": OFFSETS.flip(0)}, ArgumentValueError, "cu_seqlens: expected",
    ),
    "a negated main_grad of the bias": (
        {"bias": W[:, 0], "bias_main_grad": torch._neg_view(torch.zeros(8))},
        ArgumentValueError, "bias_main_grad: expected memory",
    ),
    "a main_grad of no bias": (
        {"bias_main_grad": torch.zeros(8)}, ArgumentTypeError, "bias_main_grad: expected None",
    ),
    "too many channels": (
        {"x": torch.empty(1, 2**22, 1, device="meta")}, ShapeError, "x: expected a D of at most",
    ),
    "seq_idx": ({"seq_idx": OFFSETS}, ArgumentTypeError, "seq_idx: expected no seq_idx"),
    "an activation": ({"activation": "gelu"}, ArgumentValueError, "activation: expected None"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    changed, error, message = REFUSED[which]
    with pytest.raises(error) as caught:
        ck.causal_conv1d_fn(**{"x": X, "weight": W} | changed)
    assert str(caught.value).startswith(message)


STATE = torch.zeros(2, 8, 3)
UPDATES = {
    "a short state": ({"conv_state": STATE[..., :2]}, ShapeError, "conv_state: expected shape"),
    "another dtype": ({"conv_state": STATE.half()}, DtypeError, "conv_state: expected"),
    "few slots": ({"conv_state": STATE[:1]}, ShapeError, "conv_state: expected at least"),
    **{
        f"slots {i}": ({"conv_state_indices": given}, kind, "conv_state_indices: expected")
        for i, (given, kind) in enumerate(
            (
                (torch.tensor([0.0, 1.0]), DtypeError),
                (torch.tensor([0, 0]), ArgumentValueError),
                (torch.tensor([0, -1]), ArgumentValueError),
                (torch.tensor([0, 99]), ArgumentValueError),
                (torch.tensor([0]), ShapeError),
            )
        )
    },
    "a ring": ({"cache_seqlens": OFFSETS}, ArgumentTypeError, "cache_seqlens: expected no cache"),
}


@pytest.mark.parametrize("which", UPDATES)
def test_an_update_is_refused(which):
    changed, error, message = UPDATES[which]
    with pytest.raises(error) as caught:
        ck.causal_conv1d_update(**{"x": X[..., 0], "conv_state": STATE, "weight": W} | changed)
    assert str(caught.value).startswith(message)


def test_nothing():
    x = torch.zeros(2, 8, 0).requires_grad_()
    y, state = ck.causal_conv1d_fn(x, W, return_final_states=True)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 8, 0) and not state.any()
