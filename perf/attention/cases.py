"""Cases of the attention bench: masks of one length, their inputs and their work."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import bits, build
from cute_kernels.sparse_attn.config import VALUE_DIMS

from ..core.work import Work
from .targets import PACK

BLOCK = 128
TOKENS = 32_768  # of a batch, whatever its length
PASSES = ("fwd", "bwd")
#: Products over the head size of q and k, and over that of v: S, dQ, dK; O, dP, dV.
PRODUCTS = {"fwd": (1, 1), "bwd": (3, 2)}
_SEED = 20_261_120
#: Tokens of the sequences of a pack: the shortest, the middle and the longest drawn.
_TOKENS_DRAWN = (100, 800, 4_000)
_SPREAD = 0.8  # of their logarithm; the mean is near 1,000
_CHUNK = 256  # blocks whose elements are looked at together


class Inputs(NamedTuple):
    """One input set; out and lse are those of a forward on the same q, k, v.

    pack_lse: of a pack, lse as those that take packs have it, [1, H, B * S].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    pack_lse: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.nbytes for t in self if t is not None)


@dataclass(frozen=True)
class Case:
    """One mask, length, head size of q and k, and number of heads; bf16, q_len = kv_len = s."""

    mask: str
    s: int
    dim: int
    heads: int
    kv_heads: int
    tokens: int = TOKENS

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.s)

    @property
    def value_dim(self) -> int:
        """The head size of v and out."""
        return VALUE_DIMS[self.dim]

    @property
    def label(self) -> str:
        return f"{self.mask}/s{self.s}/d{self.dim}/h{self.heads}/kv{self.kv_heads}"

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def window(self) -> int:
        """Keys that a query of the window mask sees, itself included."""
        return min(1024, self.s // 4)

    @property
    def prefix(self) -> int:
        return self.s // 4

    @property
    def small(self) -> Case:
        """Case of the same class of mask at a length that float64 can check whole."""
        group = self.heads // self.kv_heads
        s = min(self.s, 1024)
        return Case(self.mask, s, self.dim, 2 * group, 2, 2 * s)

    def bytes(self, which: str) -> int:
        """The least traffic: q, k, v, out; in the backward also their gradients."""
        of_a_head = self.dim + self.value_dim
        operand_bytes = 2 * self.batch * self.s * of_a_head * (self.heads + self.kv_heads)
        return operand_bytes if which == "fwd" else 2 * operand_bytes

    def items(self, which: str) -> dict:
        """The fields of a record; `product` and `shape` are what reports and compare go by."""
        facts = {"mask": self.mask, "s": self.s, "d": self.dim, "batch": self.batch}
        facts |= {"heads": self.heads, "kv_heads": self.kv_heads, "pass": which}
        return facts | {"product": which, "shape": self.label, "dtype": "bf16"}


class Problem:
    """A case on a device: its mask, and what each rival needs to state the same mask."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, torch.device(device)
        #: int32 [N + 1] on the CPU, as a collator makes it: where the sequences of a pack begin
        #: and end when its rows lie one behind another; None: no pack.
        self.offsets = offsets_of(drawn_lengths(case)) if case.mask == PACK else None
        #: int32 [B, S]: documents of 1,536 tokens on average, other ones in each batch; of a pack
        #: its sequences.
        self.ids = self._ids()
        #: bool [S / 128, S / 128]: a quarter of the blocks, and the diagonal.
        self.blocks = _quarter(case.s // BLOCK).to(device) if case.mask == "random" else None
        self.mask = self._mask()

    def _ids(self) -> Tensor | None:
        case = self.case
        if self.offsets is not None:
            count = self.offsets.diff()
            number = torch.arange(len(count), dtype=torch.int32)
            return number.repeat_interleave(count).view(case.batch, case.s).to(self.device)
        return _documents(case).to(self.device) if case.mask == "document" else None

    def _mask(self) -> BlockMask:
        case, device = self.case, self.device
        size = (case.s, case.s)
        if case.mask == "full":
            return BlockMask.full(*size, device=device)
        if case.mask == "causal":
            return BlockMask.causal(*size, device=device)
        if case.mask == "window":
            return BlockMask.sliding_window(*size, left=case.window - 1, right=0, device=device)
        if case.mask == "prefix":
            return BlockMask.prefix_lm(*size, prefix=case.prefix, device=device)
        if case.mask == "document":
            return BlockMask.document(self.ids)
        if case.mask == PACK:
            return BlockMask.document(self.ids) & BlockMask.causal(*size, device=device)
        row, col = self.blocks.nonzero().unbind(1)
        shape = (1, 1, len(self.blocks))
        count, index = build.compact(row, col.int(), shape=shape)
        return BlockMask.from_blocks(count, index, *size)

    @cached_property
    def elements(self) -> int:
        """Scores that the mask allows, over all batches and query heads."""
        mask = self.mask
        row, col, full = build.ragged(mask.kv_count, mask.kv_index, mask.kv_full)
        b, h, m, n = bits.coordinates(mask.grid, mask.shape, row, col.long())
        full_sizes = (self.case.s - torch.stack((m, n))[:, full] * BLOCK).clamp(max=BLOCK).prod(0)
        total = int(full_sizes.sum())
        for chunk in (~full).nonzero()[:, 0].split(_CHUNK):
            coord = (b[chunk], h[chunk], m[chunk], n[chunk])
            inside = mask.grid.inside(*mask.grid.positions(*coord[2:]))
            total += int((mask.rule.blocks(mask.grid, *coord) & inside).sum())
        share = self.case.batch * self.case.heads // (mask.shape[0] * mask.shape[1])
        return total * share

    def flops(self, which: str) -> int:
        """FLOPs of the elements that the mask allows, not of the blocks that hold them."""
        of_q, of_v = PRODUCTS[which]
        return 2 * (of_q * self.case.dim + of_v * self.case.value_dim) * self.elements

    def work(self, which: str) -> Work:
        return Work(self.flops(which), self.case.bytes(which))

    def allowed(self, b: int, h: int, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Bool, by the element rule; the indices broadcast."""
        coord = (torch.tensor(x, device=self.device) for x in (b, h))
        return self.mask.rule.evaluate(*coord, q_idx, kv_idx).expand(
            torch.broadcast_shapes(q_idx.shape, kv_idx.shape)
        )

    def drawn(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v, dout [B, S, heads, ..]; never zeros, on which a card runs faster."""
        case = self.case
        generator = torch.Generator(self.device).manual_seed(_SEED + seed)

        def normal(heads: int, dim: int) -> Tensor:
            shape = (case.batch, case.s, heads, dim)
            values = torch.randn(shape, generator=generator, device=self.device)
            return values.to(torch.bfloat16)

        q, k = normal(case.heads, case.dim), normal(case.kv_heads, case.dim)
        v, dout = normal(case.kv_heads, case.value_dim), normal(case.heads, case.value_dim)
        return q, k, v, dout

    def inputs(self, drawn: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> Inputs:
        """Inputs of a backward, with the results of the forward; lse as a pack has it too."""
        lse = lse.contiguous()
        in_a_row = None if self.offsets is None else lse.transpose(0, 1).flatten(1)[None]
        return Inputs(*drawn, out, lse, in_a_row)


def drawn_lengths(case: Case, number: int = 0) -> list[int]:
    """Tokens of the sequences of a pack, row by row; each number gives another pack.

    A row's last one is cut where the row ends, as by trainers that fill rows.  Rows below 4k have
    shorter sequences in place of fewer.
    """
    generator, share = random.Random(_SEED + number), min(1.0, case.s / 4096)
    shortest, middle, longest = _TOKENS_DRAWN
    lengths = []
    for _ in range(case.batch):
        remaining = case.s
        while remaining:
            tokens = middle * generator.lognormvariate(0.0, _SPREAD)
            length = round(share * min(max(tokens, shortest), longest))
            lengths.append(min(remaining, max(1, length)))
            remaining -= lengths[-1]
    return lengths


def offsets_of(lengths: list[int]) -> Tensor:
    """``cu_seqlens`` of sequences one behind another: int32 [N + 1] on the CPU."""
    count = torch.tensor([0, *lengths], dtype=torch.int32)
    return count.cumsum(0, dtype=torch.int32)


def _documents(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    count = round(case.s / 1536) if case.s >= 4096 else 5
    first = torch.zeros(case.batch, case.s, dtype=torch.int32)
    for row in first:
        row[1 + torch.randperm(case.s - 1, generator=generator)[: count - 1]] = 1
    return first.cumsum(1, dtype=torch.int32)


def _quarter(blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    is_kept = torch.rand(blocks, blocks, generator=generator) < 0.25
    return is_kept | torch.eye(blocks, dtype=torch.bool)
