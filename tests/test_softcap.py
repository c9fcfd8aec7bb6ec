"""Soft caps: one limit for every op and backend, and the error that is left below it."""

from __future__ import annotations

import inspect
import math
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch
from cute_kernels.errors import ArgumentValueError
from cute_kernels.logp import checks as logp_checks
from cute_kernels.runtime import dispatch
from cute_kernels.sparse_attn import checks as attention_checks
from cute_kernels.sparse_attn.api import kv_ranges, sequence_attention
from tests.option_table import calls
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32
#: The largest cap, and the most by which a capped value is off in parts of its cap.
MOST, ERROR = 1024.0, 2.0**-21
BACKENDS = (arch.CPU, arch.CUTE_SM90, arch.TRITON)


Q, K = drawn(1, 9, 2, 64, seed=1), drawn(1, 9, 1, 64, seed=2)
PAGES = drawn(1, 16, 1, 64, seed=2)
PAGED = [torch.tensor(t, dtype=torch.int32) for t in ([[0]], [9], [0, 9])]
TARGET = torch.tensor([3, 1, 4])
RANGES = kv_ranges(None, None, 0, 0, (1, 9, 9))
OPS = {
    "linear_logp": lambda **o: ck.linear_logp(
        drawn(3, 16, seed=3), drawn(8, 16, seed=4), TARGET, **o
    ),
    "linear_policy_loss": lambda **o: ck.linear_policy_loss(
        drawn(3, 16, seed=3), drawn(8, 16, seed=4), TARGET, loss="cross_entropy", **o
    ),
    "log_probs": lambda **o: ck.log_probs(drawn(3, 8, seed=5), TARGET, **o),
    "block_sparse_attention": lambda **o: ck.block_sparse_attention(Q, K, K, **o),
    "block_sparse_attention_varlen": lambda **o: ck.block_sparse_attention_varlen(
        Q[0], K[0], K[0], torch.tensor([0, 4, 9]), **o
    ),
    "paged_attention": lambda **o: ck.paged_attention(Q[0], PAGES, PAGES, *PAGED, **o),
    "sequence_attention": lambda **o: sequence_attention(Q, K, K, RANGES, **o),
}


def test_every_op_with_a_softcap_is_here():
    with_one = {
        op for op in calls.ops() if "softcap" in inspect.signature(calls.function_of(op)).parameters
    }
    assert with_one == OPS.keys() - {"sequence_attention"}


@pytest.mark.parametrize("softcap", [1025.0, 2.0**30, 1e30, math.inf, math.nan, -1.0, 1e-35])
@pytest.mark.parametrize("op", OPS)
def test_the_limits_are_the_same_everywhere(op, softcap):
    """Refused by name before a backend is asked, in the same words."""
    message = set()
    for backend in BACKENDS:
        with (
            mock.patch.object(dispatch, "backend", lambda *asked, name=backend: name),
            mock.patch.object(dispatch, "launcher", side_effect=AssertionError("a launcher ran")),
            pytest.raises(ArgumentValueError, match=r"^softcap: expected .* to 1024") as refused,
        ):
            OPS[op](softcap=softcap)
        message.add(str(refused.value))
    assert len(message) == 1


def test_the_limit_is_one_number():
    assert logp_checks.MOST_SOFTCAP == attention_checks.MOST_SOFTCAP == MOST
    for call in OPS.values():
        call(softcap=MOST)


def capped(z: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(z.double() / softcap)


@pytest.mark.parametrize("softcap", [0.5, 30.0, MOST])
def test_the_error_of_a_capped_logit(softcap):
    """The difference of two entries shows it: log p alone has the sum's error too."""
    z = torch.cat([torch.linspace(-3, 3, 401) * size for size in (1e-3, 1.0, 30.0)])
    logits = torch.stack([z, torch.zeros_like(z)], 1)
    # log p of the first, less that of the second, is the capped logit.
    both = [
        ck.log_probs(logits, torch.full((len(z),), i), softcap=softcap).double() for i in (0, 1)
    ]
    want = capped(z, softcap)
    error = (both[0] - both[1] - want).abs()
    rounding = 2.0**-22 * (both[0].abs() + both[1].abs()) + 2.0**-45
    assert (error <= 2 * ERROR * softcap + rounding).all()
    # The bound is not idle: near the limit logits of the size of an error are lost.
    assert softcap < MOST or float(error.max()) > ERROR * softcap / 64
