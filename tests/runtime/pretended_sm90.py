"""A pretended SM90 GPU: plans are cached, and its launchers run on CPU tensors.

Their kernels run in the simulator (`simulated`), or do nothing (`idle`).
"""

from __future__ import annotations

import contextlib
from unittest import mock

from cute_kernels import arch
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.norm import launch as norm_launch
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.sparse_attn import launch as attention_launch
from cute_kernels.sparse_attn import op as attention_op
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
        attention_op.KV_RANGES: attention_launch.plan_forward_kv_ranges,
        attention_op.VARLEN: attention_launch.plan_forward_varlen,
        f"{attention_op.VARLEN}_backward": attention_launch.plan_backward_varlen,
    }

    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    monkeypatch.setattr(
        dispatch, "launcher", lambda name, *where: plan_cache.launcher(planners[name])
    )
    monkeypatch.setattr(
        dispatch, "plan", lambda name, device, dtype, *operands: planners[name](*operands)
    )
    plan_cache.clear()
    yield
    plan_cache.clear()


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

    with contextlib.ExitStack() as stack:
        for module, names in (
            (gemm_launch, ("gemm_kernel", "skinny_kernel", "most_ctas", "max_clusters")),
            (norm_launch, ("_kernel", "most_ctas")),
            (attention_launch, ("kernel", "most_ctas")),
        ):
            for name in names:
                value = (lambda *a: 8) if name[0] == "m" else (lambda *a: nothing)
                stack.enter_context(mock.patch.object(module, name, value))
        yield
