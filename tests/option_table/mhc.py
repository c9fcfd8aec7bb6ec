"""Cases of ``ck.mhc``: the runs of tests/mhc, with every option."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from cute_kernels.mhc import Options
from tests.mhc import cases, runs
from tests.mhc.cases import BF16, FP32, Case, normal, share
from tests.option_table.calls import call, function_of
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import exact

M, C = 5, 24
#: Every field at another value than its default.
CHANGED = Options("nc", "bf16x3", 0.01, 0.02, 1.3, 3, "epsilon", 1e-3)
PLAIN = Case(3, M, C, dtypes=(BF16, FP32))
FULL = PLAIN._replace(norm_weight=True, bias=True, layout="nc", options=CHANGED)
#: The public name of what runs.py calls -> the weights that have main_grads.
WEIGHTS = {
    "projection": ("phi", "norm_weight"),
    "scale": ("alpha", "beta"),
    "sinkhorn": (),
    "aggregate": (),
    "expand_combine": ("bias",),
    "mix_and_aggregate": ("phi", "norm_weight", "alpha", "beta"),
    "post_pre": ("bias", "phi", "norm_weight", "alpha", "beta"),
    "connect": ("bias", "phi", "norm_weight", "alpha", "beta"),
    "head": ("phi", "norm_weight", "alpha", "beta"),
}


@contextlib.contextmanager
def recording(op: str, mains: dict[str, torch.Tensor] | None) -> Iterator[None]:
    """Record runs.py's calls of all ops; ``op`` gets main_grads.

    ``mains`` is filled with them by name: copies of `start`.
    """
    with contextlib.ExitStack() as stack:
        for name in WEIGHTS:

            def recorded(*args, name=name, **options):
                if name == op and mains is not None:
                    bound = inspect.signature(function_of(f"mhc.{name}")).bind(*args, **options)
                    arguments = {key: bound.arguments.get(key) for key in WEIGHTS[name]}
                    mains.update({k: start(t) for k, t in arguments.items() if t is not None})
                    options["main_grads"] = mains
                return call(f"mhc.{name}", *args, **options)

            stack.enter_context(mock.patch.object(runs, name, recorded))
        yield


def start(t: torch.Tensor) -> torch.Tensor:
    """Content of the main_grad of a weight before a backward."""
    return normal(*t.shape, seed=t.numel())


def run(op: str, of: Callable, case: Case, main_grads: bool = False) -> dict[str, float]:
    mains = {} if main_grads else None
    with recording(op, mains):
        got, want = of(case, cases.inputs_of(case))
    for name, t in (mains or {}).items():
        assert got.get(f"d_{name}") is None
        begun = want[f"d_{name}"]
        got[f"d_{name}"] = t
        want[f"d_{name}"] = begun + start(t).double().reshape(begun.value.shape)
    return cases.shares(got, want)


def expand_from_embedding(layout: str | None) -> dict[str, float]:
    leaf, options = normal(2, 3, C, seed=1, dtype=BF16).requires_grad_(), {}
    if layout is not None:
        options["layout"] = layout
    x = call("mhc.expand_from_embedding", leaf, 4, **options)
    across = -1 if layout != "nc" else -2
    up = normal(*x.shape, seed=2, dtype=BF16)
    x.backward(up)
    assert all(torch.equal(part, leaf) for part in x.unbind(across))
    streams = cases.Streams(4, layout or "cn")
    want = reference.repeat_backward(exact(up.double().flatten(0, 1).flatten(1)), streams)
    return {"d_embedding": share(leaf.grad, want)}


def multilayer_recompute(case: Case) -> dict[str, float]:
    """Two sites, the second from the streams that the first one made."""
    x = cases.inputs_of(case)
    sites = [(x.f, x.bias, x.post, x.res), (-x.f, x.bias, x.post, x.res)]
    options = {} if case.layout == "cn" else {"layout": case.layout}
    streams = call("mhc.multilayer_recompute", x.x, sites, case.n, **options)
    out, before = {}, x.x
    for i, (after, site) in enumerate(zip(streams, sites, strict=True)):
        by = cases.expand_of(x._replace(f=site[0]))
        want = reference.expand_combine(cases.rows(before), by, case.streams)
        out[f"x{i}"], before = share(after, want), after
    return out


def _table() -> dict[str, dict]:
    of = {
        "projection": runs.project, "scale": runs.gate, "sinkhorn": runs.normalise,
        "aggregate": runs.collapse, "expand_combine": runs.expand, "mix_and_aggregate": runs.mix,
        "connect": runs.whole, "head": runs.top, "post_pre": runs.both,
    }  # fmt: skip
    table = {}
    for op, function in of.items():
        bind = functools.partial(functools.partial, run, op)
        table[f"mhc.{op}"] = {"plain": bind(function, PLAIN), "all": bind(function, FULL)}
        two = FULL._replace(n=2)
        table[f"mhc.{op}"]["two streams"] = bind(function, two)
        if WEIGHTS[op]:
            table[f"mhc.{op}"]["main_grads"] = bind(function, FULL, True)
    table["mhc.post_pre"]["shifted"] = functools.partial(run, "post_pre", runs.shifted, FULL)
    for field in dataclasses.fields(Options):
        changed = {field.name: getattr(CHANGED, field.name)}
        if field.name == "form_eps":
            changed["form"] = "epsilon"
        options = dataclasses.replace(Options(), **changed)
        case = PLAIN._replace(layout=options.layout, options=options)
        label = f"options.{field.name}"
        bound = functools.partial(run, "mix_and_aggregate", runs.mix, case)
        table["mhc.mix_and_aggregate"][label] = bound
    table["mhc.expand_from_embedding"] = {
        str(layout): functools.partial(expand_from_embedding, layout) for layout in (None, "nc")
    }
    table["mhc.multilayer_recompute"] = {
        "plain": functools.partial(multilayer_recompute, PLAIN),
        "all": functools.partial(multilayer_recompute, FULL),
    }
    return table


TABLE = _table()
