"""The SM90 forward on this CPU, its own order in torch, and the bound of its error.

``run`` calls the launcher: outputs full of NaN, one call of the compiled entry in ptxsim.
``chain`` follows the kernel step by step.  In the simulator's ``exact`` arithmetic, with the C
library's exp2f and log2f that the simulator calls too, it gives the kernel's bytes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config, launch, masks
from tests import contract
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import simulated

BLOCK = 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [.., Dv], a mask, and the numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    scale: float
    softcap: float = 0.0

    @property
    def allowed(self) -> Tensor:
        return self.mask.to_dense()


def case(mask: BlockMask, shape, *, dtype="bf16", softcap=0.0, seed=0, spread=1.5) -> Case:
    """Random operands for ``shape`` = (B, Hq, Hkv, D); ``spread`` is the scores' deviation."""
    batch, heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(seed)

    def rows(length, heads, columns):
        values = torch.randn(batch, length, heads, columns, generator=generator)
        return values.to(DTYPES[dtype])

    q = rows(mask.q_len, heads, width)
    k, v = (rows(mask.kv_len, kv_heads, n) for n in (width, config.VALUE_DIMS[width]))
    return Case(q, k, v, mask, spread * width**-0.5, softcap)


def run(case: Case, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the SM90 launcher in the simulator; ``options``: see `simulated.simulated`."""
    with simulated.simulated(**options):
        return launch.forward(
            case.q, case.k, case.v, masks.lower(case.mask), case.scale, case.softcap
        )


def same(got, want) -> bool:
    """Whether results have equal bytes, one by one."""
    return all(map(contract.same_bytes, got, want))


def right(case: Case, want, **options) -> bool:
    """Whether `run` ends, with these bytes, no missing fence and no race."""
    try:
        got = run(case, **options)
    except ptxsim.PtxsimError:
        return False
    report = ptxsim.report()
    return same(got, want) and not report["fence_warnings"]["count"] and not report["races"]


# ---- the kernel's order --------------------------------------------------------------------------


def chain(case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse) in the order of ``kernel_fwd_sm90``, block by block."""
    q, k, v = case.q, case.k, case.v
    batch, q_len, heads, _ = q.shape
    lowered, allowed = masks.lower(case.mask), case.allowed
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(batch, heads, q_len)
    count = lowered.kv_count.expand(batch, heads, -1)
    entry = lowered.kv_entry.expand(batch, heads, -1, -1)
    allowed = allowed.expand(batch, heads, -1, -1)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            for m in range(count.shape[2]):
                rows = slice(m * BLOCK, min(q_len, (m + 1) * BLOCK))
                blocks = (entry[b, h, m, : count[b, h, m]] >> 1).tolist()
                operands = (q[b, rows, h], k[b, :, kv], v[b, :, kv], allowed[b, h, rows])
                out[b, rows, h], lse[b, h, rows] = _rows(*operands, blocks, case)
    return out, lse


def _rows(q, k, v, allowed, blocks, case: Case) -> tuple[Tensor, Tensor]:
    scale, inner = (
        torch.tensor(x, dtype=torch.float32) for x in config.factors(case.scale, case.softcap)
    )
    top = torch.full((len(q), 1), -math.inf)
    lanes = torch.zeros(len(q), 4)
    acc = torch.zeros(len(q), v.shape[1])
    for n in blocks:
        keys = slice(n * BLOCK, min(len(k), (n + 1) * BLOCK))
        scores = torch.full((len(q), BLOCK), -math.inf)
        found = _product(torch.zeros(len(q), len(k[keys])), q, k[keys].mT)
        if case.softcap:
            found = _fma(1.0 / (_exp2(found * inner) + 1.0), torch.tensor(-2.0), 1.0)
        scores[:, : found.shape[1]] = found.masked_fill(~allowed[:, keys], -math.inf)
        above = torch.maximum(top, scores.amax(dim=1, keepdim=True))
        base = torch.where(above == -math.inf, 0.0, above)
        factor = _exp2((top - base) * scale)
        p = _exp2(_fma(scores, scale, -(base * scale)))
        acc = _product(acc * factor, p.to(q.dtype)[:, : found.shape[1]], v[keys])
        lanes, top = _fma(lanes, factor, _lane_sums(p)), above
    total = ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3]))[:, None]
    out = torch.where(total == 0, 0.0, _fma(acc, 1.0 / total, 0.0))
    lse = _fma(top, scale, _libm("log2f", total)) * torch.tensor(math.log(2.0), dtype=torch.float32)
    return out.to(q.dtype), torch.where(total == 0, -math.inf, lse)[:, 0]


