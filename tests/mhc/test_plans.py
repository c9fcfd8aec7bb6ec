"""Launch plans of mhc: a plan that runs again has the bytes of a new one, in ops too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cute_kernels import arch
from cute_kernels.mhc import launch, site_op
from cute_kernels.mhc import op as ops
from cute_kernels.mhc.config import mappings
from cute_kernels.mhc.tensors import Expand, Parts, Projected, Upstream
from cute_kernels.runtime import dispatch, plan_cache
from ptxsim.skips import requires_sim
from tests import plans
from tests.contract import same_bytes
from tests.mhc.launcher_cases import BF16, FORMS, Given, Shape, given
from tests.mhc.simulated import launchers, simulated
from tests.old_memory import old_memory

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc")]

SHAPE = Shape(19, 64, 2, "cn", BF16)
N = SHAPE.n


def drawn(g: Given, *shape: int) -> torch.Tensor:
    """Random fp32 that follow the case's seed."""
    seed = int(g.ms[0] * 2**20)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projected(g: Given) -> Projected:
    """Sums of three chunks, drawn at random."""
    return Projected(drawn(g, 3, SHAPE.m, mappings(N)), drawn(g, 3, SHAPE.m).abs())


def site(g: Given) -> tuple:
    """Operands that backwards of gates share."""
    return g.h, g.ms, g.gates, N


#: Launcher -> its operands in a case.
OPERANDS: dict[str, Callable[[Given], tuple]] = {
    "project": lambda g: (g.x, g.mapping, g.streams, g.expand),
    "add_chunks": lambda g: (projected(g), g.x.shape[1], N),
    "gate": site,
    "sinkhorn": lambda g: (g.res, N, FORMS[1]),
    "coefficients": lambda g: (projected(g), g.x.shape[1], g.gates, N, FORMS[0]),
    "combine": lambda g: (g.x, g.streams, None, g.expand),
    "recompute": lambda g: (g.x, g.streams, (g.expand, g.expand)),
    "gate_backward": lambda g: (*site(g), g.pre, g.post, g.res),
    "sinkhorn_backward": lambda g: (g.res, g.res + 1, N, FORMS[0]),
    "coefficients_backward": lambda g: (*site(g), FORMS[1], g.pre, g.post, g.res),
    "reduce_channels": lambda g: (
        g.x, g.streams, Upstream(g.dy, res=g.res), Expand(g.f, g.bias, g.post), True
    ),
    "project_backward": lambda g: (
        g.x, g.h, g.ms, g.mapping, g.streams, Upstream(g.dy, g.d_out, g.res, g.pre), (True, True)
    ),
    "weights": lambda g: (
        Parts(drawn(g, 3, *g.mapping.phi.shape)), g.mapping, torch.ones_like(g.mapping.phi),
        torch.ones_like(g.mapping.norm_weight),
    ),
    "add_parts": lambda g: (Parts(drawn(g, 5, 41), 2), torch.ones(41)),
}  # fmt: skip
#: Those of every commit; each compiles a kernel.
BY_DAY = ("project", "coefficients_backward", "reduce_channels", "weights")


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors of a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)


def results(run: Callable, operands: tuple) -> list[torch.Tensor]:
    """Tensors that a run returns, or those that it adds to."""
    returned = run(*operands)
    return list(tensors(operands[1:] if returned is None else returned))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in OPERANDS],
)
def test_a_plan_runs_again(name):
    of_case, (one, other) = OPERANDS[name], (given(SHAPE, seed) for seed in (1, 2))
    with simulated(), old_memory():
        plan = getattr(launch, f"plan_{name}")(*of_case(one))
        first, second = (results(plan.run, of_case(g)) for g in (one, other))
        new = results(getattr(launchers, name), of_case(other))
    assert len(first) == len(second) == len(new)
    assert all(map(same_bytes, second, new)) and not all(map(same_bytes, first, second))


def test_every_launcher_has_a_plan():
    planners = {name for name in vars(launch) if name.startswith("plan_")}
    assert planners == {f"plan_{name}" for name in OPERANDS}


OPTIONS = (N, "cn", "bf16x2", 1e-6, 0.0, 2.0, 3, "log", 1e-6)


def mix(g: Given) -> list[torch.Tensor]:
    """Results of a site."""
    weights = (*g.mapping[:2], g.gates.alpha, g.gates.beta)
    return list(site_op.mix(g.x, *weights, *(None,) * 4, *OPTIONS, False)[:-1])


def mix_backward(g: Given) -> list[torch.Tensor]:
    """dx, and the main_grads that weights are added into."""
    weights = (*g.mapping[:2], g.gates.alpha, g.gates.beta)
    coefficients = [t.contiguous() for t in (g.pre, g.post, g.res, g.h, g.ms)]
    mains = [torch.ones_like(t) for t in weights]
    upstream = (g.d_out, None, None, None, g.dy)
    of = (*upstream, g.x, *weights, *coefficients, *mains, *OPTIONS, [True] * 5)
    return [site_op.mix_backward(*of)[0], *mains]


def sinkhorn(g: Given) -> list[torch.Tensor]:
    return [ops.sinkhorn(g.res.contiguous(), N, *OPTIONS[-3:])]


#: What calls an op, on tensors that a cached plan can take, and its number of launches.
CALLS = [(mix, 3), (mix_backward, 5), (sinkhorn, 1)]


@pytest.fixture
def planned(monkeypatch):
    """Names of what was planned; CPU tensors count as those of an SM90 GPU."""

    def plan(name, device, dtype, *operands):
        return getattr(launch, f"plan_{ops._LAUNCHERS[name]}")(*operands)

    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    with plans.cached(monkeypatch, plan) as names:
        yield names


@pytest.mark.parametrize(("call", "launches"), CALLS)
def test_a_cached_call_has_the_bytes_of_the_first(call, launches, planned):
    cases = [given(SHAPE, seed) for seed in (1, 2)]
    with simulated(), old_memory():
        first, later = ([call(g) for g in cases] for _ in range(2))
        assert len(planned) == launches
        plan_cache.clear()
        new = [call(g) for g in cases[::-1]][::-1]
    assert len(planned) == 2 * launches
    for one, two, three in zip(first, later, new, strict=True):
        assert all(map(same_bytes, one, two)) and all(map(same_bytes, one, three))
    assert not same_bytes(first[0][0], first[1][0])
