"""FSDP2 on two cards over NCCL against one process, byte for byte: ``python -m`` this module.

Five steps of the tiny Llama through linear_logp (tests/integrations/tiny.py), bf16 (SM90 kernels)
and fp32 (Triton): log-probs, gradients and weights after each.  Exit code 1 on a difference.
``--cpu``: the same over gloo, to try the script itself.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from tests.integrations import tiny
from tests.ranks import named_on_all, on_cards, show

STEPS = 5


def main(device: str) -> int:
    """How much differs between two ranks and one process that takes both parts."""
    drawn, different = tiny.batch, 0
    tiny.batch = lambda *a: {name: t.to(device) for name, t in drawn(*a).items()}
    for dtype in (torch.bfloat16, torch.float32):
        for tied in (False, True):
            single = tiny.llama(tied).to(device, dtype)
            shard = tiny.fully_sharded(copy.deepcopy(single), "layers", device)
            names = named_on_all(tiny.differing_steps(shard, single, dist.get_rank(), STEPS))
            different += len(names)
            said = f"DIFFER: {names}" if names else f"{STEPS} steps, same bytes"
            show(f"FSDP2, {dtype}, tied {tied}: {said}")
    return different


if __name__ == "__main__":
    on_cards(main, tiny.RANKS)
