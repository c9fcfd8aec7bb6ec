"""Plans of elementwise functions: the bytes of the slow path, and calls that are not cached."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import DtypeError, ShapeError
from cute_kernels.rowwise import cpu
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.runtime.plan_cache import Plan
from tests import plans
from tests.contract import same_bytes
from tests.runtime.cached_calls import counted

from .cases import BF16, CALLS, FP16, drawn


class Way:
    """How often calls were checked, planned and run by a plan, and what was planned."""

    def __init__(self, counts: dict[str, int]):
        self.counts, self.planned, self.launched = counts, [], 0

    @property
    def whole(self) -> int:
        return self.counts["elements"]


@pytest.fixture
def way(monkeypatch):
    """Plans of CPU tensors are cached; the CPU's functions are what they launch."""
    way = Way(counted(monkeypatch))

    def plan(entry, device, dtype, *call):
        options = tuple(a for a in call if not isinstance(a, torch.Tensor))
        way.planned.append((entry, options[0]))
        name = "gated" if "_mul" in entry else "activation"
        run = getattr(cpu, name + ("_backward" if entry.endswith("_backward") else ""))

        def launch(*args):
            way.launched += 1
            # As a kernel that was compiled for its kind.
            return run(*args[: -len(options)], *options)

        return Plan(launch, cacheable=call[0].is_contiguous())

    with plans.cached(monkeypatch, plan):
        yield way


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_has_the_bytes_of_the_first(way, name):
    run, x, other = CALLS[name], drawn(5, 77).to(BF16), drawn(5, 77, seed=3).to(BF16)
    first, later, third = run(x), run(x), run(other)
    assert (way.whole, way.launched, len(way.planned)) == (1, 3, 1)
    assert same_bytes(first, later) and not same_bytes(first, third)
    plan_cache.clear()
    assert same_bytes(third, run(other)) and way.whole == 2


@pytest.mark.parametrize("name", CALLS)
def test_so_has_its_gradient(way, name):
    def results():
        x = drawn(5, 77).to(BF16).requires_grad_()
        y = CALLS[name](x)
        return y.detach(), torch.autograd.grad(y, x, drawn(5, 77, seed=9).to(BF16))[0]

    first, later = results(), results()
    assert all(map(same_bytes, first, later))
    assert (way.launched, len(way.planned)) == (4, 2)  # forward and backward, twice


def test_another_kind_shape_or_dtype_is_another_call(way):
    x = drawn(5, 77).to(BF16)
    for run in CALLS.values():
        for one in (x, x[:4], x.to(FP16), x.view(77, 5)):
            run(one)
    assert len(way.planned) == way.whole == 4 * len(CALLS)
    names = [entry for entry, _ in way.planned[::4]]
    assert names == ["silu", "gelu", "sigmoid", "tanh", "gelu", "silu_mul", "gelu_mul"]
    assert len(set(way.planned)) == len(CALLS)


def test_bad_calls_are_refused_behind_known_ones(way):
    x = drawn(5, 77).to(BF16)
    ck.silu_mul(x, x), ck.silu_mul(x, x)
    with pytest.raises(ShapeError, match="up"):
        ck.silu_mul(x, x[:4])
    with pytest.raises(DtypeError, match="up"):
        ck.silu_mul(x, x.to(FP16))
    with pytest.raises(DtypeError, match="x"):
        ck.silu(x.double())


def test_every_elementwise_launcher_has_a_planner():
    for name in ("silu", "gelu", "sigmoid", "tanh", "silu_mul", "gelu_mul"):
        for entry in (name, f"{name}_backward"):
            function = "gated" if "mul" in name else "activation"
            planner = f":plan_{function}" + "_backward" * entry.endswith("_backward")
            assert dispatch._TABLE[entry]["triton"].planner.endswith(planner)
