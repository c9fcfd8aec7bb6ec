"""Compact coefficients are loaded 16 bytes at a time: the bytes of any other stride."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc import launch
from cute_kernels.mhc.config import AHEAD, CombineConfig, ReduceConfig, combine_config
from cute_kernels.mhc.tensors import Expand, Upstream
from tests.contract import same_bytes
from tests.mhc import sm90_cases as cases
from tests.mhc.simulated import compiled, simulated
from tests.mhc.triton_cases import BF16, FP32, Given, Shape, given
from tests.ptxsim.available import requires_sim

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_strides_do_not_show"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)]

#: Whole batches, single vectors and a part of one, in one row.
SHAPE = Shape(3, 2 * 128 * 5 + 2 * 128 + 34, 4, "cn", BF16)


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def elementwise(g: Given) -> tuple:
    """Results of the kernels that read coefficients."""
    by = Expand(g.f, g.bias, g.post)
    y, _ = launch.combine(g.x, g.streams, None, g.expand)
    _, out = launch.combine(g.x, g.streams, g.pre, None)
    ends = launch.reduce_channels(g.x, g.streams, Upstream(g.dy, res=g.res), by, True)
    of_out = Upstream(d_out=g.d_out, pre=g.pre)
    begins = launch.reduce_channels(g.x, g.streams, of_out, None, True)
    tensors = (y, out, *ends[:5], ends.d_bias and ends.d_bias.values, *begins[:5])
    return tuple(t for t in tensors if t is not None)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        by_night(SHAPE._replace(bias=False, c=2 * 128 * 4)),
        by_night(SHAPE._replace(n=2, c=SHAPE.c * 2)),
        by_night(SHAPE._replace(dtype=FP32)),
        by_night(SHAPE._replace(layout="nc", c=40)),
    ],
    ids=str,
)
def test_strides_do_not_show(shape):
    g = given(shape)
    packed = g._replace(pre=g.pre.clone(), post=g.post.clone(), res=g.res.clone())
    used = set()

    def kernel(chosen):
        if isinstance(chosen, (CombineConfig, ReduceConfig)):
            used.add((type(chosen), chosen.packed))
        return compiled(chosen)

    results = []
    for operands in (g, packed):
        assert operands.post.is_contiguous() == (operands is packed)
        with simulated(2, kernel), cases.poisoned():
            results.append(elementwise(operands))
    assert all(map(same_bytes, *results))
    both = {(ReduceConfig, False), (ReduceConfig, True)}
    both |= {(CombineConfig, False), (CombineConfig, shape.layout == "cn")}
    assert used == both


@pytest.mark.parametrize("n", [4, by_night(2)])
def test_strides_of_h_do_not_show(n):
    """H and logits of any stride: the bytes of those that are loaded 16 bytes at a time."""
    g = given(Shape(35, 1, n, "cn", FP32))
    used, results = set(), []

    def moved(t: torch.Tensor) -> torch.Tensor:
        columns = t.shape[1]
        return torch.full((len(t), columns + 5), float("nan"))[:, 1 : columns + 1].copy_(t)

    def kernel(chosen):
        used.add((chosen.source, chosen.packed))
        return compiled(chosen)

    for h, logits in ((moved(g.h), moved(g.res)), (g.h.clone(), g.res.clone())):
        with simulated(2, kernel), cases.poisoned():
            gates = launch.gate(h, g.ms, g.gates, n)
            results.append((*gates, launch.sinkhorn(logits, n, cases.FORMS[0])))
    assert all(map(same_bytes, *results))
    assert used == {(source, packed) for source in "hz" for packed in (False, True)}


def test_the_choice_divides_rows():
    """Vectors in flight of the sizes that are measured: whole batches."""
    chosen = {
        c: combine_config("bf16", 4, "cn", True, True, False, True, c)
        for c in (2560, 4096, 5120, 7168)
    }
    for c, one in chosen.items():
        assert one.ahead in AHEAD and c * 4 // 8 % (one.threads * one.ahead) == 0, c


def test_every_configuration_is_catalogued():
    entries = {entry.kernel.identity for entry in launch.catalogue()}
    for n, layout, wide, packed in ((4, "cn", True, True), (2, "nc", True, True), (4, "cn", 0, 0)):
        for expand, bias in ((False, False), (True, False), (True, True)):
            for c in (8, 512, 2560, 7168):
                flags = bool(wide), expand, bias, bool(packed)
                one = combine_config("fp32", n, layout, *flags, c)
                assert launch.entry(one).identity in entries
