"""The SM90 kernels' first run on a card: `python -m tests.sparse_attn.gpu_smoke`.

One small forward, then one small ordered backward, against float64 on the CPU.  Each prints its
largest error and its share of the bound, and "ok".  A watchdog ends the process with the stack of a
launch that hangs.
"""

from __future__ import annotations

import faulthandler
import sys

import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from tests.oracles import sparse_attn as reference

SIZE, DIM, SECONDS = 256, 64, 120


def main() -> int:
    """0 if both are within their bounds, 1 if one is not."""
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(1, SIZE, 1, DIM, generator=generator).bfloat16() for _ in range(4)]
    q, k, v, dout = (t.cuda() for t in host)
    mask, scale = BlockMask.causal(SIZE, SIZE), DIM**-0.5
    inputs = [t.double().requires_grad_() for t in host[:3]]
    exact, exact_lse = reference.attention(*inputs, mask.to_dense(), scale=scale)
    bounds = reference.error_bounds(*host, mask.to_dense(), scores=reference.Scores(scale))

    faulthandler.dump_traceback_later(SECONDS, exit=True)
    out, lse = ck.block_sparse_attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    held = _compare("out", out, exact, bounds.out)
    print(f"lse: largest error {(lse.cpu().double() - exact_lse).abs().max():.3g}")

    faulthandler.dump_traceback_later(SECONDS, exit=True)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = ck.block_sparse_attention(*leaves, causal=True, schedule="spt")
    grads = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    expected = torch.autograd.grad(exact, inputs, host[3].double())
    for name, got, want in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        held &= _compare(name, got, want, getattr(bounds, name))
    print("ok" if held else "FAILED")
    return 0 if held else 1


def _compare(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> bool:
    error = (got.cpu().double() - want.detach()).abs()
    share = (error / bound).max().item()
    print(f"{name}: largest error {error.max():.3g}, {share:.2f} of its bound")
    return bool((error <= bound).all())


if __name__ == "__main__":
    sys.exit(main())
