"""Every constant that the bits of linear attention depend on, and the guarantees it keeps.

A sequence is cut into chunks of rows at absolute positions, counted from its first row: packs,
batches and padding do not move them.  What is summed over rows is summed by chunk, rows ascending,
and chunks are added one by one, sequences and chunks ascending.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from ..cpu import elementary
from .triton.plan import GATED_NORM, SELECTIVE, TRITON

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Rows of a chunk of sums over rows: the convolution's, and the decay's.
CONV_CHUNK = 64
#: Rows that the convolution reads: the row itself and those before it.
CONV_WIDTHS = (2, 3, 4)
#: Channels, at most: blocks of 64 of them lie along a dimension of a grid.
MAX_CHANNELS = 65535 * 64

#: Rows of a chunk of the delta rule: between chunks its state is fp32.
DELTA_CHUNK = 64
#: Rows of a block of a chunk, on a GPU.
DELTA_BLOCK = 16
#: Columns of K that are summed at once in a backward, on a GPU.
DELTA_PART = 64
#: K and V are multiples of the first, and at most the second.
DELTA_SIZES = 8, 256
#: Rows of a chunk of a state space scan, whose P and N are as K and V of the delta rule.
SSD_CHUNK = 128
#: Rows between the saved states of a selective scan, and of a part of its sums over rows.
SELECTIVE_CHUNK = 32
#: N of a selective scan, at most; and those that Triton's kernels take.
SELECTIVE_STATES, SELECTIVE_GPU_STATES = 256, (8, 16, 32)
#: v heads of the delta rule, heads of a state space scan and channels of a selective scan, at most:
#: they lie along a dimension of a grid.
MAX_HEADS = 65_535
#: K and V that Triton's kernels take.  ptxas 12.8 may break products of narrower tiles: see
#: docs/notes/linear_attention.md.
DELTA_GPU_SIZES = 64, 128
#: P and N that Triton's kernels take.
SSD_GPU_SIZES = (64,), (64, 128)
#: Widths of rows that `op_gate.l2norm` takes are multiples of the first, up to the second.
L2NORM_WIDTHS = 8, 256
#: eps of the norms of q and k before a delta rule.
L2NORM_EPS = 1e-6
#: softplus(x) is x above it, as torch has it.
SOFTPLUS_LINEAR = 20.0


#: Products of matrices on a GPU.
PRODUCTS = "bf16 operands, fp32 accumulators, ascending k"
_ON_CPU = frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT})
#: Backend -> what the convolution and the scans keep, and what the delta rule does.
KEPT: Mapping[str, frozenset[str]] = {
    arch.TRITON: _ON_CPU | {SCHEDULE_INVARIANT},
    arch.CPU: _ON_CPU,
}
DELTA_KEPT = {arch.CUTE_SM90: KEPT[arch.TRITON], **KEPT}


def conv_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the convolution's contract id covers."""
    return _arithmetic(backend, device) | {
        "row": "bias, then one multiply-add a tap, the oldest row first; SiLU; one rounding",
        "gradient of a row": "one multiply-add a tap, the next row first; one rounding",
        "chunk": CONV_CHUNK,
    }


def gate_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that bits of `op_gate` depend on, for the contracts of its callers."""
    adds = "each half onto half" if backend == arch.CPU else "neighbours, then their sums"
    return _arithmetic(backend, device) | _softplus_facts(backend) | {
        "l2norm": "x (1 / sqrt(sum x^2 + eps)), one rounding",
        "gradient of l2norm": "rstd (dy - xhat sum(dy xhat)), one rounding",
        "sum of a row": f"{adds}; zeros fill it up to a power of two",
        "decay": "-(e^A_log) softplus(a + dt_bias)",
        "sums of the decay": "one multiply-add a row, rows of a chunk ascending, then chunks",
        "chunk": CONV_CHUNK,
    }  # fmt: skip


def _softplus_facts(backend: str) -> dict[str, object]:
    return {
        "softplus": f"max(x, 0) + 2 artanh(u / (u + 2)), u = e^-|x|; x above {SOFTPLUS_LINEAR}",
        "artanh": elementary.LOG_SERIES[: None if backend == arch.CPU else TRITON.log_terms],
    }


def delta_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the delta rule's contract id covers."""
    common = _arithmetic(backend, device) | {
        "chunk": DELTA_CHUNK,
        "state": "fp32 between chunks, at absolute rows of a sequence",
        "gradient of the state": "fp32 between chunks",
        "gradients of q and k": "v heads ascending; one rounding",
        "eps of l2norm": L2NORM_EPS,
        "gate": gate_facts(backend, device),
    }
    if backend == arch.CPU:
        order = "row by row: decay, u = beta (v - S k), S + k u, scale S q; sums by halves"
        return common | {"order": order}
    order = (
        "decays 2^(G_i - G_j) of sums G, neighbours first; A = (I + L)^-1 by rows of diagonal "
        "blocks, then block by block; u = A r, P u on q S, the update of S "
        "from zero, of k and of u times its decay to the chunk's end"
    )
    return common | {
        "order": order, "products": PRODUCTS, "block": DELTA_BLOCK,
        "sums over K of gradients": DELTA_PART,
    }  # fmt: skip


