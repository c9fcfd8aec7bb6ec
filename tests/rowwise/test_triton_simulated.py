"""The sm_90 code of the Triton rowwise in ptxsim: values, rows, orders and cuts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cute_kernels.rowwise import config, cpu
from cute_kernels.rowwise.triton import launch
from ptxsim.skips import requires_core

from .. import on_gpu
from . import rotary_cases
from . import triton_cases as cases
from .cases import BF16, FP16, FP32
from .triton_harness import copy_of, simulated

pytestmark = pytest.mark.simulates("rowwise.triton")


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


RANDOM = {"warp_order": 1, "cta_order": 1, "seed": 5}
SIM = [pytest.mark.sim, requires_core]
CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[pytest.param("sim", marks=SIM), pytest.param("cuda", marks=CARD)])
def there(request):
    """The launchers, in the simulator or on a GPU."""
    if request.param == "cuda":
        yield on_gpu.launcher(launch)
        return
    with simulated(**RANDOM):
        yield launch


@pytest.mark.parametrize("check", list(cases.CHECKS))
def test_checks(there, check):
    cases.CHECKS[check](there)


@pytest.mark.parametrize("dtype", [FP32, by_night(BF16), by_night(FP16)], ids=str)
@pytest.mark.parametrize(
    "kind", [kind if kind in ("silu", "gelu_tanh") else by_night(kind) for kind in config.KINDS]
)
def test_activations(there, kind, dtype):
    cases.activations(there, kind, dtype)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(7, FP32), (1030, BF16), *(by_night(width, BF16) for width in (1, 1024, 2500))],
    ids=str,
)
def test_softmax(there, width, dtype):
    cases.softmax(there, width, dtype)


@pytest.mark.sim
@requires_core
def test_a_plan_of_q_and_k_launches_what_its_launcher_does():
    """Of its own call, and of another with its signature."""
    one, other = (rotary_cases.operands(BF16, BF16, 16, 20, seed) for seed in (0, 5))
    with simulated(**RANDOM), torch.cuda.device(one[0].device):  # as `call` does for a plan
        for options in ((1, FP32, False), (1, BF16, True)):
            plan = launch.plan_rotary_pair(*one, *options)
            assert plan.fresh and plan.cacheable
            for args in (one, other):
                got, want = plan.run(*args, *options), cpu.rotary_pair(*args, *options)
                assert all(map(rotary_cases.same_numbers, got, want))
                assert [t.stride() for t in got] == [t.stride() for t in want]


@pytest.mark.sim
@requires_core
def test_another_order_is_killed(tmp_path):
    mutant = copy_of(
        tmp_path,
        (
            "over_columns(tl.reshape(v, [1, LANES]), 1, LANES)",
            "pairs(tl.reshape(v, [1, LANES]), 1, LANES)",
        ),
    )
    with simulated(mutant), pytest.raises(AssertionError):
        cases.lanes(mutant)
