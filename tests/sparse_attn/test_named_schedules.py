"""Named schedules without a mask, and sinks of no weight."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ScheduleError
from cute_kernels.sparse_attn import checks


def operands(q_len: int = 300, kv_len: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    q = torch.randn(1, q_len, 4, 64, generator=generator).bfloat16().requires_grad_()
    return q, torch.randn(1, kv_len, 2, 64, generator=generator).bfloat16()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", checks.SCHEDULES)
def test_a_schedule_is_refused_before_the_forward_or_its_backward_runs(schedule, causal):
    q, k = operands()
    try:
        out = ck.block_sparse_attention(q, k, k, causal=causal, schedule=schedule)
    except ScheduleError:
        assert schedule in checks.MAY_BE_UNSAFE
        return
    out.sum().backward()
    assert schedule not in checks.MAY_BE_UNSAFE and q.grad.abs().sum() > 0


def test_a_sink_of_no_weight_has_no_gradient_where_rows_see_nothing():
    """-inf is the log weight of no sink; rows without a key have a log sum of -inf too."""
    q, k = operands(200, 128)
    allowed = torch.arange(200)[:, None].expand(200, 128) < 128
    mask = ck.BlockMask.from_dense(allowed)
    sinks = torch.tensor([-math.inf, 0.3, -math.inf, -1.0], requires_grad=True)
    out = ck.block_sparse_attention(q, k, k, mask, sinks=sinks)
    generator = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    assert sinks.grad[[0, 2]].tolist() == [0.0, 0.0]
    assert sinks.grad[[1, 3]].abs().min() > 0 and q.grad.isfinite().all()
