"""Public functions of mhc as `RowOp` and `SumOp`: a row holds all that a token has.

Rows of a RowOp are cut into x, f, coefficients and the cotangents of the results; what comes back
are the results and the gradients of that token, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cute_kernels.mhc import (
    Options,
    aggregate,
    connect,
    expand_combine,
    head,
    mix_and_aggregate,
    post_pre,
    projection,
    scale,
    sinkhorn,
)
from cute_kernels.mhc.config import mappings
from tests.contract import RowOp, SumOp
from tests.mhc import cases
from tests.mhc.cases import FP32, Case, Inputs


class Token:
    """The pieces of rows, in the order in which they are asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.first = rows, 0

    def take(self, *shape: int) -> torch.Tensor:
        """[M, *shape] in the dtype of the rows: a view with the rows' strides."""
        size = math.prod(shape)
        part = self.rows[:, self.first : self.first + size]
        self.first += size
        assert part.shape[1] == size, "the row is too short"
        return part.unflatten(1, shape) if shape else part[:, 0]

    def leaf(self, *shape: int, fp32: bool = False) -> torch.Tensor:
        """Take a leaf that needs a gradient; fp32 if coefficients are asked for."""
        part = self.take(*shape).detach()
        return (part.float() if fp32 else part).requires_grad_()

    def backward(self, made: list[torch.Tensor], leaves: list[torch.Tensor]) -> torch.Tensor:
        """Results and gradients, side by side; cotangents are what is left of the row."""
        upstream = [self.take(*t.shape[1:]).to(t.dtype) for t in made]
        out = [*made, *torch.autograd.grad(made, leaves, upstream)]
        return torch.cat([t.detach().float().reshape(len(self.rows), -1) for t in out], 1)


def _streams(case: Case) -> tuple[int, int]:
    return (case.c, case.n) if case.layout == "cn" else (case.n, case.c)


def _site(case: Case, i: Inputs) -> tuple[tuple, dict]:
    return (i.phi, i.alpha, i.beta), {"norm_weight": i.norm_weight, "options": case.options}


