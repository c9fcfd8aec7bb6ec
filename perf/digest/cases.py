"""Cases of the digests: products and attentions, forward and backward, by the public API.

A case is a name, inputs by name (CPU tensors) and results by name.  The name says everything that
its bytes depend on besides the contract id, so a case that changes gets another name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.sparse_attn.config import VALUE_DIMS

from .inputs import SEED, Draw

Tensors = dict[str, Tensor]
BF16, FP16 = torch.bfloat16, torch.float16
_DTYPES = {BF16: "bf16", FP16: "fp16"}


@dataclass(frozen=True)
class Linear:
    """A linear layer, y[m, n] = x[m, k] weight[n, k]^T + bias; dW goes into an fp32 main_grad."""

    dtype: torch.dtype
    m: int
    k: int
    n: int
    bias: bool = False

    op = "linear"

    @property
    def name(self) -> str:
        size = f"m{self.m}k{self.k}n{self.n}"
        return f"linear/{_DTYPES[self.dtype]}/{size}" + ("/bias" if self.bias else "")

    def inputs(self, seed: int = SEED) -> Tensors:
        draw, m, k, n = Draw(self.name, seed), self.m, self.k, self.n
        out = {
            "x": draw.numbers("x", (m, k), self.dtype),
            "weight": draw.numbers("weight", (n, k), self.dtype),
            "dy": draw.numbers("dy", (m, n), self.dtype),
            "main_grad": draw.numbers("main_grad", (n, k), torch.float32),
        }
        if self.bias:
            out["bias"] = draw.numbers("bias", (n,), self.dtype)
        return out

    def results(self, t: Tensors) -> Tensors:
        state = t["main_grad"].clone()
        x, weight = (t[name].detach().requires_grad_() for name in ("x", "weight"))
        bias = t["bias"].detach().requires_grad_() if self.bias else None
        y = ck.linear(x, weight, bias, main_grad=state)
        y.backward(t["dy"])
        out = {"y": y.detach(), "dx": x.grad, "dw": state}
        return out | {"dbias": bias.grad} if self.bias else out


@dataclass(frozen=True)
class Attention:
    """Block-sparse attention of q [batch, s, heads, dim], its gradients in a schedule's order.

    mask: "full" is none, "causal" and "window" are bands, "document" and "random" stored bits.
    """

    dtype: torch.dtype
    mask: str
    s: int
    dim: int
    heads: int
    kv_heads: int
    batch: int = 1
    schedule: str = "spt"

    op = "block_sparse_attention"

    @property
    def name(self) -> str:
        size = f"b{self.batch}s{self.s}d{self.dim}h{self.heads}kv{self.kv_heads}"
        return f"attention/{_DTYPES[self.dtype]}/{self.mask}/{size}/{self.schedule}"

    def inputs(self, seed: int = SEED) -> Tensors:
        draw, out = Draw(self.name, seed), {}
        keys, values = (self.kv_heads, self.dim), (self.kv_heads, VALUE_DIMS[self.dim])
        of_q, of_out = (self.heads, self.dim), (self.heads, VALUE_DIMS[self.dim])
        for name, sizes in {"q": of_q, "k": keys, "v": values, "dout": of_out}.items():
            out[name] = draw.numbers(name, (self.batch, self.s, *sizes), self.dtype)
        if self.mask == "document":
            starts = draw.below("mask", 200, (self.batch, self.s)) == 0
            out["mask"] = starts.cumsum(1, dtype=torch.int32)
        if self.mask == "random":
            allowed = draw.below("mask", 2, (1, 1, self.s, self.s)) == 0
            out["mask"] = allowed | torch.eye(self.s, dtype=torch.bool)
        return out

    def _mask(self, t: Tensors) -> ck.BlockMask | None:
        size, device = (self.s, self.s), t["q"].device
        if self.mask == "full":
            return None
        if self.mask == "causal":
            return ck.BlockMask.causal(*size, device=device)
        if self.mask == "window":
            return ck.BlockMask.sliding_window(*size, left=self.s // 4, right=0, device=device)
        make = {"document": ck.BlockMask.document, "random": ck.BlockMask.from_dense}[self.mask]
        return make(t["mask"])

    def results(self, t: Tensors) -> Tensors:
        q, k, v = (t[name].detach().requires_grad_() for name in "qkv")
        options = {"schedule": self.schedule, "return_lse": True}
        out, lse = ck.block_sparse_attention(q, k, v, self._mask(t), **options)
        out.backward(t["dout"])
        forward = {"out": out.detach(), "lse": lse.detach()}
        return forward | {"dq": q.grad, "dk": k.grad, "dv": v.grad}


Case = Linear | Attention

CASES: tuple[Case, ...] = (
    Linear(BF16, 256, 512, 384),
    Linear(BF16, 1, 4096, 1032),
    Linear(BF16, 77, 333, 131, bias=True),  # rows that TMA cannot address: copies
    Linear(BF16, 300, 776, 1000, bias=True),
    Linear(BF16, 4096, 4096, 2048),
    Linear(FP16, 15, 72, 88, bias=True),
    Linear(FP16, 300, 776, 1000, bias=True),
    Linear(FP16, 513, 2056, 1032, bias=True),
    Attention(BF16, "full", 1000, 128, 8, 8, batch=2, schedule="left_to_right"),
    Attention(BF16, "document", 1000, 128, 8, 2, batch=2, schedule="shortest_first"),
    Attention(FP16, "causal", 1500, 64, 16, 4, batch=2, schedule="auto"),
    Attention(FP16, "random", 300, 64, 4, 4),
    Attention(BF16, "causal", 700, 96, 4, 4, schedule="auto"),
    Attention(BF16, "causal", 700, 192, 8, 2, batch=2, schedule="auto"),
    Attention(FP16, "document", 500, 192, 4, 4),
    Attention(BF16, "window", 500, 256, 8, 4, schedule="left_to_right"),
)


def chosen(only: str = "") -> list[Case]:
    """The cases whose names have one of the comma-separated parts; all of them for none."""
    parts = [part for part in only.split(",") if part]
    return [case for case in CASES if not parts or any(part in case.name for part in parts)]
