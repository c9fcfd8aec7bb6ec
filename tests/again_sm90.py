"""An SM90 GPU that is none: its calls are remembered, its launchers run on CPU tensors.

Their kernels run in the simulator (`simulated`), or do nothing (`idle`).
"""

from __future__ import annotations

import contextlib
from unittest import mock

from cute_kernels import again, arch, dispatch
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.norm import launch as norm_launch
from cute_kernels.sparse_attn import launch as attention_launch
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn import sequence_op
from tests.gemm.simulated import simulated as simulated_gemm
from tests.norm.simulated import simulated as simulated_norm
from tests.sparse_attn.simulated import simulated as simulated_attention


@contextlib.contextmanager
def pretended(monkeypatch):
    """CPU tensors are remembered, and an SM90 GPU is what they are on; no kernel runs yet."""
    launchers = {
        "gemm": gemm_launch.gemm,
        "column_sum": gemm_launch.column_sum,
        "norm_forward": norm_launch.forward,
        "norm_backward": norm_launch.backward,
        "norm_add_parts": norm_launch.add_parts,
        attention_op.NAME: attention_launch.forward,
        f"{attention_op.NAME}_backward": attention_launch.backward,
        sequence_op.SPANS_NAME: attention_launch.forward_of_spans,
    }
    monkeypatch.setattr(again, "remembers", lambda t: True)
    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    monkeypatch.setattr(dispatch, "launcher", lambda name, *where: launchers[name])
    again.forget()
    yield
    again.forget()


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
            (attention_launch, ("forward_kernel", "most_ctas")),
        ):
            for name in names:
                value = (lambda *a: 8) if name[0] == "m" else (lambda *a: nothing)
                stack.enter_context(mock.patch.object(module, name, value))
        yield