def _project(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    x = t.leaf(*_streams(case))
    out = projection(x, i.phi, norm_weight=i.norm_weight, layout=case.layout)
    return t.backward(list(out), [x])


def _gate(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    h, ms = t.leaf(mappings(case.n), fp32=True), t.take().float().abs().requires_grad_()
    return t.backward(list(scale(h, i.alpha, i.beta, ms, case.n)), [h, ms])


def _sinkhorn(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    z = t.leaf(case.n, case.n, fp32=True)
    return t.backward([sinkhorn(z, case.n, form=case.options.form)], [z])


def _collapse(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    x, pre = t.leaf(*_streams(case)), t.leaf(case.n, fp32=True)
    return t.backward([aggregate(x, pre, case.n, layout=case.layout)], [x, pre])


def _ending(case: Case, t: Token) -> list[torch.Tensor]:
    n = case.n
    return [
        t.leaf(case.c),
        t.leaf(n, fp32=True),
        t.leaf(*_streams(case)),
        t.leaf(n, n, fp32=True),
    ]


def _expand(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    f, post, x, res = leaves = _ending(case, t)
    y = expand_combine(f, i.bias, post, x, res, case.n, layout=case.layout)
    return t.backward([y], leaves)


def _mix(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    x, (weights, others) = t.leaf(*_streams(case)), _site(case, i)
    return t.backward(list(mix_and_aggregate(x, *weights, **others)), [x])


def _both(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    f, post, x, res = leaves = _ending(case, t)
    weights, others = _site(case, i)
    return t.backward(list(post_pre(f, i.bias, post, x, res, *weights, **others)), leaves)


def _shifted(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    f, post, x, res = leaves = _ending(case, t)
    pre, (weights, others) = t.leaf(case.n, fp32=True), _site(case, i)
    out = post_pre(f, i.bias, post, x, res, *weights, H_pre=pre, **others)
    return t.backward(list(out), [*leaves, pre])


def _whole(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    x, (weights, others) = t.leaf(*_streams(case)), _site(case, i)
    y = connect(x, lambda out: out.tanh(), *weights, bias=i.bias, **others)
    return t.backward([y], [x])


def _top(case: Case, i: Inputs, t: Token) -> torch.Tensor:
    x, (weights, others) = t.leaf(*_streams(case)), _site(case, i)
    return t.backward([head(x, *weights, **others)], [x])


ROWS: dict[str, Callable[[Case, Inputs, Token], torch.Tensor]] = {
    "projection": _project,
    "scale": _gate,
    "sinkhorn": _sinkhorn,
    "aggregate": _collapse,
    "expand_combine": _expand,
    "mix_and_aggregate": _mix,
    "post_pre": _both,
    "post_pre, shifted": _shifted,
    "connect": _whole,
    "head": _top,
}


def inputs_of(name: str, case: Case) -> Inputs:
    """Those of the case, with the weights that the function takes: a head's are the first n."""
    i, n = cases.inputs_of(case), case.n
    if name == "head":
        i = i._replace(phi=i.phi[:n].clone(), alpha=i.alpha[:1].clone(), beta=i.beta[0, :n].clone())
    return i


def case_of(dtype: torch.dtype, n: int = 4, layout: str = "cn", c: int = 11) -> Case:
    """Small, with every weight."""
    options = Options(layout=layout, iterations=5)
    return Case(40, 1, c, n, layout, (dtype, FP32), True, True, 3.0, options)


def row_op(name: str, case: Case) -> RowOp:
    """`RowOp` of one function; its weights are those of the case."""
    i = inputs_of(name, case)
    n = case.n
    # Of every piece that a function may take, and of their cotangents.
    width = 3 * (n * case.c + case.c) + 4 * (mappings(n) + 8 * n)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return ROWS[name](case, i, Token(rows))

    return RowOp(f"{name}, n = {n}, {case.layout}", run, width, case.dtypes[0])


def site_in_a_fresh_process() -> RowOp:
    """Op for `contract.check_fresh_process`."""
    return row_op("post_pre", case_of(torch.bfloat16))


# ---- sums over tokens ----------------------------------------------------------------------------

WEIGHTS = {
    "projection": ("phi", "norm_weight"),
    "scale": ("alpha", "beta"),
    "expand_combine": ("bias",),
    "mix_and_aggregate": ("phi", "norm_weight", "alpha", "beta"),
    "post_pre": ("bias", "phi", "norm_weight", "alpha", "beta"),
    "connect": ("bias", "phi", "norm_weight", "alpha", "beta"),
    "head": ("phi", "norm_weight", "alpha", "beta"),
}


def call(name: str, case: Case, i: Inputs, piece: slice, mains: dict) -> list[torch.Tensor]:
    """Results of some tokens whose backward adds into ``mains``."""
    x, f, post, res = i.x[piece], i.f[piece], i.post[piece], i.res[piece]
    weights, others = _site(case, i)
    others = others | {"main_grads": mains}
    ending = (f, i.bias, post, x, res)
    if name == "projection":
        made = projection(x, i.phi, norm_weight=i.norm_weight, layout=case.layout, main_grads=mains)
    elif name == "scale":
        with torch.no_grad():
            h, ms = projection(x, i.phi, norm_weight=i.norm_weight, layout=case.layout)
        made = scale(h, i.alpha, i.beta, ms, case.n, main_grads=mains)
    elif name == "expand_combine":
        made = (expand_combine(*ending, case.n, layout=case.layout, main_grads=mains),)
    elif name == "mix_and_aggregate":
        made = mix_and_aggregate(x, *weights, **others)
    elif name == "post_pre":
        made = post_pre(*ending, *weights, **others)
    elif name == "head":
        made = (head(x, *weights, **others),)
    else:
        made = (connect(x, lambda out: out.tanh(), *weights, bias=i.bias, **others),)
    return list(made)


def mains_of(name: str, i: Inputs, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """A main_grad for each weight, one behind the other in ``state``."""
    out, first = {}, 0
    for weight in WEIGHTS[name]:
        of = getattr(i, weight)
        out[weight] = state[first : first + of.numel()].view(of.shape)
        first += of.numel()
    assert first == state.numel()
    return out


def sum_op(name: str, case: Case, cut: int = 1024) -> SumOp:
    """The main_grads of one function, of the tokens of the case."""
    i = inputs_of(name, case)
    for weight in WEIGHTS[name]:
        getattr(i, weight).requires_grad_()
    size = sum(getattr(i, weight).numel() for weight in WEIGHTS[name])

    def run(start: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
        state = start.clone()
        for piece in pieces:
            out = call(name, case, i, piece, mains_of(name, i, state))
            upstream = [cases.normal(case.m, *t.shape[1:], seed=50 + j) for j, t in enumerate(out)]
            upstream = [g[piece].to(t.dtype) for g, t in zip(upstream, out, strict=True)]
            torch.autograd.backward(out, upstream)
        return state

    return SumOp(name, run, case.m, cases.normal(size, seed=49), cut)
