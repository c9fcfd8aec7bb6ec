"""The public functions of mhc in one table, as calls, rows and sums over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_kernels.mhc import (
    Options,
    aggregate,
    connect,
    expand_combine,
    expand_from_embedding,
    head,
    mix_and_aggregate,
    post_pre,
    projection,
    scale,
    sinkhorn,
)
from tests.contract import RowOp, SumOp
from tests.mhc import cases
from tests.mhc.cases import FP32, Case, Inputs

#: Tensors with a row for each token, and those that all tokens share.
TOKENS = ("x", "f", "pre", "post", "res", "z", "h", "ms")
WEIGHTS = ("bias", "phi", "norm_weight", "alpha", "beta")


class Call(NamedTuple):
    """A function of (tensors, case, options), the names of its leaves and of its results."""

    function: Callable
    leaves: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """Leaves that may have a main_grad."""
        return tuple(leaf for leaf in self.leaves if leaf in WEIGHTS)

    def __call__(self, a: Inputs, case: Case, mains: dict | None = None) -> list[torch.Tensor]:
        out = self.function(a, case, {} if mains is None else {"main_grads": mains})
        return list(out) if isinstance(out, tuple) else [out]


def _call(function: Callable, leaves: str, results: str) -> Call:
    return Call(function, tuple(leaves.split()), tuple(results.split()))


def _project(a: Inputs, c: Case, m: dict):
    form = {"layout": c.layout, "precision": c.options.precision}
    return projection(a.x, a.phi, norm_weight=a.norm_weight, **form, **m)


def _scale(a: Inputs, c: Case, m: dict):
    o = c.options
    numbers = {"eps": o.eps, "pre_eps": o.pre_eps, "post_scale": o.post_scale}
    return scale(a.h, a.alpha, a.beta, a.ms, c.n, **numbers, **m)


def _sinkhorn(a: Inputs, c: Case, m: dict):
    o = c.options
    return sinkhorn(a.z, c.n, iterations=o.iterations, form=o.form, eps=o.form_eps, **m)


def _site(a: Inputs, c: Case, m: dict) -> tuple[tuple, dict]:
    options = {"norm_weight": a.norm_weight, "options": c.options}
    return (a.phi, a.alpha, a.beta), options | m


def _mix(a: Inputs, c: Case, m: dict):
    weights, options = _site(a, c, m)
    return mix_and_aggregate(a.x, *weights, **options)


def _post_pre(a: Inputs, c: Case, m: dict, **shifted):
    weights, options = _site(a, c, m)
    return post_pre(a.f, a.bias, a.post, a.x, a.res, *weights, **shifted, **options)


def sublayer(out: torch.Tensor) -> torch.Tensor:
    """Exact but for the rounding to its dtype."""
    return out * 1.5


def _connect(a: Inputs, c: Case, m: dict):
    weights, options = _site(a, c, m)
    return connect(a.x, sublayer, *weights, bias=a.bias, **options)


def _head(a: Inputs, c: Case, m: dict):
    weights, options = _site(a, c, m)
    return head(a.x, *weights, **options)


_SITE = " phi norm_weight alpha beta"
CALLS = {
    "projection": _call(_project, "x phi norm_weight", "h ms"),
    "scale": _call(_scale, "h ms alpha beta", "pre post res"),
    "sinkhorn": _call(_sinkhorn, "z", "res"),
    "aggregate": _call(
        lambda a, c, m: aggregate(a.x, a.pre, c.n, layout=c.layout, **m), "x pre", "out"
    ),
    "expand_combine": _call(
        lambda a, c, m: expand_combine(a.f, a.bias, a.post, a.x, a.res, c.n, layout=c.layout, **m),
        "f bias post x res",
        "y",
    ),
    "mix_and_aggregate": _call(_mix, "x" + _SITE, "out post res"),
    "post_pre": _call(_post_pre, "f bias post x res" + _SITE, "y out post res"),
    "shifted": _call(
        lambda a, c, m: _post_pre(a, c, m, H_pre=a.pre),
        "f bias post x res pre" + _SITE,
        "y out post res pre",
    ),
    "connect": _call(_connect, "x bias" + _SITE, "y"),
    "head": _call(_head, "x" + _SITE, "out"),
    "expand_from_embedding": _call(
        lambda a, c, m: expand_from_embedding(a.f, c.n, layout=c.layout, **m), "f", "y"
    ),
}
#: Those that add into main_grads.
WEIGHED = [name for name, call in CALLS.items() if call.weights]


def weights_of(name: str, i: Inputs) -> Inputs:
    """The tensors with the weights that the function takes: a head's are the rows of H_pre."""
    if name != "head":
        return i
    n = i.pre.shape[1]
    return i._replace(phi=i.phi[:n].clone(), alpha=i.alpha[:1].clone(), beta=i.beta[0, :n].clone())


