"""Defects put into the SM90 forwards on purpose: the simulator and the bytes must notice each one.

A mutant counts as killed when a run differs by a byte from the order in torch, or from the intact
kernel, fails in the simulator (deadlock, wild access), or reports a race or a missing fence.  The
same runs of the intact kernels must all pass.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import masks
from tests import certified
from tests.kernels import ring_defects
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn import mutated, simulated
from tests.sparse_attn.simulated_fwd import (
    LISTS,
    Case,
    case,
    chain,
    dense,
    listed,
    right,
    run,
    zeros,
)

#: What runs at every commit while the kernels are proved.
pytestmark = certified.marks("sparse_attn", "test_mutants_are_killed")

#: Races first, then what needs no deadlock to show: those take up to `max_steps`.
RUNS = [
    *(SETTINGS[-1] | {"check_races": 1, "seed": s, "ctas": n} for s, n in ((3, 5), (6, 2))),
    *(SETTINGS[-1] | {"check_races": 1, "seed": s} for s in (6, 7, 10)),
    *(options | {"ctas": n} for options, n in zip(SETTINGS, (132, 2, 3, 1), strict=True)),
]
SKIPS = ("alternate", "away for long", "held while another skips")


def masked_nan(inputs: Case) -> Case:
    """NaN in the keys that no row sees."""
    inputs.k[:, ~inputs.allowed[0].any(0).any(0)] = math.nan
    return inputs


def full_tail(q_len: int, kv_len: int) -> Case:
    """Random elements, and a full block at the end of the keys."""
    allowed = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(6)) < 0.5
    allowed[:, kv_len // 128 * 128 :] = True
    return case(BlockMask.from_dense(allowed), (1, 2, 1, 64), seed=6)


def of_form(form: str) -> list[Case]:
    """Rows without keys, blocks that some rows skip, tails, several blocks."""
    shape = (2, 4, 2, 64)
    if form == "none":
        # More blocks than stages.
        return [case(BlockMask.full(130, 900), (1, 4, 2, 64), seed=1)]
    if form == "band":
        return [
            case(BlockMask.causal(130, 600), shape, seed=1),
            case(BlockMask.sliding_window(600, 200, left=90, right=60), shape, seed=2),
            # No row sees the first or the last keys of its only block.
            masked_nan(case(BlockMask.from_rule(Band(20, 40), 60, 128), shape, seed=3)),
        ]
    keys = torch.arange(512) % 5 != 0
    holes = torch.rand(100, 512, generator=torch.Generator().manual_seed(3)) < 0.4
    return [
        case(dense(300, 600), shape, seed=4),
        masked_nan(case(BlockMask.from_dense(holes & keys), shape, seed=5)),
        full_tail(100, 200),
        zeros(extra=False),
    ]


def of_tiles(head_dim: int) -> list[Case]:
    """More blocks than stages, and tiles of few blocks, one and none; more tiles than CTAs."""
    return [
        case(BlockMask.full(520, 900), (1, 4, 2, head_dim), seed=1),
        case(BlockMask.causal(520, 600), (2, 2, 1, head_dim), seed=2),
        case(dense(520, 600), (1, 4, 2, head_dim), seed=4),
    ]


def of_lists(head_dim: int) -> list[Case]:
    """Steps of either list alone, one and many, first, between and last; more than the stages."""
    shape = (1, 2, 1, head_dim)
    return [
        *(listed(LISTS[name], shape=shape) for name in SKIPS),
        case(BlockMask.full(200, 900), shape, seed=1),
    ]


@functools.cache
def problems(group: str) -> list[tuple[Case, tuple, str]]:
    """(case, its bytes, arithmetic); group: a form, or "tiles" or "lists" and a head size."""
    kind, _, head_dim = group.partition(" ")
    make = {"tiles": of_tiles, "lists": of_lists}.get(kind)
    inputs = make(int(head_dim)) if make else of_form(group)
    assert make or all(masks.lower(one.mask).form == group for one in inputs)
    wants = map(run if make else chain, inputs)
    # The arithmetic that keeps -0, where O is nothing else.
    return [(x, y, "exact" if y[0].any() else "fma") for x, y in zip(inputs, wants, strict=True)]


def survives(kernel, group: str) -> bool:
    """Whether every run under every setting is right."""
    return all(
        right(inputs, want, forward=kernel, wgmma_math=math, **LIMITS, **options)
        for inputs, want, math in problems(group)
        for options in RUNS
    )


# ---- mutants -------------------------------------------------------------------------------------

_IN, _DEEP = 8 * " ", 12 * " "
_ARRIVE, _NEXT, _DONE, _FREE_K = (
    f"{_IN}{line}\n"
    for line in (
        "self.warp_scheduler_arrive(ctx.consumer)",
        "following = next_step(ctx.mask.steps, state.index)",
        "warpgroup.wait_group(0)",
        "k_ring.consumer_release(state)",
    )
)
_ISSUED = _ARRIVE + _NEXT + _DONE + _FREE_K
_K_WAIT, _V_WAIT = "rings.k.consumer_wait(state)\n", "rings.v.consumer_wait(state)\n"
_LONE_K, _FREE_V = f"k_ring.consumer_wait(state)\n{_IN}ctx", "rings.v.consumer_release(state)\n"
_DONE_V, _AWAIT = f"{_DEEP}warpgroup.wait_group(0)\n", "self.warp_scheduler_sync(ctx.consumer)\n"
_FIRST_K = "ctx.rings.k.consumer_wait(block_union.ring_state(ctx.first_step, self.stages))"
_TURN = f"self.warp_scheduler_sync(ctx.consumer)\n{_IN}return"
_LAST = f"{_IN}rings.v.consumer_release(held)\n{_IN}return"
_Q_WAIT, _FREE_Q = "rings.q.consumer_wait(q_state)\n", f"{_DEEP}rings.q.consumer_release(q_state)\n"
_COORD = "            tile, head, batch = tile_info.coord()\n"
_GIVEN = "cute.arch.barrier_arrive(barrier_id=following, number_of_threads=threads)"
_ROOM = "handover.await_empty(consumer, o_phase)\n"
_EMPTY = "cute.arch.mbarrier_wait(self.empty + consumer, phase ^ 1)"
_READ = "cute.arch.cp_async_bulk_wait_group(0, read=True)"
_FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'
_K_PART, _LAST_V = (
    "tSrK[None, None, group, states[part].index]",
    "rings.v.consumer_wait(v_parts[0])\n",
)
_TOP = "fmax(old_max, block_max(scores, half))"
_SUM = "warp_reduction_sum(row_sum[half], threads_in_group=QUAD)"
_OVER = "acc_o[index] * inverse"
_TOLD = "rings.q.sync_object_empty.wait(q_state.index, q_state.phase)\n"
_GROUPS = (
    f"{_DEEP}warpgroup.fence()\n{_DEEP}for group in cutlass.range_constexpr(groups):\n    {_DEEP}"
)
_KEPT = "scores[index] = scores[index] if kept else -cutlass.Float32.inf"
_BETWEEN, _BITS = f"high)\n    {_DEEP}", f"!= 0\n    {_IN}{_IN}"
_PART = f"consumer_wait(states[part])\n{_GROUPS}"
_TIMES = "scores[index] = scores[index] * one + least"
_LARGE = _KEPT.replace("-cutlass.Float32.inf", "cutlass.Float32(-(2.0**100))")
_ONE = "one = cutlass.Float32(1.0) if kept else cutlass.Float32(0.0)"
_LEAST = "least = cutlass.Float32(0.0) if kept else -cutlass.Float32.inf"
_GUARD = "base = top if top != -cutlass.Float32.inf else cutlass.Float32(0.0)"


def masked(*lines: str) -> tuple[str, ...]:
    """Both element masks with ``lines`` in place of the selection."""
    kinds = (before + _KEPT for before in (_BETWEEN, _BITS))
    return tuple(
        text
        for old, indent in zip(kinds, (_BETWEEN, _BITS), strict=True)
        for text in (old, indent + indent[indent.index("\n") :].join(lines))
    )


#: Module -> label -> (groups of cases, every commit's / the night's; a piece of text, another, ..)
TEXTS: dict[str, dict[str, tuple[str, ...]]] = {
    "sparse_attn.kernel_fwd_sm90": {
        "Q not awaited": ("none", f"{_Q_WAIT}{_IN}while", "while"),
        "Q of the next tile not awaited": ("none", f"{_Q_WAIT}{_IN}hand", "pass\n        hand"),
        "K of the first block not awaited": ("none", _FIRST_K, "pass", _LONE_K, "ctx"),
        "K not awaited": ("none", f"{_K_WAIT}{_DEEP}ctx", "ctx"),
        "first V not awaited": ("none", "rings.v.consumer_wait(step.state(self.stages))", "pass"),
        "V not awaited": ("none", f"{_V_WAIT}{_DEEP}warpgroup", "warpgroup"),
        "the first S not awaited": ("none", _DONE + _FREE_K, _FREE_K),
        "S not awaited": ("none", "warpgroup.wait_group(1)", "pass"),
        "P V not awaited": ("none", f"{_DEEP}warpgroup.wait_group(0)\n", ""),
        "the last P V not awaited": ("none", _DONE + _LAST, _LAST),
        "scores of the next stage": ("none", "K, 0, stage)", "K, 0, (stage + 1) % self.stages)"),
        # V of the next block: K is one block ahead.
        "values of the scores' stage": ("none", "V, stage)", "V, (stage + 1) % self.stages)"),
        "no turn given": ("none", _GIVEN, "pass"),
        "O told before it is written": (
            "none",
            "self.output.keep(tOrO, pO, lane)",
            "pass",
            "handover.publish(consumer, lane, info)",
            f"handover.publish(consumer, lane, info)\n{_IN}{_DEEP}self.output.keep(tOrO, pO, lane)",
        ),
        "O not rescaled": ("none", "softmax.rescale(ctx.tOrO, ctx.factor)", "pass"),
        "one list for all": ("lists 64", "steps[which, None, None]", "steps[0, None, None]"),
        "skipped without a turn": (
            *("lists 64", _TURN, "return"),
            *(f'Returns the next step."""\n{_ARRIVE}{_NEXT}', f'Returns the next."""\n{_NEXT}'),
        ),
        # The word of the first step may not be there, and the stage not be in use.  In later steps
        # the simulator's producer is always far enough ahead.
        "begun before K came": ("lists 64", _FIRST_K, "pass", f"ctx.{_K_WAIT}{_IN}self", "self"),
        # Given back for the block before it in its stage, which another consumer still reads.
        "skipped before V came": ("lists 64", f"ctx.{_V_WAIT}{_IN}ctx", "ctx"),
        "skipped without release of K": ("lists 64", "ctx.rings.k.consumer_release(state)", "pass"),
        "skipped without release of V": ("/ lists 64", f"ctx.{_FREE_V}{_IN}return", "return"),
        "K of a lone product not awaited": ("/ lists 96", _LONE_K, "ctx"),
        "K given back too early": ("lists 96", _ISSUED, _ARRIVE + _NEXT + _FREE_K + _DONE),
        "the step read late": ("/ lists 96", _ISSUED, _ARRIVE + _DONE + _FREE_K + _NEXT),
        "a turn kept": ("lists 96", _ISSUED, _NEXT + _DONE + _FREE_K),
        "others' last steps not given on": (
            "lists 96",
            "while step.has_next:\n                step =",
            "while step.word < step.word:\n                step =",
        ),
        "step before": ("tiles 64 / tiles 128", f"following\n{_DEEP}while", f"step\n{_DEEP}while"),
        "O written over V in use": ("tiles 192", "rings.v.consumer_wait(stage)", "pass"),
        "Q given back early": ("tiles 128 / tiles 64", _COORD + _FREE_Q, _FREE_Q + _COORD),
        "the end without room": ("tiles 64 / tiles 128", f"{_ROOM}{_IN}handover", "handover"),
    },
    "sparse_attn.kernel_fwd_no_overlap_sm90": {
        "V not awaited": ("lists 96", f"{_V_WAIT}{_DEEP}self", "self"),
        "the last V not awaited": ("/ lists 96", f"{_V_WAIT}{_IN}self", "self"),
        "V given back early": ("/ lists 96", _DONE_V + _DEEP + _FREE_V, _DEEP + _FREE_V + _DONE_V),
        "the step of the block before": ("lists 96", "step = following", "pass"),
        "O not rescaled": ("/ lists 96", "softmax.rescale(ctx.tOrO, ctx.factor)", "pass"),
        "a turn awaited twice": ("/ lists 96", "finish_skip(ctx, state)", "skip_block(ctx, step)"),
        "no turn behind others": ("/ lists 96", f"    {_DEEP}{_AWAIT}", f"    {_DEEP}pass\n"),
    },
    "sparse_attn.kernel_fwd_wide_sm90": {
        "a stage of O of the block before": ("tiles 256", "(after & 1)", "(after & 1 ^ 1)"),
        "half of K not awaited": ("tiles 256", f"ctx.rings.k.{_PART}mma", f"pass\n{_GROUPS}mma"),
        "half of V not awaited": ("tiles 256", f"ctx.rings.v.{_PART}a =", f"pass\n{_GROUPS}a ="),
        "a half given back early": ("tiles 256", "(PARTS - 1 - part)", "(PARTS - part)"),
        "the halves of K in one place": ("tiles 256", _K_PART, _K_PART.replace("part", "0")),
        "halves of V swapped": ("tiles 256", "rP[None, None, part", "rP[None, None, (1 - part)"),
        "the last V of the block before": ("tiles 256", f"step)\n{_IN}{_LAST_V}", "step)\n"),
    },
    "sparse_attn.device.forward_loads": {
        "told too early": ("tiles 128 / tiles 64, tiles 256", f"{_TOLD}{_DEEP}tile", "tile"),
        "the end told too early": ("tiles 256 / tiles 128", f"{_TOLD}{_IN}tile", "tile"),
        "a place of the other phase": (
            "tiles 64 / tiles 128",
            "ring_code(state_k.index, state_k.phase ^ 1)",
            "ring_code(state_k.index, state_k.phase)",
        ),
        "phases of K and V swapped": (
            "tiles 256",
            "ring_code(state_v.phase ^ 1, state_k.phase ^ 1)",
            "ring_code(state_k.phase ^ 1, state_v.phase ^ 1)",
        ),
        "a stage left while it is read": (
            "tiles 64 / tiles 128, tiles 256",
            "    ring.sync_object_empty.wait(state.index, state.phase)\n    if cute",
            "    if cute",
        ),
        "a stage too few left": ("tiles 64 / tiles 128", "tiles.o_stages", "tiles.o_stages - 1"),
        "K first where it comes in parts": (
            "tiles 256",
            "parts == 1):\n                    if before",
            "parts > 0):\n                    if before",
        ),
    },
    "sparse_attn.device.output": {
        "O told over what is unread": ("none", _EMPTY, "pass"),
        # Its stage of V is free for the next tile's while O is on its way out.
        "O given back early": ("none, tiles 256 / tiles 64", _READ, "pass"),
        "O stored early": ("tiles 128 / tiles 64", "full + consumer, WARPS", "full + consumer, 1"),
        "no fence before O is stored": ("tiles 128 / tiles 256", _FENCE, "pass"),
    },
    "sparse_attn.device.tile_scheduler": {
        # h mod Hkv for h // (Hq / Hkv).
        "heads shared in turn": ("none", "head // (heads // kv_heads)", "head % kv_heads"),
        "a tile left out": ("tiles 64", "following = ctas + ", "following = ctas + 1 + "),
        "tiles of another head": (
            "tiles 64",
            "return tiles - 1 - index % tiles, of_head % heads, of_head // heads",
            "return tiles - 1 - index % tiles, of_head % 1, 0",
        ),
    },
    "sparse_attn.device.mask": {
        # Right unless a masked key is NaN.
        "masked by multiplication": ("band / bits", *masked(_ONE, _LEAST, _TIMES)),
        # A row without keys is then a mean of what it must not see.
        "masked with a large number": ("bits / band", *masked(_LARGE)),
        "tail not masked": ("none / bits", "ROWS):\n        low", "0):\n        low"),
        "one key too many": ("band", "last[half] - offset", "last[half] + 1 - offset"),
        "bits of the next row": ("bits", "shape[1] + row)", "shape[1] + (row ^ 1))"),
        "partial blocks not masked": ("bits", "keep_bits(tSrS, lane, self.bits)", "pass"),
    },
    "sparse_attn.device.block_union": {
        "blocks descending": (
            "bits",
            "cutlass.min(index + cute.arch.lane_idx(), cute.size(entries) - 1)",
            "cutlass.max(blocks.count - 1 - index - cute.arch.lane_idx(), 0)",
            "cutlass.min(state[n, INDEX], cute.size(tiles) - 1)",
            "lists[n].count - 1 - state[n, INDEX]",
        ),
        # V of the last block is held while V of a block in its stage is awaited.
        "a step too patient": ("lists 64", "== max_skipped_steps", "== max_skipped_steps + 1"),
        "never given a step": ("/ lists 64", "] == max_skipped_steps and", "] == 10**6 and"),
        # The step of a list that is away is another visit of block 0.
        "last block counted again": ("lists 64", "BEYOND, END = 2**23", "BEYOND, END = 0"),
    },
    "dsl.softmax": {
        "rescaled rows swapped": ("none", "] * factor[half]\n", "] * factor[1 - half]\n"),
        # The maximum sinks by 1 in a block of smaller scores: exactly equal, in other bits.
        "blocks without keys change the state": ("bits", "fmax(old_max,", "fmax(old_max - 1.0,"),
        "maximum of the block": ("bits", _TOP, _TOP.replace("old_max", "block_max(scores, half)")),
        # exp2(-inf - -inf) is NaN.
        "no guard for empty rows": ("bits", _GUARD, "base = top"),
        "lanes not added": ("none", _SUM, _SUM.replace("QUAD", "1")),
        "-0 kept": ("bits", "cute.math.fma(acc_o[index], inverse, cutlass.Float32(0.0))", _OVER),
    },
    # The k16 groups of P V in another order.
    "dsl.mma": {
        "key groups swapped": (
            "none",
            "rA[None, None, group], tCrB[None, None, group, stage]",
            "rA[None, None, group ^ 1], tCrB[None, None, group ^ 1, stage]",
        ),
    },
}
MUTANTS = {
    f"{label}: {module.rpartition('.')[2]}": (groups, module, *pieces)
    for module, mutants in TEXTS.items()
    for label, (groups, *pieces) in mutants.items()
} | {name: ("none", defect) for name, defect in ring_defects.DEFECTS.items()}


INTACT = (
    "none",
    "band",
    "bits",
    "lists 64",
    "lists 96",
    *(f"tiles {d}" for d in (64, 128, 192, 256)),
)


@pytest.mark.parametrize("group", INTACT)
def test_the_intact_kernel_survives(group):
    assert survives(simulated.kernel, group)


@pytest.mark.parametrize(("name", "group"), list(mutated.by_group(MUTANTS)))
def test_mutants_are_killed(tmp_path, name, group):
    problems(group)
    assert not survives(mutated.kernels(tmp_path, *MUTANTS[name][1:]), group)
