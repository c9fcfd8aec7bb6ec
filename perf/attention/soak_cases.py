"""Cases of the attention soak: small problems of every mask, head size, dtype, group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config, launch, lowering, op

REPEATS, MORE_REPEATS = 1_000, 10_000
MASKS = ("full", "causal", "window", "document", "random")
#: 9 columns and a tail.  With these heads 288 (MHA) or 144 tickets: more than an H200 has SMs.
LENGTH, BATCH = 1_100, 4
HEADS = ((8, 8), (16, 4))
#: Masks whose columns add to one dQ row from many CTAs: there an unordered backward shows itself.
CONTROL_MASKS = ("full", "causal")
_LONG = {
    ("causal", 64, "bf16", 4),
    ("document", 128, "bf16", 8),
    ("random", 128, "fp16", 4),
    ("causal", 192, "bf16", 8),
    ("full", 256, "fp16", 4),
}
_SEED = 20_261_120
#: Sequences that are packed: whole blocks, tails, one token; BATCH x LENGTH of them.
PACK = "pack"
_PACKED = (1_100, 1, 128, 777, 394, 1_300, 127, 573)
_PACK_DTYPES = ("bf16", "bf16", "fp16")


@dataclass(frozen=True)
class Case:
    """One case of the soak: q, dout [B, S, heads, ..], k, v [B, S, kv_heads, ..].

    It has a dlse too where KV heads are shared.
    """

    mask: str
    dim: int
    dtype: str = "bf16"
    heads: int = 8
    kv_heads: int = 8
    softcap: float = 0.0
    ordered: bool = True
    s: int = LENGTH
    batch: int = BATCH
    repeats: int = REPEATS

    outputs = ("out", "lse", "dq", "dk", "dv")
    launcher = launch

    @property
    def may_differ(self) -> tuple[str, ...]:
        """Results whose bits may change: dQ, where KV blocks add to it in no order."""
        return () if self.ordered else ("dq",)

    @property
    def label(self) -> str:
        """Names the case; the control's ends in /unordered."""
        cap = f"/cap{self.softcap:g}" if self.softcap else ""
        size = f"{self.mask}/s{self.s}/d{self.dim}/h{self.heads}/kv{self.kv_heads}/{self.dtype}"
        return size + cap + ("" if self.ordered else "/unordered")

    def items(self) -> dict:
        """The fields of a record that say what was run."""
        facts = {"mask": self.mask, "s": self.s, "d": self.dim, "batch": self.batch}
        facts |= {"heads": self.heads, "kv_heads": self.kv_heads, "dtype": self.dtype}
        facts |= {"softcap": self.softcap, "shape": self.label, "product": "fwd+bwd"}
        return facts | {"system": "ours" if self.ordered else "ours_unordered"}

    def started(self, device: str) -> Callable[[], tuple[Tensor, ...]]:
        """A call without arguments that gives (out, lse, dq, dk, dv) of one set of inputs."""
        q, k, v, dout, dlse = self._drawn(device)
        if self.mask == PACK:
            return self._packed(q, k, v, dout, dlse)
        sizes = (self.batch, self.s, self.s, self.heads, self.kv_heads, self.dim)
        mask = self._mask(device)
        lowered = lowering.build_lists(mask.handle, False, "auto", True, sizes, str(mask.device))
        factors = self.dim**-0.5, self.softcap, None

        def call() -> tuple[Tensor, ...]:
            with torch.no_grad():
                out, lse = op.block_sparse_attention(q, k, v, *lowered, True, *factors)
                operands = (dout, dlse, q, k, v, out, lse, *lowered, self.ordered, *factors)
                return out, lse, *op.block_sparse_attention_backward(*operands)[:3]

        return call

    def _packed(self, q, k, v, dout, dlse) -> Callable[[], tuple[Tensor, ...]]:
        """The call of `started` for causal sequences, packed where the batch has rows."""
        q, k, v, dout = (t.flatten(0, 1)[None] for t in (q, k, v, dout))
        dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)[None].contiguous()
        tokens = q.shape[1]
        offsets = [begin for begin in accumulate(_PACKED, initial=0) if begin < tokens]
        offsets = torch.tensor([*offsets, tokens])
        # Where a CUDA graph can read them.
        if op.reads_keys_on_device(str(q.device)):
            offsets = offsets.to(q.device)
        options = (offsets, None, 0, self.dim**-0.5, self.softcap, None)

        def call() -> tuple[Tensor, ...]:
            with torch.no_grad():
                out, lse = op.varlen_attention(q, k, v, *options)
                operands = (dout, dlse, q, k, v, out, lse, *options)
                return out, lse, *op.varlen_attention_backward(*operands)[:3]

        return call

    def _mask(self, device: str) -> BlockMask:
        size = (self.s, self.s)
        if self.mask == "full":
            return BlockMask.full(*size, device=device)
        if self.mask == "causal":
            return BlockMask.causal(*size, device=device)
        if self.mask == "window":
            window_left = self.s // 4
            return BlockMask.sliding_window(*size, left=window_left, right=0, device=device)
        generator = torch.Generator().manual_seed(_SEED)
        if self.mask == "document":
            ids = torch.randint(0, 4, (self.batch, self.s), generator=generator)
            return BlockMask.document(ids.sort(dim=1).values.int().to(device))
        # Elements, not blocks: half of them, and the diagonal, so that no row is empty.
        allowed = torch.rand(1, 1, *size, generator=generator) < 0.5
        allowed |= torch.eye(self.s, dtype=torch.bool)
        return BlockMask.from_dense(allowed.to(device))

    def _drawn(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator(device).manual_seed(_SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        dtype = next(t for t, name in config.DTYPE_NAMES.items() if name == self.dtype)
        wide = config.VALUE_DIMS[self.dim]
        sizes = (self.heads, self.dim), (self.kv_heads, self.dim)
        sizes += (self.kv_heads, wide), (self.heads, wide)
        q, k, v, dout = (normal(self.batch, self.s, *size).to(dtype) for size in sizes)
        shared = self.kv_heads < self.heads
        dlse = normal(self.batch, self.heads, self.s) if shared else None
        return q, k, v, dout, dlse


def suite(only: str = "") -> list[Case]:
    """Every configuration, and the controls, those of D = 128 first; `only`: parts of labels."""
    cases = []
    dims = sorted(config.HEAD_DIMS, reverse=True)
    for dim, (heads, kv_heads), mask in itertools.product(dims, HEADS, MASKS):
        for dtype in config.DTYPE_NAMES.values():
            more = (mask, dim, dtype, kv_heads) in _LONG
            repeats = MORE_REPEATS if more else REPEATS
            cases.append(Case(mask, dim, dtype, heads, kv_heads, repeats=repeats))
        if mask in CONTROL_MASKS:
            cases.append(Case(mask, dim, "bf16", heads, kv_heads, ordered=False))
    packs = zip(dims, itertools.cycle(HEADS), itertools.cycle(_PACK_DTYPES), strict=False)
    for dim, (heads, kv_heads), dtype in packs:
        cases.append(Case(PACK, dim, dtype, heads, kv_heads, repeats=MORE_REPEATS))
    cases.append(Case("causal", dims[0], "bf16", *HEADS[1], softcap=30.0))
    parts = [part for part in only.split(",") if part]
    return [case for case in cases if not parts or any(part in case.label for part in parts)]
