"""Cases of linear attention."""

from __future__ import annotations

import torch

from tests.option_table.calls import Cases, call
from tests.option_table.rows import cases, leaf
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32
CHANNELS, LENGTH = 24, 70
OFFSETS = torch.tensor([0, 5, 5, 69], dtype=torch.int32)


def conv(batch: int = 2, bias=None, initial_states=None, width: int = 4, **options):
    """Shares of the bounds that both passes take, of a batch or of a pack."""
    x, weight = leaf(drawn(batch, LENGTH, CHANNELS).mT), leaf(drawn(CHANNELS, width, seed=1))
    bias, states = (None if t is None else leaf(t) for t in (bias, initial_states))
    mains = {n: options[n].clone() for n in ("main_grad", "bias_main_grad") if n in options}
    out = call("causal_conv1d_fn", x, weight, bias, states, **options | mains)
    y, last = out if options.get("return_final_states") else (out, None)
    dy = drawn(batch, LENGTH, CHANNELS, seed=2).mT
    y.backward(dy)
    silu = options.get("activation") is not None
    inputs = [
        None if t is None else t.detach().double().requires_grad_()
        for t in (x, weight, bias, states)
    ]
    exact, terms, tails = reference(inputs, options.get("cu_seqlens"), silu)
    (exact * dy.double()[..., : exact.shape[2]]).sum().backward()
    sizes = [None if t is None else t.abs().detach().requires_grad_() for t in inputs]
    reference(sizes, options.get("cu_seqlens"), False)[0].backward(
        dy.double().abs()[..., : exact.shape[2]]
    )
    shares = {"y": share(y[..., : exact.shape[2]], exact, terms)}
    if last is not None:
        assert torch.equal(last, tails)
    got = x.grad, mains.get("main_grad", weight.grad), None, None
    names = ("dx", "dweight", "dbias", "dstates")
    got = [x.grad, mains.get("main_grad", weight.grad)]
    got += [None if bias is None else mains.get("bias_main_grad", bias.grad)]
    got += [None if states is None else states.grad]
    starts = None, options.get("main_grad"), options.get("bias_main_grad"), None
    for name, actual, leaf_, size, start in zip(names, got, inputs, sizes, starts, strict=True):
        if actual is not None:
            want = leaf_.grad if start is None else leaf_.grad + start
            # SiLU's slope is 1.1 at most.
            shares[name] = share(actual, want, size.grad * 1.2)
    return shares


def share(actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> float:
    """Largest error in parts of its bound."""
    bound = oracle.conv_bound(exact, terms, actual.dtype)
    return ((actual.double() - exact).abs() / bound).max().item()


def reference(inputs, offsets, silu: bool):
    """(rows, sums of the sizes of their terms, last inputs) by the oracle, sequence by sequence."""
    x, weight, bias, states = inputs
    if offsets is None:
        pieces = [
            (x[b : b + 1], None if states is None else states[b : b + 1]) for b in range(len(x))
        ]
    else:
        bounds = list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))
        pieces = [
            (x[..., first:end], None if states is None else states[s : s + 1])
            for s, (first, end) in enumerate(bounds)
        ]
    tail = weight.shape[1] - 1
    rows, sizes, tails = [], [], []
    for piece, state in pieces:
        state = piece.new_zeros(1, CHANNELS, tail) if state is None else state
        if piece.shape[2]:
            rows.append(oracle.conv(piece, weight, bias, state, silu))
            absolute = [None if t is None else t.abs() for t in (piece, weight, bias, state)]
            sizes.append(oracle.conv(*absolute, False).detach())
        tails.append(torch.cat([state, piece], 2)[..., -tail:])
    dim = 0 if offsets is None else 2
    return torch.cat(rows, dim), torch.cat(sizes, dim), torch.cat(tails).bfloat16()


def update(slots: torch.Tensor | None = None, bias=None, activation=None) -> dict[str, float]:
    """The next row of two sequences."""
    states, weight = drawn(3, CHANNELS, 5, seed=3), drawn(CHANNELS, 4, seed=1)
    x, chosen = drawn(2, CHANNELS, seed=4), torch.arange(2) if slots is None else slots
    before = states.clone()
    y = call("causal_conv1d_update", x, states, weight, bias, activation, conv_state_indices=slots)
    history = before[chosen][..., -3:]
    exact = oracle.conv(x[..., None], weight, bias, history, activation is not None)[..., 0]
    sizes = [None if t is None else t.abs() for t in (x[..., None], weight, bias, history)]
    terms = oracle.conv(*sizes, False)[..., 0]
    assert torch.equal(states[chosen], torch.cat([before[chosen], x[..., None]], 2)[..., 1:])
    return {"y": share(y, exact, terms)}


BIAS, STATES = drawn(CHANNELS, seed=5), drawn(2, CHANNELS, 3, seed=6)
TABLE: dict[str, Cases] = {
    "causal_conv1d_fn": cases(
        conv,
        plain={},
        bias={"bias": BIAS},
        silu={"activation": "silu"},
        states={"initial_states": STATES, "return_final_states": True, "activation": "silu"},
        width={"width": 2, "activation": "swish"},
        pack={
            "batch": 1, "cu_seqlens": OFFSETS, "initial_states": drawn(3, CHANNELS, 3, seed=7),
            "bias": BIAS, "return_final_states": True, "activation": "silu",
        },
        main_grad={
            "bias": BIAS, "activation": "silu",
            "main_grad": drawn(CHANNELS, 4, seed=8, dtype=FP32),
            "bias_main_grad": drawn(CHANNELS, seed=9, dtype=FP32),
        },
    ),
    "causal_conv1d_update": cases(
        update,
        plain={},
        all={"slots": torch.tensor([2, 0]), "bias": BIAS, "activation": "silu"},
    ),
}  # fmt: skip
