"""Launch the Triton kernels: operands that they can load, outputs, grids, compiler options.

Every row of an operand is loaded in 16-byte pieces: one that is not laid out for that is copied, so
that a problem runs one code whatever its strides are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import log
from ...runtime.triton_products import cdiv
from ..masks import BLOCK, LoweredMask, Order
from ..tensors import LOG2E, Grads, Saved, shape_of_out, sinks_gradient
from . import kernel as kernels
from .plan import TRITON, Tile, TritonPlan

#: Elements: strides that are multiples of it are known to the compiler to be aligned.
_ALIGN = 16
_ROWS = "a last stride of 1, the others multiples of 16, the address of 16 bytes"
_NAME = "block_sparse_attention"
#: Keys of a word of bits.
_WORD = 32
_ROUND = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LoweredMask,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    *,
    interpret: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse fp32 [B, Hq, Sq]) of q [B, Sq, Hq, D], k and v [B, Sk, Hkv, ..].

    ``interpret``: for Triton's interpreter, fp32 operands and the last rounding outside.
    """
    batch, q_len, heads, dim = q.shape
    dtype, plan = q.dtype, TRITON[dim]
    q, k, v = (_loadable(t, interpret, name) for name, t in zip("qkv", (q, k, v), strict=True))
    out = torch.empty(shape_of_out(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        kernels.forward_kernel[(cdiv(q_len, plan.forward.block_m) * batch * heads,)](
            *(q, k, v, out, lse, mask.kv_count, mask.kv_entry, mask.kv_tile, mask.words),
            None if sinks is None else sinks.float().contiguous(),
            *(_strides(t) for t in (q, k, v)),
            *_sizes(q, k),
            **_mask_rows(mask),
            **_rule(mask),
            **_scores(scale, softcap, dtype, interpret),
            **_dims(q, v, plan),
            STEPS=BLOCK[1] // plan.forward.block_n,
            WIDE=cdiv(plan.forward.block_n, _WORD),
            **_compiled(plan, plan.forward),
        )
    return out.to(dtype), lse


def backward(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
    deterministic: bool,
    *,
    interpret: bool = False,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), shaped and typed as q, k and v; with sinks their gradient too, fp32.

    ``deterministic`` changes nothing here: no program waits for another.
    """
    *sums, delta = ordered_sums(grads, saved, mask, order, scale, softcap, interpret=interpret)
    gradients = tuple(t.to(x.dtype) for t, x in zip(sums, saved[:3], strict=True))
    if saved.sinks is None:
        return gradients
    return *gradients, sinks_gradient(saved.sinks, saved.lse * LOG2E, delta)


def ordered_sums(
    grads: Grads,
    saved: Saved,
    mask: LoweredMask,
    order: Order,
    scale: float,
    softcap: float,
    *,
    interpret: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``backward`` and delta; interpreted, its results before their rounding."""
    (dout, dlse), (q, k, v, out, lse, _) = grads, saved
    batch, q_len, heads, dim = q.shape
    plan, dtype, lists = TRITON[dim], q.dtype, len(order.list_of_head)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    q, k, v, dout, out = (_loadable(t, interpret, name) for name, t in inputs.items())
    lse = log.contiguous(_NAME, "lse", lse, "contiguous")
    inner = batch * heads // lists
    with torch.cuda.device_of(q):
        delta = _delta(out, dout, dlse, plan)
        writer, writer_tile = _writers(mask, order, q_len, k.shape[1], plan)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        operands = (q, k, v, dout, lse, delta)
        common = {
            **_rule(mask),
            **_scores(scale, softcap, dtype, interpret),
            **_dims(q, v, plan),
            "scale": scale,
            "INNER": inner,
        }
        strides = [_strides(t) for t in (q, k, v, dout)]
        parts = BLOCK[1] // plan.dkdv.block_n
        kernels.dkdv_kernel[(len(order.ticket) * parts,)](
            *(*operands, dk, dv, order.ticket, order.list_of_head),
            *(order.offset, order.entry, order.tile, mask.words),
            *strides,
            *_sizes(q, k),
            COLUMNS=cdiv(k.shape[1], BLOCK[1]),
            PARTS=parts,
            STEPS=BLOCK[0] // plan.dkdv.block_m,
            LISTS=heads // k.shape[2] // inner,
            **common,
            WIDE=cdiv(plan.dkdv.block_n, _WORD),
            **_compiled(plan, plan.dkdv),
        )
        kernels.dq_kernel[(cdiv(q_len, plan.dq.block_m) * batch * heads,)](
            *(*operands, dq, mask.kv_count, order.list_of_head, writer, writer_tile, mask.words),
            *strides,
            *_sizes(q, k),
            Q_BLOCKS=cdiv(q_len, BLOCK[0]),
            **_mask_rows(mask),
            **common,
            STEPS=BLOCK[1] // plan.dq.block_n,
            WIDE=cdiv(plan.dq.block_n, _WORD),
            **_compiled(plan, plan.dq),
        )
    return dq, dk, dv, delta


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None, plan: TritonPlan) -> Tensor:
    """rowsum(dO * O) - dlse, fp32 [B, Hq, Sq]."""
    batch, q_len, heads, width = out.shape
    delta = torch.empty(batch, heads, q_len, dtype=torch.float32, device=out.device)
    options = _compiled(plan, plan.delta)
    del options["BLOCK_N"]
    kernels.delta_kernel[(cdiv(q_len, plan.delta.block_m) * batch * heads,)](
        out,
        dout,
        None if dlse is None else log.contiguous(_NAME, "dlse", dlse, "contiguous"),
        delta,
        *(_strides(out), _strides(dout), heads, q_len),
        DV=width,
        BLOCK_DV=plan.block_dv,
        **options,
    )
    return delta


def _writers(
    mask: LoweredMask, order: Order, q_len: int, kv_len: int, plan: TritonPlan
) -> tuple[Tensor, Tensor]:
    """Per (set of lists, query block): its key blocks, and their bit tiles, in dQ's write order."""
    columns, blocks = cdiv(kv_len, BLOCK[1]), cdiv(q_len, BLOCK[0])
    count, listed = len(order.offset) - 1, mask.kv_entry.shape[3]
    writer = order.entry.new_empty(count // columns, blocks, listed)
    bits = mask.form == "bits"
    writer_tile = torch.empty_like(writer) if bits else order.tile
    kernels.writers_kernel[(count,)](
        *(order.offset, order.entry, order.rank, order.tile, writer, writer_tile),
        *(blocks, columns, listed),
        LANES=plan.lanes,
        FORM=mask.form,
        **_options(plan, Tile(1, 1, num_warps=1)),
    )
    return writer, writer_tile


def _loadable(t: Tensor, interpret: bool, name: str = "operand", kernel: str = _NAME) -> Tensor:
    """``t`` [B, S, H, D], or a copy that kernels can load in aligned pieces of a row."""
    t = t.float() if interpret else t
    aligned = all(s % _ALIGN == 0 for s in _strides(t)) and t.data_ptr() % _ALIGN == 0
    if aligned and t.stride(3) == 1:
        return t
    log.copied(kernel, name, t, _ROWS)
    return t.clone(memory_format=torch.contiguous_format)


def _strides(t: Tensor) -> tuple[int, int, int]:
    """Strides of batch, row and head; 0 for a dimension of size 1, whose stride means nothing."""
    return tuple(0 if size == 1 else s for size, s in zip(t.shape[:3], t.stride()[:3], strict=True))


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """HEADS, GROUP, Q_LEN, KV_LEN."""
    return q.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1]


def _mask_rows(mask: LoweredMask) -> dict[str, int]:
    """Row of the lists of (b, h); a dimension of size 1 is shared."""
    batches, heads, blocks, listed = mask.kv_entry.shape
    step_b, step_h = heads * blocks * (batches > 1), blocks * (heads > 1)
    return {"LISTED": listed, "mask_b": step_b, "mask_h": step_h}


def _rule(mask: LoweredMask) -> dict[str, object]:
    return {"lo": mask.lo, "hi": mask.hi, "FORM": mask.form}


def _scores(scale: float, softcap: float, dtype: torch.dtype, interpret: bool) -> dict[str, object]:
    """How scores in base 2 are made of products, and P rounded."""
    return {
        "factor": (softcap or scale) * LOG2E,
        "bend": 2 * LOG2E * scale / softcap if softcap else 0.0,
        "SOFTCAP": softcap > 0,
        "ROUND": _ROUND[dtype] if interpret else None,
    }


def _dims(q: Tensor, v: Tensor, plan: TritonPlan) -> dict[str, int]:
    """Head sizes, and what they are padded to."""
    widths = {"D": q.shape[3], "DV": v.shape[3]}
    return widths | {"BLOCK_D": plan.block_d, "BLOCK_DV": plan.block_dv}


def _compiled(plan: TritonPlan, tile: Tile) -> dict[str, int | bool]:
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return blocks | _options(plan, tile)


def _options(plan: TritonPlan, tile: Tile) -> dict[str, int | bool]:
    """The compiler options that every launch names."""
    options = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": plan.fp_fusion,
    }
    if torch.version.hip is not None:
        options["num_stages"] = tile.hip_stages
        options["matrix_instr_nonkdim"] = plan.hip_matrix_instr_nonkdim
        options["kpack"] = plan.hip_kpack
    return options
