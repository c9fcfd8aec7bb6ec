"""The Triton kernel that finishes states: exact.finish's bytes in ptxsim; its machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.logp import exact
from cute_kernels.logp.triton import launch
from tests.contract import same_bytes

from .finished_states import drawn
from .triton_harness import compiled, complaints, copy_of, simulated

pytestmark = pytest.mark.simulates("logp.triton")


def differ(states: torch.Tensor, rows: exact.Rows, module=launch) -> bool:
    """Whether a result has other bytes than exact.finish; a device chooses those of NaN."""
    with simulated(module):
        got = module._finish(states, rows)
    for ours, want in zip(got, exact.finish(states, rows), strict=True):
        assert (ours is None) == (want is None)
        if want is not None:
            known = ~want.isnan()
            if not torch.equal(ours.isnan(), ~known) or not same_bytes(ours[known], want[known]):
                return True
    return False


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("parts", [1, 3, 40, 100])
def test_the_bytes_of_exact_finish(parts, entropy):
    assert not differ(*drawn(parts, entropy))


def test_parts_that_are_no_neighbours():
    """Shards of ranks are gathered, and a caller may give columns of a wider tensor."""
    states, rows = drawn(6, True)
    assert not differ(states.repeat_interleave(2, 0)[::2], rows)


DEFECTS = {
    "sums stay in their bins": ("at, here, own, by)\n        if", "at, here, 0, by)\n        if"),
    "weighted sums stay": ("_WEIGHTED, at, here, own,", "_WEIGHTED, at, here, 0,"),
    "a sum in fp32": ("total = total * _STEP + s[_BINS - 1 - j]",
        "total = (total * _STEP + s[_BINS - 1 - j]).to(tl.float32).to(tl.float64)"),
    "four terms less": ("tl.static_range(1, _TERMS)", "tl.static_range(5, _TERMS)"),
    "constants in fp32": ("tl.full((ROWS,), value, tl.float64)",
                          "tl.full((ROWS,), value, tl.float32).to(tl.float64)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_shows(name, tmp_path):
    mutant = copy_of(tmp_path, DEFECTS[name])
    assert any(differ(*drawn(parts, True), mutant) for parts in (3, 40, 100))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("entropy", [False, True])
def test_machine_code(target, entropy):
    states, rows = drawn(40, entropy)
    (kernel,) = compiled(target, lambda: launch._finish(states, rows))
    assert kernel.name == "finish_kernel" and complaints(kernel) == []
