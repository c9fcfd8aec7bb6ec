"""A pretended SM90 GPU: plans are cached, and its launchers run on CPU tensors.

Their kernels run in the simulator (`simulated`), or do nothing (`idle`).
"""

from __future__ import annotations

import contextlib

from cute_kernels import arch
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.norm import launch as norm_launch
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.sparse_attn import launch as attention_launch
from cute_kernels.sparse_attn import op as attention_op
from tests import plans
from tests.gemm.simulated import simulated as simulated_gemm
from tests.norm.simulated import simulated as simulated_norm
from tests.sparse_attn.simulated import simulated as simulated_attention


@contextlib.contextmanager
def pretended(monkeypatch):
    """CPU tensors count as those of an SM90 GPU; no kernel runs yet."""
    planners = {
        "gemm": gemm_launch.plan_gemm,
        "column_sum": gemm_launch.plan_column_sum,
        "norm_forward": norm_launch.plan_forward,
        "norm_backward": norm_launch.plan_backward,
        "norm_add_parts": norm_launch.plan_add_parts,
        attention_op.NAME: attention_launch.plan_forward,
        f"{attention_op.NAME}_backward": attention_launch.plan_backward,
    }

    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    monkeypatch.setattr(
        dispatch, "launcher", lambda name, *where: plan_cache.launcher(planners[name])
    )
    with plans.cached(
        monkeypatch, lambda name, device, dtype, *operands: planners[name](*operands)
    ):
        yield


@contextlib.contextmanager
def simulated():
    """The kernels of all systems in the simulator."""
    with simulated_gemm(), simulated_norm(), simulated_attention(ctas=4):
        yield


@contextlib.contextmanager
def idle():
    """Kernels that do nothing: what is asked of a call is all that counts."""

    def nothing(*args):
        pass

    def kernel(*chosen):
        return nothing

    def most(device):
        return 8

    products = {"gemm_kernel": kernel, "skinny_kernel": kernel, "max_clusters": most}
    with (
        plans.patched(gemm_launch, **products, most_ctas=most),
        plans.patched(norm_launch, _kernel=kernel, most_ctas=most),
        plans.patched(attention_launch, kernel=kernel, most_ctas=most),
    ):
        yield
