"""Experts cut over ranks against one rank's, byte for byte: for threads, processes and GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.moe import exchange
from tests.contract import same_bytes

from .cases import BF16, FP16, FP32, drawn, generator

#: How tokens choose their experts: by the router, or drawn without it.
ROUTER, SKEWED, ONE, SOME, DUPLICATES = "router", "skewed", "one expert", "some", "duplicates"


class Case(NamedTuple):
    """``tokens``: of each rank, for each micro-batch."""

    tokens: tuple[tuple[int, ...], ...]
    experts: int
    k: int
    load: str
    dtype: torch.dtype
    main_grad: bool = False
    width: int = 40
    inner: int = 24

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        state = ", main_grad" if self.main_grad else ""
        tokens = " + ".join("/".join(map(str, batch)) for batch in self.tokens)
        return f"{tokens} tokens, {self.k} of {self.experts}, {self.load}, {dtype}{state}"


#: Tokens of up to eight ranks: uneven, and some without any.
LOADS = ((7, 0, 19, 1, 12, 3, 0, 26), (0, 0, 33, 0, 1, 0, 0, 5), (9,) * 8)


def cases(degree: int) -> list[Case]:
    """Cases of so many ranks: every load, every dtype, one and three micro-batches."""
    uneven, few, even = (load[-degree:] if degree < 3 else load[:degree] for load in LOADS)
    experts = max(8, 2 * degree)
    return [
        Case((uneven,), experts, 3, ROUTER, BF16),
        Case((uneven, few, even), experts, 3, ROUTER, BF16, main_grad=True),
        Case((even, uneven), experts, 4, SKEWED, FP16),
        Case((uneven, even), experts, 4, ROUTER, FP32),
        Case((few,), degree, min(3, degree), ROUTER, FP32),
        Case((uneven,), experts, 1, ONE, FP32),
        Case((even,), experts, 2, SOME, BF16),
        Case((uneven,), experts, 3, DUPLICATES, BF16),
        Case(((0,) * degree,), experts, 2, ROUTER, BF16),
    ]


def random_case(seed: int, degree: int) -> Case:
    """Case of a drawn routing, drawn sizes and up to three micro-batches."""
    g = generator(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    batches = number(1, 3)
    tokens = tuple(
        tuple(number(0, 30) * number(0, 1) for _ in range(degree)) for _ in range(batches)
    )
    experts = degree * number(1, 5)
    load = (ROUTER, SKEWED, ONE, SOME, DUPLICATES)[seed % 5]
    k = 1 if load == ONE else number(1, max(1, min(5, experts // 2)))
    dtype = (BF16, FP16, FP32)[number(0, 2)]
    return Case(tokens, experts, k, load, dtype, bool(number(0, 1)), 8 * number(2, 9), 24)


# ---- a layer -------------------------------------------------------------------------------------

#: Parameters that ranks cut by expert; the router is on all of them.
CUT = ("up", "up_bias", "down", "down_bias")


def parameters(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    e, n, d, dtype = case.experts, case.inner, case.width, case.dtype
    shapes = {
        "router": (e, d), "up": (e, 2 * n, d), "up_bias": (e, 2 * n),
        "down": (e, d, n), "down_bias": (e, d),
    }  # fmt: skip
    return {
        name: (drawn(*shape, seed=i, device=device) / 4).to(dtype)
        for i, (name, shape) in enumerate(shapes.items(), 1)
    }


def chosen(case: Case, tokens: int, seed: int) -> torch.Tensor | None:
    """Experts [T, k] that are not left to the router, or None."""
    if case.load == ROUTER:
        return None
    g = generator(seed)
    if case.load == DUPLICATES:
        return torch.randint(0, case.experts, (tokens, case.k), generator=g, dtype=torch.int32)
    load = torch.rand(tokens, case.experts, generator=g)
    if case.load == SKEWED:
        load = load / (torch.arange(case.experts) + 1.0)
    if case.load == ONE:
        load[:, -1] += 10
    if case.load == SOME:
        load[:, : case.experts // 2] = -1.0
    return load.topk(case.k).indices.int()


def layer(x, p, case: Case, indices, group=None, states=None):
    """(y [T, D], logits) of x [T, D]; ``states``: main_grad of ``up`` and ``down``."""
    states = states or {}
    logits = ck.linear(x, p["router"])
    routing = ck.moe.route(logits, case.k, indices=indices)
    if group is None:
        rows, placed = ck.moe.permute(x, routing.indices, case.experts)
    else:
        rows, placed = ck.moe.dispatch(x, routing.indices, case.experts, group=group)
    gate, inner = ck.grouped_linear(
        rows, p["up"], placed.offsets, p["up_bias"], main_grad=states.get("up")
    ).chunk(2, -1)
    rows = ck.grouped_linear(
        ck.silu_mul(gate, inner), p["down"], placed.offsets, p["down_bias"],
        main_grad=states.get("down"),
    )  # fmt: skip
    return ck.moe.combine(rows, routing.weights, placed), logits


def step(batches: list, p: dict, case: Case, group=None, twice: bool = False) -> dict:
    """Forward and backward of micro-batches (x, dy, indices): y, dx, dlogits, and of parameters."""
    p = {name: t.clone().requires_grad_() for name, t in p.items()}
    states = None
    if case.main_grad:
        states = {n: drawn(*p[n].shape[1:], seed=9).expand(p[n].shape) for n in ("up", "down")}
        states = {name: t.contiguous() for name, t in states.items()}
        states = {name: t.to(p[name].device) for name, t in states.items()}
    outs: dict[str, list] = {"y": [], "dx": [], "dlogits": []}
    for x, dy, indices in batches:
        x = x.clone().requires_grad_()
        y, logits = layer(x, p, case, indices, group, states)
        if twice:
            y = y + layer(y, p, case, indices, group, states)[0]
        logits.retain_grad()
        y.backward(dy)
        for name, t in (("y", y.detach()), ("dx", x.grad), ("dlogits", logits.grad)):
            outs[name].append(t)
    for name in CUT:
        state = (states or {}).get(name)
        assert (p[name].grad is None) == (state is not None)
        outs[name] = p[name].grad if state is None else state
    return outs


class Whole(NamedTuple):
    """Operands of a case, and what one rank with all tokens and all experts makes of them."""

    batches: list
    parameters: dict[str, torch.Tensor]
    results: dict


def whole(case: Case, device: str = "cpu", twice: bool = False) -> Whole:
    """The results of one rank with the concatenated tokens."""
    batches = []
    for i, tokens in enumerate(case.tokens):
        count, seed = sum(tokens), 50 * (i + 1)
        options = {"dtype": case.dtype, "device": device}
        x, dy = (drawn(count, case.width, seed=seed + j, **options) for j in (0, 7))
        indices = chosen(case, count, seed)
        indices = None if indices is None else indices.to(device)
        batches.append((x, dy, indices))
    p = parameters(case, device)
    return Whole(batches, p, step(batches, p, case, twice=twice))


def share_of(case: Case, of: Whole, rank: int, degree: int) -> Whole:
    """A rank's part of the operands, and of the results that it must have."""
    spans = [slice(sum(tokens[:rank]), sum(tokens[: rank + 1])) for tokens in case.tokens]
    batches = [
        tuple(None if t is None else t[span] for t in batch)
        for batch, span in zip(of.batches, spans, strict=True)
    ]
    local = case.experts // degree
    experts = slice(rank * local, (rank + 1) * local)
    p = {name: t[experts] if name in CUT else t for name, t in of.parameters.items()}
    results = {
        name: value[experts]
        if name in CUT
        else [t[span] for t, span in zip(value, spans, strict=True)]
        for name, value in of.results.items()
    }
    return Whole(batches, p, results)


