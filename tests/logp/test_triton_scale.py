"""The Triton kernel that multiplies a gradient: its machine code, and its bytes in ptxsim."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.logp import cpu
from cute_kernels.logp.triton import launch
from tests.contract import same_bytes

from .policy_cases import HALVES_AND_FP32, values
from .triton_cases import BF16, FP32
from .triton_harness import compiled, complaints, simulated

pytestmark = pytest.mark.simulates("logp.triton")

#: Elements of whole vectors, and of a last block of some.
SHAPES = [(64, 80), (63, 131)]


def scaled(x: torch.Tensor, factor: float, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, x) after a launch for one unit."""
    out = x if in_place else torch.empty_like(x)
    with simulated():
        launch._scale(x, torch.tensor(factor), out, 1)
    return out, x


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES_AND_FP32, ids=str)
def test_the_bytes_of_the_cpu(dtype, shape, in_place):
    given = values(dtype, shape)
    want = torch.empty_like(given)
    cpu.scale(given, torch.tensor(0.3), want)
    out, x = scaled(given.clone(), 0.3, in_place)
    assert same_bytes(out, want) and same_bytes(x, want if in_place else given)


def test_a_factor_of_one_leaves_every_byte():
    """NaN with its payload, which a product would replace."""
    given = values(BF16, SHAPES[0])
    given.view(torch.int16)[1] = 0x7FA5
    out, _ = scaled(given.clone(), 1.0, True)
    assert same_bytes(out, given)
    copied, _ = scaled(given.clone(), 1.0, False)
    assert same_bytes(copied[2:], given[2:]) and copied[1].isnan().all()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_machine_code(target, dtype):
    x, factor = values(dtype, SHAPES[0]), torch.tensor(0.3)
    for out in (x, torch.empty_like(x)):
        (kernel,) = compiled(target, lambda out=out: launch._scale(x, factor, out, 132))
        assert kernel.name == "scale_kernel" and complaints(kernel) == []
