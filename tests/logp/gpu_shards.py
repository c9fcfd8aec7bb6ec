"""A vocabulary on two cards over NCCL: one rank's bytes against two ranks', a line for each case.

``python -m tests.logp.gpu_shards`` starts both ranks itself.  Exit code 1 on a difference.
``--cpu``: the same over gloo, small, to try the script itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.schedulers.tiles import leaves
from tests.ranks import named_on_all, on_cards, show

RANKS = 2


class Case(NamedTuple):
    """Sizes; ``rows``: of the head with its padding; ``first``: leaves of rank 0."""

    tokens: int
    width: int
    vocab: int
    rows: int
    dtype: torch.dtype = torch.bfloat16
    first: int = 4
    bias: bool = False


CASES = [
    Case(1, 512, 8192, 8192),
    Case(37, 512, 8192, 8192, bias=True),
    Case(300, 1000, 32000, 32128, first=3),
    Case(300, 512, 32000, 32000, torch.float16),
    Case(130, 256, 4096, 4096, torch.float32, bias=True),
    Case(4096, 4096, 131072, 131072),
]
SMALL = [Case(7, 40, 256, 256, bias=True), Case(9, 33, 1000, 1024, first=3)]


def differing(case: Case, device: str, rank: int) -> list[str]:
    """The results of this rank that are not its parts of one rank's."""
    generator = torch.Generator(device).manual_seed(case.tokens)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    hidden = drawn(case.tokens, case.width).to(case.dtype)
    weight = (drawn(case.rows, case.width) * case.width**-0.5).to(case.dtype)
    bias = drawn(case.rows).to(case.dtype) if case.bias else None
    draw = torch.randint(0, case.vocab, (case.tokens,), generator=generator, device=device)
    target = torch.where(draw % 7 == 1, -100, draw)
    upstream = drawn(2, case.tokens)
    cut = leaves.length(case.vocab) * case.first
    own = slice(0, cut) if rank == 0 else slice(cut, case.rows)

    def run(part: slice, **options):
        h = hidden.clone().requires_grad_()
        w = weight[part].clone().requires_grad_()
        b = None if bias is None else bias[part].clone().requires_grad_()
        results = ck.linear_logp(
            h, w, target, b, order="tree", temperature=0.9, return_entropy=True,
            vocab_size=case.vocab, **options,
        )  # fmt: skip
        torch.autograd.backward(results, tuple(upstream))
        return [*results, h.grad, w.grad, *([] if b is None else [b.grad])]

    whole = run(slice(0, case.rows))
    whole[3:] = [t[own] for t in whole[3:]]
    got = run(own, group=dist.group.WORLD, vocab_start=own.start)
    names = ("logp", "entropy", "dhidden", "dweight", "dbias")
    pairs = zip(names, got, whole, strict=False)
    return [name for name, a, b in pairs if not _same(a.detach(), b.detach())]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Raw bytes, on the device."""
    views = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and bool(torch.eq(*views).all())


def main(device: str) -> int:
    """Run the cases; how many results differ."""
    different = 0
    show(f"{RANKS} ranks, {ck.contract_id('linear_logp', device)}")
    for case in SMALL if device == "cpu" else CASES:
        names = named_on_all(differing(case, device, dist.get_rank()))
        different += len(names)
        said = f"DIFFER: {', '.join(names)}" if names else "same bytes"
        show(f"{' '.join(map(str, case))}: {said}")
    return different


if __name__ == "__main__":
    on_cards(main, RANKS)
