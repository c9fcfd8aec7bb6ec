"""Problems of the GPU tests of attention: operands on the card, runs through the op, bounds."""

from __future__ import annotations

from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn.config import VALUE_DIMS
from tests import contract
from tests.oracles import sparse_attn as reference

SEED = 17
DEVICE = "cuda"


class Problem(NamedTuple):
    """Operands and gradients on the card, and a mask there."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    mask: BlockMask
    softcap: float = 0.0

    def part(self, **changes) -> Problem:
        """Problem with other operands, each in memory of its own."""
        return self._replace(**{n: _own(t) for n, t in changes.items()})


def _own(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def problem(
    mask: BlockMask,
    dim: int,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    seed: int = SEED,
) -> Problem:
    """Random tensors; keys of different sizes, so that some rows are peaked and some are flat."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    widths = dim, VALUE_DIMS[dim]
    q, dout = (normal(batch, mask.q_len, heads, n) for n in widths)
    k, v = (normal(batch, mask.kv_len, kv_heads, n) for n in widths)
    k *= normal(batch, mask.kv_len, kv_heads, 1).exp2()
    tensors = (t.to(dtype) for t in (q, k, v, dout))
    return Problem(*tensors, normal(batch, heads, mask.q_len), mask.to(DEVICE), softcap)


def documents(length: int) -> BlockMask:
    """Consecutive documents of drawn lengths."""
    ids = torch.randint(0, 5, (1, length), generator=torch.Generator().manual_seed(1))
    return BlockMask.document(ids.sort(dim=1).values)


def scattered(q_len: int, kv_len: int, batch: int = 1) -> BlockMask:
    """Drawn elements, with empty rows, an empty block of rows and an empty block of keys."""
    generator = torch.Generator().manual_seed(q_len)
    allowed = torch.rand(batch, 1, q_len, kv_len, generator=generator) < 0.3
    allowed[:, :, 50:70] = False
    allowed[:, :, 128:256] = False
    allowed[..., 128:256] = False
    return BlockMask.from_dense(allowed)


#: Every form, tails on both sides, more queries than keys and fewer, empty rows and columns.
MASKS = {
    "one": lambda: BlockMask.full(1, 1),
    "full": lambda: BlockMask.full(256, 512),
    "full, tails": lambda: BlockMask.full(65, 129),
    "causal": lambda: BlockMask.causal(512, 512),
    "causal, tails": lambda: BlockMask.causal(769, 383),
    "window": lambda: BlockMask.sliding_window(700, 700, left=200, right=20),
    "documents": lambda: documents(640),
    "prefix": lambda: BlockMask.prefix_lm(400, 400, prefix=150),
    "scattered": lambda: scattered(383, 500),
    "scattered, two batches": lambda: scattered(300, 300, 2),
}
#: (batch, query heads, KV heads): MHA, GQA in two batches, MQA.
HEADS = ((1, 1, 1), (2, 4, 2), (2, 3, 1))


def forward(given: Problem, mask: BlockMask | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the op."""
    with torch.no_grad():
        return ck.block_sparse_attention(
            given.q, given.k, given.v, mask or given.mask, softcap=given.softcap, return_lse=True
        )


def gradients(given: Problem, schedule="auto", deterministic=True, lse=False):
    """(dq, dk, dv) of the op; ``lse``: with a gradient of lse too."""
    leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
    outputs = ck.block_sparse_attention(
        *leaves,
        given.mask,
        softcap=given.softcap,
        schedule=schedule,
        deterministic=deterministic,
        return_lse=True,
    )
    if lse:
        return torch.autograd.grad(outputs, leaves, (given.dout, given.dlse))
    return torch.autograd.grad(outputs[:1], leaves, given.dout)


def exact(given: Problem, lse: bool = False):
    """((out, lse, dq, dk, dv) in float64, their bounds)."""
    leaves = [t.double().requires_grad_() for t in (given.q, given.k, given.v)]
    allowed = given.mask.to_dense()
    outputs = reference.attention(*leaves, allowed, softcap=given.softcap)
    dlse = given.dlse.double() if lse else None
    value = (outputs[0] * given.dout.double()).sum()
    if lse:
        value = value + (outputs[1].nan_to_num(neginf=0.0) * dlse).sum()
    grads = torch.autograd.grad(value, leaves)
    tensors = given.q, given.k, given.v, given.dout
    bounds = reference.error_bounds(
        *tensors, allowed, dlse=dlse, scores=reference.Scores(softcap=given.softcap)
    )
    return (*(t.detach() for t in outputs), *grads), bounds


def check(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    """Check values within the bound everywhere; -inf exactly where it is meant."""
    empty = want == -torch.inf
    assert (got[empty] == -torch.inf).all() and got[~empty].isfinite().all(), f"{name}: not finite"
    share = ((got.double() - want).abs() / bound)[~empty]
    assert (share <= 1).all(), f"{name}: {share.max():.2f} of its bound"


def require_same(found, wanted, label: str) -> None:
    """Tuples of tensors, byte for byte."""
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        contract.require_same(got, want, op=f"result {i}", transform=label, case="", seed=SEED)
