"""A forward whose CTAs stay: tile after tile, with loads of the next one under the end of this one.

Which CTA takes which tile is no row's business; few CTAs have the bytes of one for each tile.
"""

from __future__ import annotations

import functools
import importlib
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn.config import HEAD_DIMS, configure_forward
from ptxsim import modes, skips
from tests.kernels.edited import changed
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn import simulated
from tests.sparse_attn.fwd_masks import MASKS, dense
from tests.sparse_attn.simulated_fwd import Case, case, right, run, same

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_few_ctas test_every_mode test_a_counter_is_zero_for_each_launch test_mutants_are_killed"
)
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]
skips.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90")
NIGHT = pytest.mark.nightly
#: CTAs of one tile after another; with the last there are some left over.
FEW = (1, 2, 3, 7)


def tiles_of(given: Case) -> int:
    rows = configure_forward("bf16", given.q.shape[3], "none").rows
    return given.q.shape[0] * given.q.shape[2] * -(-given.q.shape[1] // rows)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["causal", "random", pytest.param("full", marks=NIGHT)])
def test_few_ctas(name, head_dim):
    """Long tiles and short ones, tiles without blocks, tails."""
    inputs = case(MASKS[name](520, 400), (1, 2, 1, head_dim), seed=head_dim)
    assert tiles_of(inputs) > max(FEW[:3])
    want = run(inputs)
    for ctas in FEW:
        assert same(run(inputs, ctas=ctas), want), ctas


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_mode(head_dim):
    """Two CTAs of many tiles: late and early data, random warps, any residency, races."""
    inputs = case(dense(300, 383), (1, 2, 1, head_dim), seed=3)
    modes.run_modes(lambda: run(inputs, ctas=2), modes.MODES)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_counter_is_zero_for_each_launch(head_dim):
    """Or tiles are left out; where each tile has a CTA there is none."""
    inputs = case(BlockMask.causal(400, 400), (1, 3, 1, head_dim), seed=1)
    want, out = run(inputs), []
    true = torch.zeros

    def ones(*size, **options):
        out.append(size)
        return true(*size, **options) + 1

    with mock.patch.object(launch.torch, "zeros", ones):
        assert same(run(inputs, ctas=tiles_of(inputs)), want) and not out[1:]
        assert not same(run(inputs, ctas=2), want) and out[-1] == (1,)
    again = launch.torch.zeros is true and run(inputs, ctas=2)
    assert same(again, want)


# ---- mutants -------------------------------------------------------------------------------------

LOADS, OUTPUT, SCHEDULER = "device.forward_loads", "device.output", "device.tile_scheduler"
KERNEL, WIDE = "kernel_fwd_sm90", "kernel_fwd_wide_sm90"
_READ = "            tile, head, batch = tile_info.coord()\n"

#: (head sizes, a module, what is replaced, by what, ..)
MUTANTS = {
    "a tile left out": ((64,), SCHEDULER, "following = ctas + ", "following = ctas + 1 + "),
    "tiles of another head": (
        (64,),
        SCHEDULER,
        "return tiles - 1 - index % tiles, of_head % heads, of_head // heads",
        "return tiles - 1 - index % tiles, of_head % 1, 0",
    ),
    "told before the tile before is done": (
        (128, 64, 256),
        LOADS,
        "            rings.q.sync_object_empty.wait(q_state.index, q_state.phase)\n"
        "            tile_info.publish(tile",
        "            tile_info.publish(tile",
    ),
    "the end told before the last tile is done": (
        (256, 128),
        LOADS,
        "        rings.q.sync_object_empty.wait(q_state.index, q_state.phase)\n"
        "        tile_info.publish_end(",
        "        tile_info.publish_end(",
    ),
    "a place of the other phase": (
        (64, 128),
        LOADS,
        "ring_code(state_k.index, state_k.phase ^ 1)",
        "ring_code(state_k.index, state_k.phase)",
    ),
    "phases of K and V swapped": (
        (256,),
        LOADS,
        "ring_code(state_v.phase ^ 1, state_k.phase ^ 1)",
        "ring_code(state_k.phase ^ 1, state_v.phase ^ 1)",
    ),
    "a stage left while it is read": (
        (64, 128, 256),
        LOADS,
        "    ring.sync_object_empty.wait(state.index, state.phase)\n    if cute",
        "    if cute",
    ),
    "a stage of V too few left": (
        (64, 128),
        LOADS,
        "range_constexpr(self.tiles.o_stages)",
        "range_constexpr(self.tiles.o_stages - 1)",
    ),
    "K first where it comes in parts": (
        (256,),
        LOADS,
        "if cutlass.const_expr(parts == 1):\n                    if before",
        "if cutlass.const_expr(parts > 0):\n                    if before",
    ),
    "the step of the block before": (
        (64, 128),
        KERNEL,
        "step = following\n            while self",
        "step = step\n            while self",
    ),
    "O written over V that is multiplied": (
        (192,),
        KERNEL,
        "        rings.v.consumer_wait(stage)\n",
        "",
    ),
    "Q given back before what came with it is read": (
        (128, 64),
        KERNEL,
        f"{_READ}            rings.q.consumer_release(q_state)\n",
        f"            rings.q.consumer_release(q_state)\n{_READ}",
    ),
    "O given back while it is read": (
        (256, 64),
        OUTPUT,
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "",
    ),
    "O stored when a warp has written": (
        (128, 64),
        OUTPUT,
        "mbarrier_init(self.full + consumer, WARPS)",
        "mbarrier_init(self.full + consumer, 1)",
    ),
    "no fence before O is stored": (
        (128, 256),
        OUTPUT,
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
    ),
    "the end without room for it": (
        (64, 128),
        KERNEL,
        "        handover.await_empty(consumer, o_phase)\n        handover",
        "        handover",
    ),
    "a stage of O of the block before": (
        (256,),
        WIDE,
        "stage = self.parts_at(after & 1)[step]",
        "stage = self.parts_at(after & 1 ^ 1)[step]",
    ),
    "the second half of K not awaited": (
        (256,),
        WIDE,
        "                ctx.rings.k.consumer_wait(states[part])\n            warpgroup.fence()\n"
        "            for group in cutlass.range_constexpr(groups):\n                mma.set",
        "                pass\n            warpgroup.fence()\n"
        "            for group in cutlass.range_constexpr(groups):\n                mma.set",
    ),
    "the second half of V not awaited": (
        (256,),
        WIDE,
        "                ctx.rings.v.consumer_wait(states[part])\n            warpgroup.fence()\n"
        "            for group in cutlass.range_constexpr(groups):\n                a =",
        "                pass\n            warpgroup.fence()\n"
        "            for group in cutlass.range_constexpr(groups):\n                a =",
    ),
    "a half given back while it is multiplied": (
        (256,),
        WIDE,
        "wait_group(PARTS - 1 - part)",
        "wait_group(PARTS - part)",
    ),
    "the halves of K in one place": (
        (256,),
        WIDE,
        "ctx.tSrK[None, None, group, states[part].index]",
        "ctx.tSrK[None, None, group, states[0].index]",
    ),
    "the halves of V in the other order": (
        (256,),
        WIDE,
        "ctx.tOrP[None, None, part * groups + group]",
        "ctx.tOrP[None, None, (1 - part) * groups + group]",
    ),
    "the last V of the block before": (
        (256,),
        WIDE,
        "        # O += P_last V_last\n        _, v_parts = self.parts_of(step)\n"
        "        rings.v.consumer_wait(v_parts[0])\n",
        "        # O += P_last V_last\n        _, v_parts = self.parts_of(step)\n",
    ),
}


def listed():
    """Each at its first head size for every commit, and at the others by night."""
    for name, (dims, *_) in MUTANTS.items():
        for dim in dims:
            yield pytest.param(name, dim, marks=() if dim == dims[0] else NIGHT)


def mutated(folder, name: str):
    """From a configuration to a forward with a defect."""
    module, *pieces = MUTANTS[name][1:]
    package = "cute_kernels.sparse_attn"
    mutant = changed(folder, f"sparse_attn.{module}", *pieces)

    @functools.cache
    def kernel(chosen):
        if module == WIDE:
            return mutant.build(chosen, compile=ptxsim.compile)
        if module == KERNEL:
            assert chosen.parts == 1
            return mutant.build(chosen, compile=ptxsim.compile)
        # Whoever has the module, or a class of it.
        original = importlib.import_module(f"{package}.{module}")
        users = [importlib.import_module(f"{package}.{index}") for index in (KERNEL, LOADS, OUTPUT)]
        with pytest.MonkeyPatch.context() as patch:
            for user in users:
                for key, value in list(vars(user).items()):
                    if value is original:
                        patch.setattr(user, key, mutant)
                    elif getattr(value, "__module__", "") == original.__name__ and user != original:
                        patch.setattr(user, key, getattr(mutant, key))
            return simulated.module_of(chosen).build(chosen, compile=ptxsim.compile)

    return kernel


@functools.cache
def cases(head_dim: int) -> list[tuple[Case, tuple]]:
    """More blocks than stages, and tiles of few blocks, one and none."""
    out = [
        case(BlockMask.full(520, 900), (1, 4, 2, head_dim), seed=1),
        case(BlockMask.causal(520, 600), (2, 2, 1, head_dim), seed=2),
        case(dense(520, 600), (1, 4, 2, head_dim), seed=4),
    ]
    return [(inputs, run(inputs)) for inputs in out]


def survives(kernel, head_dim: int) -> bool:
    for inputs, want in cases(head_dim):
        for ctas, options in zip((2, 1, 3, 5), SETTINGS, strict=True):
            simulator = {**LIMITS, **options, "check_races": int(ctas == 5)}
            try:
                if not right(inputs, want, ctas=ctas, forward=kernel, **simulator):
                    return False
            except AssertionError:
                return False
    return True


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_intact_kernel_survives(head_dim):
    assert survives(simulated.kernel, head_dim)


@pytest.mark.parametrize(("name", "head_dim"), list(listed()))
def test_mutants_are_killed(tmp_path, name, head_dim):
    kernel = mutated(tmp_path, name)
    cases(head_dim)
    assert not survives(kernel, head_dim)
