"""FlashAttention-4 (`flash-attn-4`) on a problem: its dense masks where it has them, else lists.

full, causal and window are arguments of its dense kernels, its fastest path.  The others go through
its block lists, in blocks of 128 x 128, with an element rule where some blocks are partial.  A pack
goes through its varlen kernels, causal, with all sequences one behind another.
"""

from __future__ import annotations

import functools

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import build

from ..core.rival import Absent, Call, module
from . import pack
from .cases import Inputs, Problem
from .targets import FA4_DENSE as DENSE
from .targets import PACK

NO_ORDER = (
    "FA4's SM90 backward asserts determinism away with block sparsity (flash_bwd_sm90.py: "
    '"Deterministic not implemented for block-sparse backward")'
)


def arguments(problem: Problem, which: str) -> dict:
    """The keyword arguments that state the mask, for one pass."""
    case = problem.case
    _needs_no_pack(problem)
    if case.mask == "full":
        return {}
    if case.mask == "causal":
        return {"causal": True}
    if case.mask == "window":
        return {"window_size_left": case.window - 1, "window_size_right": 0}
    torch_lists = module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    lists = block_lists(problem.mask, "kv" if which == "fwd" else "q")
    options = {"block_sparse_tensors": torch_lists(**lists)}
    if case.mask == "document":
        rule = module("perf.attention.fa4_masks").document
        return options | {"mask_mod": rule, "aux_tensors": [problem.ids]}
    return options | ({"mask_mod": _prefix_rule(case.prefix)} if case.mask == "prefix" else {})


def block_lists(mask: BlockMask, side: str) -> dict[str, object]:
    """FA4's fields of a mask: its partial ("mask") and its full blocks, as two lists.

    side: "kv", or "q" for the transpose, which its backward takes.
    """
    count, index, full = mask.lists(side)
    row, col, is_full = build.ragged(count, index, full)
    fields = {"block_size": mask.block_size}
    for name, chosen in (("mask", ~is_full), ("full", is_full)):
        count_of, index_of = build.compact(row[chosen], col[chosen], shape=tuple(count.shape))
        fields |= {f"{name}_block_cnt": count_of, f"{name}_block_idx": _whole_width(index_of)}
    return fields


def _whole_width(index: torch.Tensor) -> torch.Tensor:
    """[.., blocks, L] -> [.., blocks, blocks], zeros beyond: one compilation for all masks."""
    return torch.nn.functional.pad(index, (0, index.shape[2] - index.shape[3])).contiguous()


@functools.cache
def _prefix_rule(length: int):
    return module("perf.attention.fa4_masks").prefix(length)


def _needs_no_pack(problem: Problem) -> None:
    if problem.case.mask == PACK:
        raise Absent("a pack goes through its varlen kernels: fa4_varlen")


def _interface(problem: Problem):
    interface = module("flash_attn.cute.interface")
    if problem.device.type != "cuda":
        raise Absent("FA4 needs a CUDA GPU")
    return interface


def forward(problem: Problem):
    """(out, lse) of an input set; lse is the natural logarithm, fp32 [B, H, S], as ours."""
    interface = _interface(problem)
    options = {"softmax_scale": problem.case.scale, "return_lse": True} | arguments(problem, "fwd")

    def call(t: Inputs) -> tuple[torch.Tensor, ...]:
        return interface._flash_attn_fwd(t.q, t.k, t.v, **options)[:2]

    return call


def backward(problem: Problem, ordered: bool):
    """(dq, dk, dv) of an input set: preprocess, main kernel, postprocess, as its autograd does."""
    _needs_no_pack(problem)
    if ordered and problem.case.mask not in DENSE:
        raise Absent(NO_ORDER)
    interface = _interface(problem)
    options = {"softmax_scale": problem.case.scale, "deterministic": ordered}
    options |= arguments(problem, "bwd")

    def call(t: Inputs) -> tuple[torch.Tensor, ...]:
        return interface._flash_attn_bwd(t.q, t.k, t.v, t.out, t.dout, t.lse, **options)

    return call


def _varlen(problem: Problem) -> dict:
    """The keyword arguments of both passes that state a pack.

    cu_seqlens are int32 on the device; the longest sequence is a number, as trainers' collators
    give it, so that no pass waits for the device.
    """
    offsets = pack.offsets(problem)
    on_device, longest = offsets.to(problem.device), int(offsets.diff().max())
    lengths = {f"cu_seqlens_{side}": on_device for side in "qk"}
    lengths |= {f"max_seqlen_{side}": longest for side in "qk"}
    return lengths | {"softmax_scale": problem.case.scale, "causal": True}


def varlen_forward(problem: Problem) -> Call:
    """(out, lse) of an input set, whose rows are given one behind another."""
    stated = _varlen(problem) | {"return_lse": True}
    interface = _interface(problem)

    def call(t: Inputs) -> tuple[torch.Tensor, ...]:
        out, lse = interface._flash_attn_fwd(*pack.in_a_row(t.q, t.k, t.v), **stated)[:2]
        return pack.in_rows(problem, out, lse)

    return call


def varlen_backward(problem: Problem) -> Call:
    """(dq, dk, dv) of an input set, whose rows are given one behind another."""
    stated = _varlen(problem) | {"deterministic": False}
    interface = _interface(problem)
    sizes = problem.case.batch, problem.case.s

    def call(t: Inputs) -> tuple[torch.Tensor, ...]:
        rows = pack.in_a_row(t.q, t.k, t.v, t.out, t.dout)
        grads = interface._flash_attn_bwd(*rows, t.pack_lse[0], **stated)
        return tuple(x.unflatten(0, sizes) for x in grads)

    return call
