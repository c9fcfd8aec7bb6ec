"""The torch ops of paged caches: schemas, fakes, plans.

    paged_attention       q, caches, lists, sinks -> out, lse
    paged_attention_out   the same into ``out`` -> lse
    write_kv_cache        rows of keys and values into the caches

A backend's launchers are

    paged_attention(q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q, *PagedOptions)
        -> (out, lse)
    write_kv_cache(key, value, k_cache, v_cache, slot_mapping)

with tensors of any strides, rows contiguous; caches are [pages, rows, Hkv, ..], those of the layout
"HND" a view transposed.  No size is zero on a GPU; on the CPU the launchers check the numbers of
all lists.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...arch import CPU, CUTE_SM90, TRITON
from ...runtime import dispatch
from ...runtime.dispatch import Implementation
from ...runtime.plan_cache import Plan
from ...runtime.torch_ops import define_op, refuse_vmap
from .. import config
from . import checks

NAME = "paged_attention"
WRITE = "write_kv_cache"
#: Bytes of a vector that kernels store.
_ALIGN = 16
_SYSTEM = __package__.rpartition(".")[0]

dispatch.register(
    NAME,
    {
        CUTE_SM90: Implementation(
            f"{__package__}.launch:{NAME}",
            dispatch.HALF,
            planner=f"{__package__}.launch:plan_paged",
        ),
        TRITON: Implementation(f"{_SYSTEM}.triton.paged:{NAME}", dispatch.HALF),
        CPU: Implementation(f"{__package__}.cpu:{NAME}", dispatch.HALF),
    },
    contract=NAME,
)
dispatch.register(
    WRITE,
    {
        **dict.fromkeys(
            (CUTE_SM90, TRITON), Implementation(f"{_SYSTEM}.triton.paged:{WRITE}", dispatch.HALF)
        ),
        CPU: Implementation(f"{__package__}.cpu:{WRITE}", dispatch.HALF),
    },
    contract=WRITE,
)
dispatch.register_contracts((NAME,), config.KEPT, config.contract_facts, NAME)
dispatch.register_contracts((WRITE,), config.KEPT, lambda *_: {"rows": "copied"}, WRITE)


def _nothing(q, v_cache):
    """(out, lse) of tokens that are in no sequence."""
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    return q.new_zeros(*q.shape[:2], v_cache.shape[3]), lse


def _is_empty(q, k_cache, block_table) -> bool:
    """Whether nothing is launched.  The CPU's launcher looks at the lists of an empty call too."""
    is_full = q.numel() and k_cache.numel() and block_table.numel()
    return not (q.device.type == "cpu" or is_full)


def _arguments(operands: tuple, out: torch.Tensor | None) -> tuple:
    """Arguments of a launcher: the operands of an op, and where the result goes."""
    q, k_cache, v_cache, *lists, scale, left, right, softcap, sinks, layout = operands
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    scale = config.score_scale(scale, q.shape[2])
    return q, k_cache, v_cache, *lists, scale, (left, right), softcap, sinks, out


def _plan(*operands):
    """Plan of ``paged_attention``."""
    q, k_cache, _, block_table = operands[:4]
    if _is_empty(q, k_cache, block_table):
        return Plan(lambda q, k_cache, v_cache, *rest: _nothing(q, v_cache), cacheable=False)
    plan = dispatch.plan(NAME, q.device, q.dtype, *_arguments(operands, None))
    return replace(plan, run=lambda *operands: plan.run(*_arguments(operands, None)))


def _plan_out(out, *operands):
    """Plan of ``paged_attention_out``."""
    q, k_cache, _, block_table = operands[:4]
    # Kernels store whole vectors; plans of tensors at other addresses are not cached.
    if out.data_ptr() % _ALIGN or _is_empty(q, k_cache, block_table):
        plan = _plan(*operands)

        def run(out, *operands):
            result, lse = plan.run(*operands)
            out.copy_(result)
            return lse

        return replace(plan, run=run, cacheable=False)
    plan = dispatch.plan(NAME, q.device, q.dtype, *_arguments(operands, out))
    return replace(plan, run=lambda out, *operands: plan.run(*_arguments(operands, out))[1])


def _fake(q, k_cache, v_cache, *rest):
    tokens, heads, _ = q.shape
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    return q.new_empty((tokens, heads, v_cache.shape[3])), lse


def _run_write(key, value, k_cache, v_cache, slot_mapping):
    # The CPU's launcher looks at the slots, whether there is something to write or not.
    if key.device.type == "cpu" or (key.numel() and k_cache.numel()):
        launch = dispatch.launcher(WRITE, key.device, key.dtype)
        launch(key, value, k_cache, v_cache, slot_mapping)


_refuse_vmap = refuse_vmap(
    f"{NAME}, {WRITE}", "is not supported; make the mapped dimension part of the tokens"
)


_OPERANDS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seqlens_k, "
    "Tensor cu_seqlens_q, float? scale, SymInt? left, SymInt? right, float softcap, Tensor? sinks, "
    "str layout"
)
paged_attention = define_op(
    f"{NAME}({_OPERANDS}) -> (Tensor, Tensor)",
    plan=_plan,
    check=checks.attention,
    fake=_fake,
    vmap=_refuse_vmap,
    autocast_args=(0,),
)
paged_attention_out = define_op(
    f"{NAME}_out(Tensor(a!) out, {_OPERANDS}) -> Tensor",
    plan=_plan_out,
    fake=lambda out, *operands: _fake(*operands)[1],
    vmap=_refuse_vmap,
    autocast_args=(1,),
)
write_kv_cache = define_op(
    f"{WRITE}(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping) -> ()",
    _run_write,
    fake=lambda key, value, k_cache, v_cache, slot_mapping: None,
    vmap=_refuse_vmap,
)