def _product(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """acc + a b in k16 groups, each an exact product rounded once."""
    for first in range(0, a.shape[1], 16):
        group = slice(first, first + 16)
        acc = (acc.double() + a[:, group].double() @ b[group].double()).float()
    return acc


def _lane_sums(p: Tensor) -> Tensor:
    """[R, 128] -> [R, 4]: lane t adds columns 8 i + 2 t ascending, the odd ones, then both."""
    sums = torch.zeros(len(p), 4, 2)
    for i in range(BLOCK // 8):
        part = p[:, 8 * i : 8 * i + 8].unflatten(1, (4, 2))
        sums = part.clone() if i == 0 else sums + part
    return sums[..., 0] + sums[..., 1]


def _fma(a: Tensor, b: Tensor, c) -> Tensor:
    return (a.double() * b.double() + c).float()


def _exp2(x: Tensor) -> Tensor:
    """ex2.approx.ftz as the simulator computes it."""
    value = _libm("exp2f", torch.where(x.abs() < 2.0**-126, 0.0, x))
    return torch.where(value < 2.0**-126, 0.0, value)


def _libm(name: str, x: Tensor) -> Tensor:
    function = getattr(_library(), name)
    values, places = np.unique(x.numpy(), return_inverse=True)
    out = np.fromiter(map(function, values.tolist()), np.float32, len(values))
    return torch.from_numpy(out[places].reshape(x.shape))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    for name in ("exp2f", "log2f"):
        getattr(library, name).argtypes = [ctypes.c_float]
        getattr(library, name).restype = ctypes.c_float
    return library


# ---- float64 and its bound -----------------------------------------------------------------------


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    return reference.attention(
        case.q, case.k, case.v, case.allowed, scale=case.scale, softcap=case.softcap
    )


def bounds(case: Case) -> tuple[Tensor, Tensor]:
    """The largest errors of out, before its last rounding, and of lse (reliability.md section 5).

    A score errs by scale T_QK, the roundings of s c - m c, and, capped, of tanh; P by that and
    2⁻²² for exp2, then by the rounding to the input dtype, which the sum does not see; the product
    with V by T; each block's rescaling by another 2⁻²².
    """
    q, k, v = (t.double().transpose(1, 2) for t in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    info = torch.finfo(case.q.dtype)
    blocks, keys = -(-k.shape[2] // BLOCK), k.shape[2]
    allowed = case.allowed.expand(*q.shape[:3], keys)
    raw = q @ k.mT * case.scale
    scores = case.softcap * torch.tanh(raw / case.softcap) if case.softcap else raw
    product = 5.25 * -(-q.shape[3] // 16) * 2.0**-23 * (q.abs() @ k.abs().mT) * case.scale
    wrong = product + (4 + blocks) * 2.0**-23 * (scores.abs() + 1) + case.softcap * 2.0**-21
    wrong = wrong.masked_fill(~allowed, 0.0).amax(dim=-1, keepdim=True)
    p = torch.exp(scores.masked_fill(~allowed, -math.inf) - exact(case)[1][..., None])
    p = p.nan_to_num(0.0)
    steps = -(-keys // 16)
    relative = 2 * wrong + (2 + blocks) * 2.0**-22 + BLOCK // 4 * 2.0**-24
    out = (info.eps / 2 + relative + 5.25 * steps * 2.0**-23) * (p @ v.abs())
    # Weights too small for the input dtype.
    out = out + info.smallest_normal * info.eps * (allowed.double() @ v.abs())
    lse = relative + 2.0**-22 * exact(case)[1].nan_to_num(neginf=0.0).abs()[..., None]
    return out.transpose(1, 2), lse[..., 0]
