"""Cases of ``ck.mhc``: the runs of tests/mhc, with every option."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from unittest import mock

import torch

from cute_kernels import mhc
from cute_kernels.mhc import Options
from tests.mhc import calls, cases, runs
from tests.mhc.cases import BF16, FP32, Case, normal, share
from tests.option_table.calls import call, function_of
from tests.oracles import mhc as reference

M, C = 5, 24
#: Every field at another value than its default.
CHANGED = Options("nc", "bf16x3", 0.01, 0.02, 1.3, 3, "epsilon", 1e-3)
PLAIN = Case(3, M, C, dtypes=(BF16, FP32))
FULL = PLAIN._replace(norm_weight=True, bias=True, layout="nc", options=CHANGED)
#: The public functions of `calls` -> the weights that have main_grads.
WEIGHTS = {name: of.weights for name, of in calls.CALLS.items() if hasattr(mhc, name)}


@contextlib.contextmanager
def recording(op: str, mains: dict[str, torch.Tensor] | None) -> Iterator[None]:
    """Record calls of all ops; ``op`` gets main_grads.

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

            stack.enter_context(mock.patch.object(calls, name, recorded))
        yield


def start(t: torch.Tensor) -> torch.Tensor:
    """Content of the main_grad of a weight before a backward."""
    return normal(*t.shape, seed=t.numel())


def run(op: str, case: Case, main_grads: bool = False, name: str = "") -> dict[str, float]:
    mains = {} if main_grads else None
    with recording(op, mains):
        got, want = runs.compared(name or op, case, cases.inputs_of(case))
    for name, t in (mains or {}).items():
        assert got.get(f"d_{name}") is None
        begun = want[f"d_{name}"]
        got[f"d_{name}"] = t
        want[f"d_{name}"] = begun + start(t).double().reshape(begun.value.shape)
    return cases.shares(got, want)


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
    table = {}
    for op, weights in WEIGHTS.items():
        bind = functools.partial(functools.partial, run, op)
        two = FULL._replace(n=2)
        table[f"mhc.{op}"] = {"plain": bind(PLAIN), "all": bind(FULL), "two streams": bind(two)}
        if weights:
            table[f"mhc.{op}"]["main_grads"] = bind(FULL, True)
    table["mhc.post_pre"]["shifted"] = functools.partial(run, "post_pre", FULL, name="shifted")
    for field in dataclasses.fields(Options):
        changed = {field.name: getattr(CHANGED, field.name)}
        if field.name == "form_eps":
            changed["form"] = "epsilon"
        options = dataclasses.replace(Options(), **changed)
        case = PLAIN._replace(layout=options.layout, options=options)
        label = f"options.{field.name}"
        bound = functools.partial(run, "mix_and_aggregate", case)
        table["mhc.mix_and_aggregate"][label] = bound
    table["mhc.multilayer_recompute"] = {
        "plain": functools.partial(multilayer_recompute, PLAIN),
        "all": functools.partial(multilayer_recompute, FULL),
    }
    return table


TABLE = _table()
