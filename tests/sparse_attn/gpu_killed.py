"""Backwards without an end, to be killed: `python -m tests.sparse_attn.gpu_killed DIM`.

Says "in flight" when more are queued on the card than it can have done by then.  One that is not
killed ends itself (tests/sparse_attn/test_gpu.py kills it).
"""

from __future__ import annotations

import faulthandler
import sys

import torch

from cute_kernels.schedulers import BlockMask
from tests.sparse_attn.gpu_cases import gradients, problem

LENGTH, HEADS, QUEUED, SECONDS = 16_384, 16, 50, 100


def main(dim: int) -> None:
    """Never returns: the watchdog exits with 1."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    inputs = problem(BlockMask.causal(LENGTH, LENGTH), dim, heads=HEADS, kv_heads=HEADS)
    gradients(inputs)
    torch.cuda.synchronize()
    while True:
        for _ in range(QUEUED):
            gradients(inputs)
        # Asked of the card, not of a clock: the last of them has not ended.
        if not torch.cuda.current_stream().query():
            print("in flight", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
