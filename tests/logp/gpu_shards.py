"""A vocabulary on two cards over NCCL: one rank's bytes against two ranks', a line for each case.

``python -m tests.logp.gpu_shards`` starts both ranks itself.  Exit code 1 on a difference.
``--cpu``: the same over gloo, small, to try the script itself.
"""

from __future__ import annotations

import torch.distributed as dist

import cute_kernels as ck
from tests.logp.cases import BF16, FP16, FP32
from tests.logp.shard_cases import Cut, at_leaves, case_of, differing
from tests.ranks import named_on_all, on_cards, show

RANKS = 2


def cut(tokens, width, vocab, rows, dtype=BF16, first=4, bias=False) -> Cut:
    """``first``: leaves of rank 0."""
    case = case_of(vocab, rows, dtype, tokens=tokens, width=width, bias=bias, seed=tokens)
    return at_leaves(case, [0, first])


def cuts(cpu: bool) -> list[Cut]:
    if cpu:
        return [cut(7, 40, 256, 256, bias=True), cut(9, 33, 1000, 1024, first=3)]
    return [
        cut(1, 512, 8192, 8192),
        cut(37, 512, 8192, 8192, bias=True),
        cut(300, 1000, 32000, 32128, first=3),
        cut(300, 512, 32000, 32000, FP16),
        cut(130, 256, 4096, 4096, FP32, bias=True),
        cut(4096, 4096, 131072, 131072),
    ]


def main(device: str) -> int:
    """Run the cases; how many results differ."""
    different = 0
    show(f"{RANKS} ranks, {ck.contract_id('linear_logp', device)}")
    for one in cuts(device == "cpu"):
        own = differing(one, dist.group.WORLD, dist.get_rank(), device=device)
        names = named_on_all(own)
        different += len(names)
        said = f"DIFFER: {', '.join(names)}" if names else "same bytes"
        show(f"{' '.join(map(str, one.case))}: {said}")
    return different


if __name__ == "__main__":
    on_cards(main, RANKS)
