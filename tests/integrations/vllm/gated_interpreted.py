"""The gated activation of a GPU in Triton's interpreter, which test_gated.py starts.

In a process that has TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from cute_kernels.integrations.vllm import gated
from cute_kernels.rowwise.triton import launch

assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(3, 1030), (2, 2, 16), (0, 8)], ids=str)
def test_one_launch_has_the_bytes_of_two(kind, dtype, shape):
    generator = torch.Generator().manual_seed(2)
    x = (4 * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    with mock.patch("torch.cuda.device"):
        value = launch.activation(gate.contiguous(), kind) if x.numel() else gate
    out, want = gated.gated_rows(x, kind), value * up
    assert out.shape == want.shape and out.is_contiguous()
    assert torch.equal(out.view(torch.uint8), want.contiguous().view(torch.uint8))
