"""Kernels of a backward apart: which kernel is which, and whose each call is."""

from __future__ import annotations

import pytest
import torch

from perf.attention import kernel_times
from perf.attention.cases import Case, Problem
from perf.attention.kernel_times import Event
from tests.oracles import sparse_attn as reference
from tests.ptxsim import available

simulated = available.import_module("tests.sparse_attn.simulated")

OURS = "kernel_cutlass_kernel_cute_kernelssparse_attnkernel_bwd_{}Backward_object_at__0"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_bwd_{}FlashAttentionBackward_object_at__0"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
NAMES = {
    "pre": (OURS.format("pre_sm90"), FA4.format("preprocess")),
    "main": (OURS.format("sm90"), OURS.format("wide_sm90"), FA4.format("sm90")),
    "post": (OURS.format("post_sm90"), FA4.format("postprocess")),
    "spin": (SPIN,),
    "other": ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>",),
}


@pytest.mark.parametrize(("stage", "name"), [(s, n) for s, names in NAMES.items() for n in names])
def test_stages(stage, name):
    assert kernel_times.stage_of(name) == stage


def timeline(*calls: tuple[float, ...]) -> list[Event]:
    """Kernels of ours, each call behind a spin: (start, end) of pre, main, post."""
    events = []
    for times in calls:
        events.append(Event(SPIN, times[0] - 30, times[0] - 1))
        names = (NAMES[stage][0] for stage in ("pre", "main", "post"))
        pairs = zip(names, times[::2], times[1::2], strict=True)
        events += [Event(name, start, end) for name, start, end in pairs]
    return events


def test_times_of_kernels_that_overlap():
    first, second = (100, 110, 112, 160, 162, 170), (300, 310, 309, 361, 358, 370)
    calls = kernel_times.split(timeline(first, second)[::-1])
    medians = kernel_times.medians(calls, ["before", "ours"])
    assert medians["before"] == {
        "pre": 10, "main": 48, "post": 8, "other": 0, "span": 70, "overlap": -4
    }  # fmt: skip
    assert (medians["ours"]["span"], medians["ours"]["overlap"]) == (70, 4)


def test_a_lost_call_is_an_error():
    calls = kernel_times.split(timeline((100, 110, 112, 160, 162, 170)))
    with pytest.raises(ValueError, match="expected kernels of 2 calls"):
        kernel_times.medians(calls, ["ours", "fa4"])
    with pytest.raises(ValueError, match="expected kernels of 1 calls"):
        kernel_times.medians([[]], ["ours"])


def test_every_kernel_of_a_case_is_compiled_ahead():
    names = [kernel.name for kernel in kernel_times.kernels()]
    # Two forms: at D = 64 six variants; at D = 128 eight, as of two the default is one of two and
    # "ours" of many key blocks is "ours_pdl".  With those before and after them.
    assert names.count("sparse_attn_bwd_sm90") == 28
    assert names.count("sparse_attn_bwd_pre_sm90") == names.count("sparse_attn_bwd_post_sm90") == 8


@available.requires_sim
@pytest.mark.sim
@pytest.mark.parametrize(
    "names",
    [
        ["ours", "ours_before"],
        pytest.param([*kernel_times.VARIANTS][:6], marks=pytest.mark.nightly),
    ],
)
def test_variants_are_planned_and_compared(names):
    case = Case("window", 256, 64, 2, 1, 256)
    problem = Problem(case, "cpu")
    q, k, v, dout = problem.drawn(0)
    out, lse = reference.attention(q, k, v, problem.mask.to_dense(), scale=case.scale)
    t = problem.inputs((q, k, v, dout), out.bfloat16(), lse.float())
    with simulated.simulated(ctas=3):
        calls = {name: kernel_times.ours(problem, t, kernel_times.VARIANTS[name]) for name in names}
        kernel_times.require_bytes(calls, t)
        other = t._replace(dout=torch.randn_like(t.dout))
        calls["ours_before"] = lambda _, run=calls["ours_before"]: run(other)
        with pytest.raises(AssertionError, match="ours_before: dq differs"):
            kernel_times.require_bytes(calls, t)