def inputs_of(name: str, case: Case) -> Inputs:
    """Tensors of a case for a function."""
    return weights_of(name, cases.inputs_of(case))


def leaves_of(x: Inputs, leading: tuple[int, ...] | None = None) -> Inputs:
    """Copies that need gradients; tokens in ``leading`` dimensions."""
    out = {}
    for name, t in x._asdict().items():
        if t is not None and leading is not None and name in TOKENS[:5]:
            t = t.view(*leading, *t.shape[1:])
        out[name] = None if t is None else t.detach().clone().requires_grad_()
    return Inputs(**out)


# ---- rows ----------------------------------------------------------------------------------------


def case_of(dtype: torch.dtype, n: int = 4, layout: str = "cn", c: int = 11) -> Case:
    """Small, with every weight."""
    options = Options(layout=layout, iterations=5)
    return Case(40, 1, c, n, layout, (dtype, FP32), True, True, 3.0, options)


def row_op(name: str, case: Case) -> RowOp:
    """Results and gradients of a token, of rows of all that a token has; weights of the case."""
    i, call = inputs_of(name, case), CALLS[name]

    def run(rows: torch.Tensor) -> torch.Tensor:
        first, given = 0, {}

        def take(like: torch.Tensor) -> torch.Tensor:
            """The next columns: a view with the strides of the rows where dtypes agree."""
            nonlocal first
            size = like[0].numel()
            part = rows[:, first : first + size].to(like.dtype)
            first += size
            return part.unflatten(1, like.shape[1:]) if like.dim() > 1 else part[:, 0]

        for leaf in call.leaves:
            if leaf in TOKENS:
                part = take(getattr(i, leaf)).detach()
                given[leaf] = (part.abs() if leaf == "ms" else part).requires_grad_()
        out = call(i._replace(**given), case)
        grads = torch.autograd.grad(out, list(given.values()), [take(t) for t in out])
        every = (*out, *grads)
        return torch.cat([t.detach().float().reshape(len(rows), -1) for t in every], 1)

    # Of every piece that a function may take, and of their cotangents.
    width = 3 * (case.n + 1) * case.c + 4 * (case.n + 8) * (case.n + 2)
    return RowOp(f"{name}, n = {case.n}, {case.layout}", run, width, case.dtypes[0])


# ---- sums over tokens ----------------------------------------------------------------------------


def call(name: str, case: Case, i: Inputs, mains: dict, piece: slice = slice(None)) -> list:
    """Results of some tokens whose backward adds into ``mains``."""
    some = {token: getattr(i, token)[piece] for token in TOKENS}
    return CALLS[name](i._replace(**some), case, mains)


def mains_of(name: str, i: Inputs, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """A main_grad for each weight, one behind the other in ``state``."""
    own = {weight: getattr(i, weight) for weight in CALLS[name].weights}
    parts = state.split([t.numel() for t in own.values()])
    return {weight: part.view(own[weight].shape) for weight, part in zip(own, parts, strict=True)}


def sum_op(name: str, case: Case, cut: int = 1024) -> SumOp:
    """The main_grads of one function, of the tokens of the case."""
    i = inputs_of(name, case)
    weights = [getattr(i, weight).requires_grad_() for weight in CALLS[name].weights]

    def run(start: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
        state = start.clone()
        for piece in pieces:
            out = call(name, case, i, mains_of(name, i, state), piece)
            upstream = [cases.normal(case.m, *t.shape[1:], seed=50 + j) for j, t in enumerate(out)]
            upstream = [g[piece].to(t.dtype) for g, t in zip(upstream, out, strict=True)]
            torch.autograd.backward(out, upstream)
        return state

    start = cases.normal(sum(t.numel() for t in weights), seed=49)
    return SumOp(name, run, case.m, start, cut)