def kda_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the contract id of Kimi delta attention covers: those that differ, too."""
    lower_bound = "lower_bound sigmoid((e^A_log) (a + dt_bias))"
    channels = "halves of a row, then rows" if backend == arch.CPU else "rows, then halves"
    common: dict[str, object] = {"decay": "by channel", "gate with a lower bound": lower_bound}
    common |= {"gradient of A_log": f"channels of a head: {channels}"}
    if backend == arch.TRITON:
        common["order inside of chunks"] = (
            "G a chain; pairs of rows in levels of blocks of 32 to 1 rows, rows times decays in "
            "bf16, from or to the first block's last row, K in parts; 2^G q with scale, 2^G k and "
            "2^(G_C - G) k in bf16"
        )
        common["gradients"] = "level by level; dg a chain, the last row first"
    return delta_facts(backend, device) | common


def ssd_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the state space scan's contract id covers."""
    common = _arithmetic(backend, device) | _softplus_facts(backend) | {
        "chunk": SSD_CHUNK,
        "step": "dt + dt_bias, softplus, clamp",
        "state": "fp32 between chunks, at absolute rows of a sequence",
        "gradient of the state": "fp32 between chunks",
        "gradients of B and C": "heads ascending; one rounding",
        "sums of the gradients of A, D and dt_bias": "by chunk, chunks ascending",
        "z": "y silu(z), one rounding",
    }  # fmt: skip
    if backend == arch.CPU:
        order = "row by row: decay, S + dt x B, S C, + D x; sums by halves"
        return common | {"order": order}
    order = (
        "decays 2^(G_i - G_j) of a running sum G, P x on 2^G (C S), one multiply-add of D x, the "
        "update of S from zero"
    )
    return common | {
        "order": order, "products": PRODUCTS,
        "gradient of the decays": "rows and columns of one P, the last row first",
        "rows of a part of dD": TRITON.ssd_rows,
        "columns of a part of <dS, S>": TRITON.ssd_columns,
    }  # fmt: skip


def selective_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the selective scan's contract id covers."""
    common = _arithmetic(backend, device) | _softplus_facts(backend) | {
        "order": "row by row: S = e^(A step) S + (step u) B, then S C, + D u, y silu(z)",
        "sums over n": "a chain, n ascending",
        "step": "delta + delta_bias, softplus",
        "state and its gradient": "fp32 behind each row",
        "rounding of a row": "one, at the end",
        "chunk of sums over rows": SELECTIVE_CHUNK,
    }  # fmt: skip
    if backend == arch.CPU:
        return common | {
            "sums of the gradients of A, D, delta_bias": "rows of a chunk ascending, then chunks",
            "gradients of B and C": "channels ascending; one rounding",
        }  # fmt: skip
    return common | {
        "multiply-adds": "S from (step u) B, terms of chains over n, D u, sums over rows",
        "sums of the gradients of A, D, delta_bias": "rows of a chunk descending, then chunks",
        "gradients of B and C": "channels of a part as halves, parts ascending; one rounding",
        "channels of a part": SELECTIVE.channels,
    }  # fmt: skip


def _arithmetic(backend: str, device: arch.Device) -> dict[str, object]:
    if backend == arch.CPU:
        return {"inside": "fp64", "exp2": elementary.EXP2}
    exp2 = "v_exp_f32" if device.arch.startswith("gfx") else "ex2.approx.ftz"
    constants = {"log2(e)": elementary.LOG2E_FP32, "exp2": exp2}
    return constants | {"inside": "fp32", "fp_fusion": TRITON.fp_fusion}


#: Elements of a group of gated_rms_norm, at most: registers hold one.
MAX_GROUP = 8192
GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def padded_group(size: int) -> int:
    """Width of a group padded to a power of two; it fixes the tree of sums over it."""
    return max(16, 1 << (size - 1).bit_length())


def group_part_rows(size: int) -> int:
    """Rows of a part of dweight: 64, more of narrow groups, as heads are; 32 of the widest."""
    padded = padded_group(size)
    if padded <= 256:
        return 131072 // padded
    return 32 if padded > 4096 else max(64, 65536 // padded)


def gated_norm_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that the contract id of gated_rms_norm covers."""
    sizes = [1 << i for i in range(4, 14)]
    common = _arithmetic(backend, device) | {
        "rows of a part": {size: group_part_rows(size) for size in sizes},
        "rounding": "one, at the end",
    }
    if backend == arch.CPU:
        return common | {"sums": "halves"}
    lanes = {size: (GATED_NORM.rows(size), GATED_NORM.fold(size)) for size in sizes}
    return common | {"group": "pairs", "lanes, pieces": lanes, "e^-|z|": "one product"}
