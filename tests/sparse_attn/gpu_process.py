"""A backward in a process of its own: `python -m tests.sparse_attn.gpu_process digest|endless DIM`.

``digest`` prints that of the gradients.  ``endless`` is to be killed: it says "in flight" when more
are queued on the card than it can have done by then, and ends itself if nobody does.
"""

from __future__ import annotations

import faulthandler
import hashlib
import sys

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import masks
from tests import contract
from tests.sparse_attn.gpu_cases import gradients, large, problem

LENGTH, HEADS, QUEUED, SECONDS = 16_384, 16, 50, 100


def digest(dim: int) -> None:
    inputs = large(dim)
    grads = gradients(inputs, kinds.spt(masks.lower(inputs.mask).mask, heads=16))
    raw = b"".join(contract.bits(t).numpy().tobytes() for t in grads)
    print("digest", hashlib.sha256(raw).hexdigest())


def endless(dim: int) -> None:
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
    {"digest": digest, "endless": endless}[sys.argv[1]](int(sys.argv[2]))
