"""The Triton linear_logp, as it is launched, compiled for NVIDIA and AMD without a GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.logp.triton import launch

from .. import triton_inspect as inspect
from .. import triton_runner
from ..triton_runner import NARROW_TILES, TARGETS, sizes_of_float_sums
from . import policy_cases
from . import triton_cases as cases
from .finished_states import drawn
from .triton_cases import BF16, FP16, FP32, NAMES
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("logp.triton")

#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves on sm_90 for the
#: states of single rows with a softcap and an entropy.
STACK = 8
#: Every value of each field, and both directions of training: dtype, tokens, softcap, entropy.
EVERY_COMMIT = (
    ("sm_80", FP32, 64, 0.0, True),
    ("sm_90", BF16, 1, 20.0, False),
    ("gfx942", FP16, 64, 20.0, True),
    ("gfx950", BF16, 1, 0.0, False),
)
ALL = tuple(itertools.product(TARGETS, NAMES, (64, 1), (0.0, 20.0), (True, False)))


def complaints(kernel) -> list[str]:
    return triton_runner.complaints(kernel, STACK, NARROW_TILES)


def of_logits(module, dtype, tokens, softcap, entropy, layout=cases.repeated):
    """Launches the states and the gradients of [tokens, 512] logits."""
    given = cases.case(cases.Shape(tokens, 512, softcap=softcap), dtype)
    given = given._replace(logits=layout(given.logits))
    upstream = cases.upstream_of(given, entropy)

    def call():
        module.states_of_logits(*given, entropy)
        module.gradients_of_logits(*given, upstream, dtype)

    return call


@pytest.mark.parametrize(
    ("target", "dtype", "tokens", "softcap", "entropy"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in ALL
    ],
    ids=str,
)
def test_logits(target, dtype, tokens, softcap, entropy):
    """No atomics, no spills, nothing fused, no order of sums that is not written."""
    kernels = RUNNER.compiled(target, of_logits(launch, dtype, tokens, softcap, entropy))
    assert [kernel.name for kernel in kernels] == ["states_kernel", "gradients_kernel"]
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name
    assert len(sizes_of_float_sums(kernels[0].asm["ttir"])) == 4 * (1 + entropy)
    assert sizes_of_float_sums(kernels[1].asm["ttir"]) == []
    if target.startswith("sm_"):
        # One for each of a thread's eight logits; with an entropy, one for each of its units.
        written, gradients = (inspect.text(k).count("fma.rn.f32") for k in kernels)
        assert gradients == 8 and written - 8 in ((1, 2) if entropy else (0,))


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(BF16, True), *(pytest.param(d, d == FP32, marks=pytest.mark.nightly) for d in (FP16, FP32))],
    ids=str,
)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=() if target in ("sm_80", "gfx950") else pytest.mark.nightly)
        for target in TARGETS
    ],
)
def test_heads(target, dtype, bias):
    """Logits in fp32, bias and gradients in the dtype of hidden; one code for every block."""
    given = cases.hidden(dtype, "chain", bias=bias, tokens=16)
    upstream = cases.upstream_of(
        cases.Case(torch.zeros(16, 1), cases.Logits(0, 1, 0.0), given.rows), True
    )

    def call():
        with cases.units(launch, 132):
            launch.states(*given, True)
            launch.gradients(*given, upstream)

    for kernel in RUNNER.compiled(target, call):
        assert complaints(kernel) == [], kernel.name


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.nightly)])
def test_sizes_are_not_compiled_in(target):
    """Of one alignment: more tokens, columns, parts and another start launch the same code."""
    kernels = []
    for tokens, n, units in ((8, 160, 1), (16, 4096, 132), (90, 176, 132)):
        given = cases.case(cases.Shape(tokens, n, start=16 * tokens))

        def call(given=given, units=units):
            with cases.units(launch, units):
                launch.states_of_logits(*given, True)

        kernels += RUNNER.compiled(target, call)
    assert len({kernel.hash for kernel in kernels}) == 1


@pytest.mark.parametrize(
    "layout", [cases.column_major, pytest.param(cases.spread, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx950", marks=pytest.mark.nightly)])
def test_layouts_change_loads_only(target, layout):
    plain = RUNNER.compiled(target, of_logits(launch, BF16, 64, 20.0, True))
    other = RUNNER.compiled(target, of_logits(launch, BF16, 64, 20.0, True, layout))
    for one, two in zip(plain, other, strict=True):
        assert one.hash != two.hash
        assert complaints(two) == []


@pytest.mark.parametrize("target", TARGETS)
def test_finish(target):
    for entropy in (False, True):
        given = drawn(40, entropy)
        (kernel,) = RUNNER.compiled(target, lambda given=given: launch.finish(*given))
        assert kernel.name == "finish_kernel" and complaints(kernel) == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_scale(target, dtype):
    x, factor = policy_cases.values(dtype, cases.SCALED[0]), torch.tensor(0.3)
    for out in (x, torch.empty_like(x)):
        (kernel,) = RUNNER.compiled(target, lambda out=out: launch.scale(x, factor, out))
        assert kernel.name == "scale_kernel" and complaints(kernel) == []


def test_narrow_offsets_are_found():
    """Of these tiles; tests/norm has a mutant of every other complaint of the same checks."""
    wide = "ptrs = row_ptrs[:, None, None] + columns.to(tl.int64) * logits_n"
    narrow = "ptrs = logits_ptr + rows[:, None, None] * logits_t + columns * logits_n"
    mutant = RUNNER.mutant((wide, narrow))
    kernels = RUNNER.compiled("sm_90", of_logits(mutant, FP32, 64, 20.0, True), mutant)
    assert "offsets of 32 bits" in complaints(kernels[0])
