"""The sm_90 code of the Triton mhc, run in ptxsim: values, rows, cuts, sizes and addresses."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.mhc.triton import launch
from cute_kernels.mhc.triton.plan import Sizes
from ptxsim.skips import requires_core

from ..contract import same_bytes
from . import triton_cases as cases
from . import triton_rows as rows
from .triton_cases import BF16, FP32, Given, Shape, shifted
from .triton_harness import KERNELS, copy_of, simulated

pytestmark = [pytest.mark.sim, requires_core]

SHAPES = (
    Shape(37, 530, 4, "cn", BF16),
    Shape(9, 33, 2, "nc", FP32),
    Shape(70, 600, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(66, 1040, 2, "cn", BF16, bias=False),
)
#: What a fused multiply-add or another 2^y changes is not compared with the CPU's bytes here.
CHECKS = ("projection", "project_expanded", "projection_backward", "weights")


def by_night(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


#: By day the first two.
DAY_AND_NIGHT = [*SHAPES[:2], *(by_night(shape) for shape in SHAPES[2:])]


@pytest.mark.parametrize("shape", DAY_AND_NIGHT, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_values(check, shape):
    with simulated():
        cases.CHECKS[check](launch, cases.given(shape))


@pytest.mark.parametrize("shape", DAY_AND_NIGHT, ids=str)
def test_streams(shape):
    g = cases.given(shape)
    with simulated():
        cases.combine_within(launch, g)
        out = launch.reduce_channels(g.x, g.streams, cases.Upstream(g.dy, g.d_out), g.expand)
        cases.sums_over_channels(g, out)
        if out.d_bias is not None:
            cases.bias_sums(launch, g, out.d_bias)


def test_few_rows_show_in_none():
    with simulated():
        rows.few_rows(launch, Shape(0, 40, 2, "cn", BF16))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [
        Shape(0, 40, 2, "cn", BF16),
        Shape(0, 300, 4, "nc", FP32, "bf16x3", norm_weight=False),
        Shape(0, 530, 4, "cn", BF16),
        Shape(0, 520, 2, "nc", BF16, "bf16x3"),
    ],
    ids=str,
)
def test_no_row_shows(shape):
    with simulated():
        rows.no_row_shows(launch, shape, rows=33)


@pytest.mark.parametrize(
    ("n", "layout"), [(2, "cn"), by_night(4, "nc"), by_night(2, "nc"), by_night(4, "cn")]
)
def test_no_cut_shows(n, layout):
    g = cases.given(Shape(2 * 1024 + 77, 5, n, layout, BF16))
    with simulated() as kernels:
        rows.no_cut_shows(launch, g, 1024)
    assert {kernel.name for kernel in kernels} < set(sum(KERNELS.values(), ()))


@pytest.mark.parametrize(
    "shape", [Shape(9, 33, 2, "nc", BF16), by_night(Shape(37, 70, 4, "cn", FP32))]
)
def test_no_size_shows(tmp_path, shape):
    """Warps among them: what a thread holds decides no order."""
    other = copy_of(tmp_path)
    other.SIZES = Sizes((8, 32), 8, 2, 16, 2, 4)
    out = []
    for module in (launch, other):
        with simulated(module):
            out.append(results(module, cases.given(shape)))
    assert len(out[0]) > 15
    cases.equal(*out)


def results(module, g: Given) -> list[torch.Tensor]:
    """Results of every launcher."""
    n, streams = g.shape.n, g.streams
    form, both = cases.FORMS[1], cases.Upstream(g.dy, g.d_out, g.res, g.pre)
    out = module.project(g.x, g.mapping, streams, g.expand)
    found = [*out, *module.combine(g.x, streams, g.pre, g.expand)]
    found += [*module.coefficients(out, g.x.shape[1], g.gates, n, form)]
    by = cases.Expand(g.f, g.bias, g.post)
    found += module.reduce_channels(g.x, streams, cases.Upstream(g.dy, res=g.res), by, True)
    found += module.reduce_channels(g.x, streams, both, None, True)
    gates = (g.h, g.ms, g.gates, n, form, g.pre, g.post, g.res)
    found += module.coefficients_backward(*gates)
    args = (g.x, g.h, g.ms, g.mapping, streams, both)
    found += module.project_backward(*args, (True, True))
    into = [torch.full(t.shape, 0.1) for t in (g.mapping.phi, g.mapping.phi[0])]
    module.weights(found[-1], g.mapping, *into)
    parts = [t for t in found if isinstance(t, cases.Parts) and t.values.dim() == 2]
    sums = [torch.full(t.values.shape[1:], 0.1) for t in parts]
    for part, total in zip(parts, sums, strict=True):
        module.add_parts(part, total)
    tensors = [t.values if isinstance(t, cases.Parts) else t for t in found if t is not None]
    return [*tensors, *into, *sums]


@pytest.mark.parametrize(
    ("n", "layout", "dtype"),
    [
        (2, "nc", BF16),
        *(by_night(4, layout, dtype) for layout in ("cn", "nc") for dtype in (BF16, FP32)),
    ],
)
def test_no_address_shows(n, layout, dtype):
    """Other loads are compiled for what is not aligned; the bytes are the same."""
    g = cases.given(Shape(19, 128, n, layout, dtype))
    moved = g._replace(
        **{name: shifted(getattr(g, name)) for name in ("x", "dy", "f", "d_out", "bias", "ms")},
        **{name: getattr(g, name).contiguous() for name in ("h", "pre", "post", "res")},
        mapping=g.mapping._replace(
            phi=shifted(g.mapping.phi), norm_weight=shifted(g.mapping.norm_weight)
        ),
    )
    with simulated() as kernels:
        want = results(launch, g)
        count = len(kernels)
        got = results(launch, moved)
    assert all(a.hash != b.hash for a, b in zip(kernels[:2], kernels[count:], strict=False))
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
