"""``BlockMask``: which blocks of a score matrix are needed, and which of them need a mask.

A mask is two sets of lists, one per query block and one per key block (the transpose), and the
element rule for the blocks that are not entirely allowed.  Data flows one way: arguments ->
``checks`` -> a rule (``rules``, ``bits``) -> exact lists (``build``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from cute_kernels.errors import MaskError, expected

from .. import handles, transforms
from . import bits as mask_bits
from . import build, checks, rules
from .algebra import And, all_of, any_of
from .document import SameDocument, document_ids
from .rules import (
    CHUNK,
    EMPTY,
    FULL,
    PARTIAL,
    Band,
    Dilated,
    Grid,
    Prefix,
    Rule,
    indices,
    tensor_bytes,
)

#: Limits of dense views, in elements of one byte.
MAX_BLOCKS, MAX_ELEMENTS = 1 << 26, 1 << 28


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block-sparse attention mask over scores [B, H, q_len, kv_len].

    Made by the class methods; the plain constructor takes lists that are already right and looks
    at shapes, dtypes and devices only.  With Mb = ceil(q_len / block_size[0]) query blocks and
    Nb = ceil(kv_len / block_size[1]) key blocks:

    kv_count  int32 [B or 1, H or 1, Mb]      key blocks that a query block needs
    kv_index  int32 [B or 1, H or 1, Mb, Lk]  which: ascending, the first ``kv_count`` are valid
    kv_full   bool, as kv_index               every element of the block is allowed
    q_count, q_index, q_full                  the transpose: [.., Nb], [.., Nb, Lq], [.., Nb, Lq]
    rule      the element rule, exact over the whole matrix, not in the partial blocks only;
              its ``Bits``, if any, are stored in the blocks of this mask

    Lists are compact: Lk and Lq are the longest row (at least 1); places beyond a count hold 0 and
    False.  A block is full if all its elements within the lengths are allowed, partial if some are.
    Empty rows, empty columns and zero lengths are valid.  The tensors are the mask's own, copies of
    what a caller gave, and not to be written to: its hash names what they hold.
    """

    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    kv_count: Tensor
    kv_index: Tensor
    kv_full: Tensor
    q_count: Tensor
    q_index: Tensor
    q_full: Tensor
    rule: Rule
    #: Names this object in compiled graphs.
    handle: str = field(init=False, repr=False)

    def __post_init__(self):
        for side, blocks in (("kv", self.num_q_blocks), ("q", self.num_kv_blocks)):
            count, index, full = self.lists(side)
            checks.block_lists(f"{side}_count", count, f"{side}_index", index)
            checks.rows(f"{side}_count", count, blocks, "ceil(length / block size)")
            checks.tensor(f"{side}_full", full, (torch.bool,), (4,))
            if full.shape != index.shape:
                want = f"shape {list(index.shape)} like {side}_index"
                raise MaskError(expected(f"{side}_full", want, list(full.shape)))
        if self.q_count.shape[:2] != self.shape:
            want = f"batch and heads {self.shape} like kv_count"
            raise MaskError(expected("q_count", want, tuple(self.q_count.shape[:2])))
        lists = (self.kv_count, self.kv_full, self.q_count, self.q_full)
        checks.same_device(("kv_count", "kv_full", "q_count", "q_full"), lists)
        self._copy_tensors()
        object.__setattr__(self, "handle", handles.register(self))

    def _copy_tensors(self) -> None:
        """Copy all tensors, as the caller may write to the originals."""
        transforms.refuse_wrapped((*self.lists("kv"), *self.lists("q"), *self.rule.tensors()))
        with transforms.outside():
            for side in ("kv", "q"):
                for name in ("count", "index", "full"):
                    name = f"{side}_{name}"
                    object.__setattr__(self, name, getattr(self, name).clone())
            object.__setattr__(self, "rule", self.rule.to(self.device, copy=True))

    def __reduce__(self):
        """Rebuild the mask, without cached hashes and data of backends."""
        return type(self), tuple(getattr(self, part.name) for part in fields(self) if part.init)

    # Constructors

    @classmethod
    def from_rule(
        cls,
        rule: Rule,
        q_len: int,
        kv_len: int,
        *,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Build the exact lists of a rule, on ``device`` or where the rule's tensors are."""
        grid = Grid(*checks.lengths(q_len, kv_len), checks.block_size(block_size))
        heads = checks.rule(rule, grid)
        operands = rule.tensors()
        transforms.refuse_wrapped(operands)
        torch_device = checks.device(operands[0].device if operands and device is None else device)
        lists = []
        with transforms.outside():
            rule = build.on_grid(rule.to(torch_device), grid)
            entries = build.entries_of(rule, grid, heads, torch_device)
            for part, blocks in (
                (entries, grid.num_q_blocks),
                (build.transpose(entries, grid), grid.num_kv_blocks),
            ):
                shape = (*heads, blocks)
                lists += build.compact(part.row, part.col.int(), part.full, shape=shape)
        return cls(grid.q_len, grid.kv_len, grid.block_size, *lists, rule)

    @classmethod
    def full(cls, q_len: int, kv_len: int, *, block_size=128, device=None) -> BlockMask:
        """Every query sees every key."""
        return cls.from_rule(Band(None, None), q_len, kv_len, block_size=block_size, device=device)

    @classmethod
    def causal(cls, q_len: int, kv_len: int, block_size=128, *, device=None) -> BlockMask:
        """``kv <= q + kv_len - q_len``: aligned at the bottom right, the last query sees all."""
        return cls.sliding_window(
            q_len, kv_len, left=None, right=0, block_size=block_size, device=device
        )

    @classmethod
    def sliding_window(
        cls,
        q_len: int,
        kv_len: int,
        *,
        left: int | None,
        right: int | None,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """``p - left <= kv <= p + right`` with p = q + kv_len - q_len (bottom right aligned).

        ``left`` and ``right`` count tokens; None is no bound, 0 is the token itself only.
        """
        rule = _window(q_len, kv_len, left, right)
        return cls.from_rule(rule, q_len, kv_len, block_size=block_size, device=device)

    @classmethod
    def dilated_window(
        cls,
        q_len: int,
        kv_len: int,
        *,
        left: int | None,
        right: int | None,
        dilation: int,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The keys of a sliding window whose distance p - kv is a multiple of ``dilation``.

        ``left`` and ``right`` count tokens, not steps: left=255, right=0, dilation=2 is every
        second token of a window of 256.
        """
        window = _window(q_len, kv_len, left, right)
        step = checks.integer("dilation", dilation, least=1)
        rule = all_of(window, Dilated(step, (kv_len - q_len) % step)) if step > 1 else window
        return cls.from_rule(rule, q_len, kv_len, block_size=block_size, device=device)

    @classmethod
    def prefix_lm(
        cls,
        q_len: int,
        kv_len: int,
        *,
        prefix: int | Tensor,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Causal, and every query sees the first ``prefix`` keys (an int, or integers [B])."""
        causal = _window(q_len, kv_len, None, 0)
        torch_device = prefix.device if isinstance(prefix, Tensor) and device is None else device
        length = checks.prefix(prefix, kv_len, checks.device(torch_device))
        rule = any_of(causal, Prefix(length))
        return cls.from_rule(rule, q_len, kv_len, block_size=block_size)

    @classmethod
    def document(
        cls,
        ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """Tokens see the tokens of their own document, both ways (``& causal`` for one way).

        ids: integers [S] or [B, S], equal for equal documents, in any order.  Or cu_seqlens:
        integers [D + 1] from 0 to S, documents of length zero allowed.  On the tensor's device.
        """
        if (ids is None) == (cu_seqlens is None):
            actual = "both" if ids is not None else "neither"
            raise MaskError(expected("ids, cu_seqlens", "exactly one of the two", actual))
        if cu_seqlens is not None:
            offsets = checks.cu_seqlens(cu_seqlens).long()
            token = rules.indices(int(offsets[-1]), offsets.device)
            ids = torch.searchsorted(offsets, token, right=True)
        ids = checks.tensor("ids", ids, checks.INTEGERS, (1, 2))
        ids = ids[None] if ids.dim() == 1 else ids
        if ids.shape[0] == 0:
            raise MaskError(expected("ids", "a batch of at least 1", list(ids.shape)))
        rule = SameDocument(document_ids(ids))
        return cls.from_rule(rule, ids.shape[1], ids.shape[1], block_size=block_size)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        *,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """Sequences packed one after another, as one problem of S = cu_seqlens[-1] tokens.

        cu_seqlens: as in ``document``.  window_size: (left, right), as in ``sliding_window``.
        Blocks are counted from the pack's start, so that a sequence's bits follow where it lies;
        those of ``block_sparse_attention_varlen`` do not.
        """
        left, right = checks.window(window_size)
        right = 0 if checks.flag("causal", causal) else right
        mask = cls.document(cu_seqlens=cu_seqlens, block_size=block_size)
        if left is None and right is None:
            return mask
        size, device = mask.q_len, mask.device
        return mask & cls.sliding_window(
            size, size, left=left, right=right, block_size=block_size, device=device
        )

    @classmethod
    def from_dense(cls, dense: Tensor, *, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """Build a mask from a bool tensor [q_len, kv_len] or [B, H, q_len, kv_len] (True: seen).

        The rule holds one bit per element of the partial blocks.
        """
        dense = checks.tensor("dense", dense, (torch.bool,), (2, 4))
        dense = dense[None, None] if dense.dim() == 2 else dense
        if 0 in dense.shape[:2]:
            want = "batch and heads of at least 1"
            raise MaskError(expected("dense", want, list(dense.shape)))
        size = checks.block_size(block_size)
        rule = mask_bits.from_dense(dense, size)
        return cls.from_rule(rule, *dense.shape[2:], block_size=size)

    @classmethod
    def from_blocks(
        cls,
        kv_count: Tensor,
        kv_index: Tensor,
        q_len: int,
        kv_len: int,
        *,
        block_size: int | tuple[int, int] = 128,
        rule: Rule | None = None,
    ) -> BlockMask:
        """Build a mask of chosen blocks: kv_count int32 [B, H, Mb], kv_index int32 [B, H, Mb, L].

        A listed block is allowed entirely, or where ``rule`` allows; the others not at all.
        Indices ascend in each row, without repeats.
        """
        grid = Grid(*checks.lengths(q_len, kv_len), checks.block_size(block_size))
        checks.block_lists("kv_count", kv_count, "kv_index", kv_index)
        checks.rows("kv_count", kv_count, grid.num_q_blocks, "ceil(q_len / block_size[0])")
        checks.block_list_values("kv_count", kv_count, "kv_index", kv_index, grid.num_kv_blocks)
        row, col = build.ragged(kv_count, kv_index)
        pattern = mask_bits.pattern(grid, tuple(kv_count.shape[:2]), row, col)
        full_rule = pattern if rule is None else all_of(pattern, rule)
        return cls.from_rule(full_rule, q_len, kv_len, block_size=grid.block_size)

    @classmethod
    def from_flex(cls, flex) -> BlockMask:
        """Convert a ``torch.nn.attention.flex_attention.BlockMask``; see ``masks.flex``."""
        from .flex import rule_of

        with transforms.outside():
            rule = rule_of(flex)
        grid = rule.grid
        return cls.from_rule(rule, grid.q_len, grid.kv_len, block_size=grid.block_size)

    # Combine and convert

    def __and__(self, other: BlockMask) -> BlockMask:
        """Intersect masks of equal lengths, block sizes and devices; batch and heads broadcast."""
        return self._combine(other, all_of) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """Unite: allowed by either."""
        return self._combine(other, any_of) if isinstance(other, BlockMask) else NotImplemented

    def _combine(self, other: BlockMask, combine) -> BlockMask:
        for name in ("q_len", "kv_len", "block_size", "device"):
            operand, theirs = getattr(self, name), getattr(other, name)
            if operand != theirs:
                raise MaskError(expected(f"other.{name}", f"{operand} like the first mask", theirs))
        checks.extent(self.shape, other.shape, "other.shape")
        return BlockMask.from_rule(
            combine(self.rule, other.rule),
            self.q_len,
            self.kv_len,
            block_size=self.block_size,
            device=self.device,
        )

    def reblock(self, block_size: int | tuple[int, int]) -> BlockMask:
        """Cut the same elements into other blocks (a backward kernel's, say)."""
        return BlockMask.from_rule(
            self.rule, self.q_len, self.kv_len, block_size=block_size, device=self.device
        )

    def to(self, device: torch.device | str) -> BlockMask:
        torch_device = checks.device(device)
        if torch_device == self.device:
            return self
        moved = [tensor.to(torch_device) for tensor in self.lists("kv") + self.lists("q")]
        size = (self.q_len, self.kv_len, self.block_size)
        return BlockMask(*size, *moved, self.rule.to(torch_device))

    # Facts

    @property
    def grid(self) -> Grid:
        return Grid(self.q_len, self.kv_len, self.block_size)

    @property
    def num_q_blocks(self) -> int:
        return self.grid.num_q_blocks

    @property
    def num_kv_blocks(self) -> int:
        return self.grid.num_kv_blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (batch or 1, heads or 1)."""
        return tuple(self.kv_count.shape[:2])

    @property
    def device(self) -> torch.device:
        return self.kv_count.device

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks that are not empty, over all batches and heads of ``shape``."""
        return int(self.kv_count.sum())

    @cached_property
    def num_full(self) -> int:
        return int(self.kv_full.sum())

    def density(self) -> float:
        """Share of blocks that are not empty; 0 for a mask without blocks."""
        return self.num_blocks / max(1, self.kv_count.numel() * self.num_kv_blocks)

    @property
    def partial_rule(self) -> Rule:
        """Rule to evaluate inside partial blocks: ``rule`` less its block patterns, true there."""
        if not isinstance(self.rule, And):
            return self.rule
        element_parts = [
            part for part in self.rule.parts if not mask_bits.is_pattern(part, self.grid)
        ]
        return all_of(*element_parts) if element_parts else Band(None, None)

    def tiles(self, bits: mask_bits.Bits, side: str = "kv") -> Tensor:
        """Return the row of ``bits.words`` of each listed block: int32 shaped as that index.

        -1 where ``bits``, a part of ``rule``, holds no tile: the block is full or empty there.
        """
        count, index, _ = self.lists(side)
        b, h, row, place = torch.meshgrid(
            *(rules.indices(size, self.device) for size in index.shape), indexing="ij"
        )
        m, n = (row, index.long()) if side == "kv" else (index.long(), row)
        return torch.where(place < count[..., None], bits.find(b, h, m, n)[1], -1)

    def lists(self, side: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return (count, index, full) of the "kv" lists, or of the "q" lists (the transpose)."""
        if side not in ("kv", "q"):
            raise MaskError(expected("side", "'kv' or 'q'", repr(side)))
        return tuple(getattr(self, f"{side}_{name}") for name in ("count", "index", "full"))

    @cached_property
    def _digests(self) -> tuple[bytes, bytes]:
        size = (self.q_len, self.kv_len, self.block_size, self.shape)
        blocks = hashlib.sha256(f"cute_kernels.BlockMask 1 {size}".encode())
        with transforms.outside():
            _, col, full = build.ragged(self.kv_count, self.kv_index, self.kv_full)
            for tensor in (self.kv_count, col, full):
                blocks.update(tensor_bytes(tensor))
            full_digest = blocks.copy()
            full_digest.update(self.rule.digest())
        return blocks.digest(), full_digest.digest()

    def hash(self) -> str:
        """Digest of 64 hex digits.  Equal hashes: the same blocks and the same rule, on any device.

        The same elements under different rules (``causal`` and its ``from_dense``) differ.
        """
        return self._digests[1].hex()

    def block_hash(self) -> str:
        """Digest over lengths, block size and lists, on which schedules depend: 64 hex digits."""
        return self._digests[0].hex()

    def dense_blocks(self) -> Tensor:
        """Return uint8 [B, H, Mb, Nb]: 0 empty, 1 partial, 2 full.  At most 2**26 blocks."""
        shape = (*self.kv_count.shape, self.num_kv_blocks)
        _refuse_above(MAX_BLOCKS, shape, "blocks")
        row, col, full = build.ragged(self.kv_count, self.kv_index, self.kv_full)
        dense = torch.full(shape, EMPTY, dtype=torch.uint8, device=self.device)
        dense.view(-1)[row * self.num_kv_blocks + col] = torch.where(full, FULL, PARTIAL).byte()
        return dense

    def to_dense(self) -> Tensor:
        """Return bool [B, H, q_len, kv_len], for tests.  At most 2**28 elements.

        Empty blocks are False and full ones True whatever the rule says; the rule decides inside
        partial blocks.
        """
        shape = (*self.shape, self.q_len, self.kv_len)
        _refuse_above(MAX_ELEMENTS, shape, "elements")
        places = [indices(size, self.device) for size in shape]
        kind = self.dense_blocks()[:, :, places[2] // self.block_size[0]]
        kind = kind[..., places[3] // self.block_size[1]]
        b, h, q_idx, kv_idx = (
            index.view([-1 if i == d else 1 for i in range(4)]) for d, index in enumerate(places)
        )
        rule = self.partial_rule
        value = torch.zeros(shape, dtype=torch.bool, device=self.device)
        rows = max(1, CHUNK // max(1, self.shape[0] * self.shape[1] * self.kv_len))
        for start in range(0, self.q_len, rows):
            part = slice(start, start + rows)
            value[:, :, part] = rule.evaluate(b, h, q_idx[:, :, part], kv_idx)
        return (kind == FULL) | ((kind == PARTIAL) & value)

    def __repr__(self) -> str:
        total = self.kv_count.numel() * self.num_kv_blocks
        partial = self.num_blocks - self.num_full
        return (
            f"BlockMask(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, "
            f"shape={self.shape}, blocks={self.num_blocks} of {total} "
            f"({self.num_full} full, {partial} partial), rule={self.rule}, device={self.device})"
        )


def _window(q_len: object, kv_len: object, left: object, right: object) -> Band:
    """Sides that reach past the ends are no bound, so that equal masks have equal rules."""
    q_len, kv_len = checks.lengths(q_len, kv_len)
    left, right = checks.bound("left", left), checks.bound("right", right)
    offset = kv_len - q_len
    lo = None if left is None or offset - left <= 1 - q_len else offset - left
    hi = None if right is None or offset + right >= kv_len - 1 else offset + right
    return Band(lo, hi)


def _refuse_above(most: int, shape: tuple[int, ...], unit: str) -> None:
    size = torch.Size(shape).numel()
    if size > most:
        raise MaskError(expected("mask", f"at most {most} {unit} to make dense", size))