def differing(
    case: Case, of: Whole, group, rank: int, degree: int, twice: bool = False, counts=None
) -> list[str]:
    """The results of a rank that are not, byte for byte, its part of the whole's.

    ``counts`` gets the number of bytes that differ of each of these.
    """
    mine = share_of(case, of, rank, degree)
    got = step(mine.batches, mine.parameters, case, group, twice)
    wrong = []
    for name, want in mine.results.items():
        pairs = [(got[name], want)] if name in CUT else list(zip(got[name], want, strict=True))
        if not all(same_bytes(a, b) for a, b in pairs):
            wrong.append(name)
            if counts is not None:
                counts[name] = sum(bytes_apart(a, b) for a, b in pairs)
    return wrong


def bytes_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bytes differ of two tensors of one shape and dtype."""
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return int((a != b).sum())


_orders = exchange._orders


def orders_by_sources_descending(arrived: torch.Tensor, rows: int):
    """Mutant of ``exchange._orders``: an expert has the rows of the last rank first."""
    order, _ = _orders(arrived, rows)
    source = torch.arange(len(arrived)).repeat_interleave(arrived.sum(1))[order]
    expert = torch.arange(arrived.shape[1]).repeat_interleave(arrived.sum(0))
    order = order[(expert * len(arrived) - source).argsort(stable=True)]
    return order, order.argsort()
