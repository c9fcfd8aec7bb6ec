"""Drawn attention problems: all kinds of masks, awkward lengths, GQA, and a case's inputs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn.config import HEAD_DIMS, VALUE_DIMS

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 383, 769)
HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))
DTYPES = (torch.bfloat16, torch.float16)
SCHEDULES = ("auto", "left_to_right", "spt", "lpt", "order")
#: The most scores (batch x heads x Sq x Sk) of a drawn case: a second of one core for dozens.
MOST_SCORES = 600_000


@dataclass(frozen=True)
class Case:
    """One problem; ``mask`` is None for no mask at all."""

    seed: int
    kind: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    dtype: torch.dtype
    softcap: float
    schedule: object
    causal: bool
    mask: BlockMask | None

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads}/{self.kv_heads} {self.q_len}x{self.kv_len}"
        return f"{self.seed} {self.kind} {sizes} D{self.dim} {self.dtype}"

    def allowed(self) -> torch.Tensor:
        """Bool [B or 1, H or 1, Sq, Sk]: the mask and the causal flag, by elements."""
        q, kv = torch.arange(self.q_len)[:, None], torch.arange(self.kv_len)
        dense = torch.ones(1, 1, self.q_len, self.kv_len, dtype=torch.bool)
        if self.mask is not None:
            dense = self.mask.to_dense()
        return dense & (kv <= q + self.kv_len - self.q_len) if self.causal else dense


def draw(seed: int) -> Case:
    """The case of a seed: the same on every machine."""
    rng = random.Random(seed)
    heads, kv_heads = rng.choice(HEADS)
    batch, dim, dtype = rng.choice((1, 1, 2)), rng.choice(HEAD_DIMS), rng.choice(DTYPES)
    q_len, kv_len = rng.choice(LENGTHS), rng.choice(LENGTHS)
    while q_len * kv_len * batch * heads > MOST_SCORES:
        q_len, kv_len = rng.choice(LENGTHS), rng.choice(LENGTHS)
    kind = KINDS[seed % len(KINDS)]
    if kind in ("document", "scattered"):
        q_len = kv_len = min(q_len, kv_len)
    mask = make_mask(kind, rng, batch, heads, q_len, kv_len)
    schedule: object = rng.choice(SCHEDULES)
    if schedule == "order":
        schedule = rng.sample(range(-(-kv_len // 128)), -(-kv_len // 128))
    softcap = rng.choice((0.0, 0.0, 3.0))
    causal = rng.random() < 0.25
    sizes = (batch, heads, kv_heads, q_len, kv_len, dim)
    return Case(seed, kind, *sizes, dtype, softcap, schedule, causal, mask)


KINDS = (
    "none",
    "full",
    "causal",
    "window",
    "shifted",
    "dilated",
    "prefix",
    "document",
    "scattered",
    "dense",
    "by head",
    "by batch and head",
    "blocks",
    "sparse rows",
    "small blocks",
    "or",
)


def make_mask(
    kind: str, rng: random.Random, batch: int, heads: int, q_len: int, kv_len: int
) -> BlockMask | None:
    """A mask of one kind for these lengths."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    side = rng.choice((0, 1, 17, 100, 300))

    def dense(b: int, h: int, density: float) -> torch.Tensor:
        return torch.rand(b, h, q_len, kv_len, generator=generator) < density

    def below(bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, bound, shape, generator=generator)

    def blocks() -> torch.Tensor:
        is_allowed = torch.rand(-(-q_len // 128), -(-kv_len // 128), generator=generator) < 0.5
        return is_allowed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:q_len, :kv_len]

    def rows() -> torch.Tensor:
        return torch.rand(1, 1, q_len, 1, generator=generator) < 0.3

    sizes, bits = (q_len, kv_len), BlockMask.from_dense
    makers = {
        "none": lambda: None,
        "full": lambda: BlockMask.full(*sizes),
        "causal": lambda: BlockMask.causal(*sizes),
        "window": lambda: BlockMask.sliding_window(*sizes, left=side, right=rng.choice((0, 5))),
        # A band that misses some rows and columns altogether.
        "shifted": lambda: BlockMask.from_rule(Band(side, side + 40), *sizes),
        "dilated": lambda: BlockMask.dilated_window(*sizes, left=side + 50, right=0, dilation=3),
        "prefix": lambda: BlockMask.prefix_lm(*sizes, prefix=below(kv_len + 1, batch)),
        "document": lambda: BlockMask.document(below(5, batch, q_len).sort(dim=1).values),
        "scattered": lambda: BlockMask.document(below(9, q_len)),
        "dense": lambda: bits(dense(1, 1, 0.4)),
        "by head": lambda: bits(dense(1, heads, 0.2)),
        "by batch and head": lambda: bits(dense(batch, heads, 0.3)),
        "blocks": lambda: bits(blocks()),
        "sparse rows": lambda: bits(rows() & dense(1, 1, 0.1)),
        "small blocks": lambda: BlockMask.causal(*sizes, block_size=(64, 32)),
        "or": lambda: BlockMask.causal(*sizes) | bits(dense(1, 1, 0.05)),
    }
    return makers[kind]()


@dataclass(frozen=True)
class Inputs:
    """q, k, v with gradients wanted, and the gradients of out and lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor

    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    """Random tensors; keys of different sizes, so that some rows are peaked and some are flat.

    dim: of q and k; v and dout have the head size that goes with it.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = normal(batch, q_len, heads, dim), normal(batch, kv_len, kv_heads, dim)
    k = k * normal(batch, kv_len, kv_heads, 1).exp2()
    wide = VALUE_DIMS[dim]
    v, dout = normal(batch, kv_len, kv_heads, wide), normal(batch, q_len, heads, wide)
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    return Inputs(*leaves, dout.to(dtype), normal(batch, heads, q_len))


def inputs_of(case: Case) -> Inputs:
    """The tensors of a case."""
    sizes = (case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim)
    return inputs(*sizes, case.dtype, case.seed)
