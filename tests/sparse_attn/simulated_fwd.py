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
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config, launch, masks
from tests import contract
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
    return simulated.is_right(lambda: run(case, **options), want)


# ---- masks and lists -----------------------------------------------------------------------------


def dense(q_len, kv_len, batch=1, heads=1):
    """Random elements in random blocks: empty rows, empty lists, full and partial blocks."""
    generator = torch.Generator().manual_seed(q_len + kv_len)
    blocks = torch.randint(0, 3, (batch, heads, 5, 5), generator=generator)
    blocks[..., 0, :] = 0
    share = (blocks / 2).repeat_interleave(128, 2).repeat_interleave(128, 3)
    share = share[..., -q_len:, :kv_len]
    allowed = torch.rand(share.shape, generator=generator) < share
    allowed[..., q_len // 2, :] = False
    return BlockMask.from_dense(allowed)


def document(q_len, kv_len):
    length = max(q_len, kv_len)
    ids = torch.arange(length) * 7 // 300
    whole = ids[None, :] == ids[:, None]
    return BlockMask.from_dense(whole[:q_len, :kv_len])


MASKS = {
    "full": BlockMask.full,
    "causal": BlockMask.causal,
    "window": lambda q, k: BlockMask.sliding_window(q, k, left=100, right=20),
    "document": document,
    "prefix": lambda q, k: BlockMask.prefix_lm(q, k, prefix=k // 3),
    "random": dense,
}


def zeros(extra: bool) -> Case:
    """O underflows to -0 in each row; ``extra``: row 0 makes the tile visit a block of V > 0."""
    allowed = torch.zeros(128, 384, dtype=torch.bool)
    allowed[1:, [5, 130]] = True
    allowed[0, 300] = extra
    q, k = torch.ones(1, 128, 1, 64), torch.zeros(1, 384, 1, 64)
    k[:, 130] = 8.0
    v = torch.full((1, 384, 1, 64), -(2.0**-133))
    v[:, 128:256], v[:, 256:] = -0.0, 1.0
    q, k, v = (t.bfloat16() for t in (q, k, v))
    return Case(q, k, v, BlockMask.from_dense(allowed), 0.125)


#: Blocks of keys.  Tiles have rows of lists 0 and 1, and of 1 and 2.
BLOCKS = 11
EVERY = range(BLOCKS)
LISTS = {
    "alternate": ([0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 6]),
    "away for long": ([0, 10], range(1, 10), [0, 6, 10]),
    "away in turns": ([0, 1, 8, 9], [0, 2, 3, 4, 5, 6, 7, 10], [1, 10]),
    "away by as much as is waited for": ([0, 5, 10], [1, 2, 3, 4, 6, 7, 8, 9], [5]),
    "held while another skips": (EVERY, [0, 1, 2, 3, 4, 7, 8, 9, 10], [0, 5, 6, 7]),
    "first empty": ([], EVERY, []),
    "second empty": (EVERY, [], EVERY),
    "all empty": ([], [], []),
    "ends early": ([0, 1], EVERY, [0]),
    "starts late": ([9, 10], EVERY, [10]),
    "one after another": ([0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10]),
}
#: Skips in both lists, bits, a consumer that another one holds, and one without blocks.
OFTEN = ("alternate", "away in turns", "held while another skips", "second empty")


def listed(lists, *, q_len=3 * BLOCK, bits=False, shape=(1, 2, 1, 64), seed=7) -> Case:
    """Query blocks with the key blocks of ``lists``, whole ones or with a third of the elements."""
    blocks = torch.zeros(len(lists), BLOCKS, dtype=torch.bool)
    for m, row in enumerate(lists):
        blocks[m, list(row)] = True
    allowed = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:q_len]
    if bits:
        generator = torch.Generator().manual_seed(seed)
        allowed &= torch.rand(allowed.shape, generator=generator) < 0.3
    return case(BlockMask.from_dense(allowed), shape, seed=seed)


def by_two(inputs: Case, **options) -> tuple:
    """Run a case as `run` does, by two consumers."""
    true = config.configure_forward
    two = mock.patch.object(
        config, "configure_forward", lambda *key: replace(true(*key), consumers=2)
    )
    with two:
        return run(inputs, **options)


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
        products = _product(torch.zeros(len(q), len(k[keys])), q, k[keys].mT)
        if case.softcap:
            products = _fma(1.0 / (_exp2(products * inner) + 1.0), torch.tensor(-2.0), 1.0)
        scores[:, : products.shape[1]] = products.masked_fill(~allowed[:, keys], -math.inf)
        above = torch.maximum(top, scores.amax(dim=1, keepdim=True))
        base = torch.where(above == -math.inf, 0.0, above)
        factor = _exp2((top - base) * scale)
        p = _exp2(_fma(scores, scale, -(base * scale)))
        acc = _product(acc * factor, p.to(q.dtype)[:, : products.shape[1]], v[keys])
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
