"""The SM90 forward without overlap: heads of 96, three consumers, lists of two blocks.

A row's bytes are those of two consumers with one list, as in test_fwd_sm90_merge.py.
"""

from __future__ import annotations

import functools

import pytest

import ptxsim
from cute_kernels.schedulers import BlockMask
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests.kernels.edited import changed
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn import simulated
from tests.sparse_attn.fwd_lists import LISTS, OFTEN, by_two, listed
from tests.sparse_attn.fwd_masks import MASKS
from tests.sparse_attn.simulated_fwd import Case, case, chain, right, run, same

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_lists test_mutants_are_killed"
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

NIGHT = pytest.mark.nightly
SHAPE = (1, 2, 1, 96)
CARD = {"wgmma_math": "hopper", **LIMITS}


def often(names, chosen):
    return [pytest.param(name, marks=() if name in chosen else NIGHT) for name in names]


@pytest.mark.parametrize("bits", [False, pytest.param(True, marks=NIGHT)])
@pytest.mark.parametrize("name", often(LISTS, OFTEN[1:]))
def test_lists(name, bits):
    """The order in torch, and the bytes of two consumers in the card's arithmetic."""
    inputs = listed(LISTS[name], bits=bits, shape=SHAPE)
    assert same(run(inputs, **LIMITS), chain(inputs))
    assert ptxsim.report()["fence_warnings"]["count"] == 0
    assert same(run(inputs, **CARD), by_two(inputs, **CARD))


@pytest.mark.parametrize("name", often(MASKS, ("causal",)))
def test_the_bytes_of_two_consumers(name):
    """Tails around every multiple of 64 rows, groups of heads, masks by head."""
    for q_len in (1, 63, 65, 127, 129, 191, 192, 193, 255, 257):
        inputs = case(MASKS[name](q_len, 300), SHAPE, seed=q_len)
        assert same(run(inputs, **CARD), by_two(inputs, **CARD)), q_len


@pytest.mark.parametrize("name", often(LISTS, OFTEN[1:3]))
def test_schedules(name):
    """Every mode: late and early data, random warps, 1, 2, 7 and 132 CTAs in any order."""
    inputs = listed(LISTS[name], bits=name == "away in turns", shape=(2, 2, 1, 96))
    seven = modes.Mode("resident-7", SETTINGS[-1] | {"resident_ctas": 7})
    modes.run_modes(lambda: run(inputs, **LIMITS), [*modes.QUICK_MODES, seven])


# ---- mutants -------------------------------------------------------------------------------------

BASE, OWN = "sparse_attn.kernel_fwd_sm90", "sparse_attn.kernel_fwd_no_overlap_sm90"
_TURN, _STEP, _WAIT, _K, _V = (
    f"        {line}\n"
    for line in (
        "self.warp_scheduler_arrive(ctx.consumer)",
        "following = next_step(ctx.mask.steps, state.index)",
        "warpgroup.wait_group(0)",
        "k_ring.consumer_release(state)",
        "rings.v.consumer_release(state)",
    )
)
_IN = 12 * " "
_AGAIN = f"    {_WAIT}    {_V}"

#: Where, what is replaced, and by what.
MUTANTS = {
    "V not awaited": (OWN, f"{_IN}rings.v.consumer_wait(state)\n", ""),
    "the last V not awaited": (
        OWN,
        "        rings.v.consumer_wait(state)\n        self.pv",
        "        self.pv",
    ),
    "V given back while it is multiplied": (OWN, _AGAIN, f"    {_V}    {_WAIT}"),
    "K not awaited": (
        BASE,
        "        k_ring.consumer_wait(state)\n        ctx.mask.load",
        "        ctx.mask.load",
    ),
    "K given back while it is multiplied": (
        BASE,
        _TURN + _STEP + _WAIT + _K,
        _TURN + _STEP + _K + _WAIT,
    ),
    "the step read when K is given back": (
        BASE,
        _TURN + _STEP + _WAIT + _K,
        _TURN + _WAIT + _K + _STEP,
    ),
    "the step of the block before": (OWN, f"{_IN}step = following\n", ""),
    "O not rescaled": (OWN, f"{_IN}softmax.rescale(ctx.tOrO, ctx.factor)\n", ""),
    "a turn awaited twice": (
        OWN,
        "step = self.finish_skip(ctx, state)",
        "step = self.skip_block(ctx, step)",
    ),
    "no turn awaited behind others' steps": (
        OWN,
        f"{_IN}    self.warp_scheduler_sync(ctx.consumer)\n",
        "",
    ),
    "a turn kept": (BASE, _TURN + _STEP + _WAIT + _K, _STEP + _WAIT + _K),
    "others' last steps not given on": (
        BASE,
        "            while step.has_next:\n                step = following\n",
        "            while step.word < step.word:\n                step = following\n",
    ),
}


@functools.cache
def cases() -> list[tuple[Case, tuple]]:
    """Steps of either list alone, one and many, first, between and last; more than the stages."""
    names = "alternate", "away for long", "held while another skips"
    out = [listed(LISTS[name], shape=SHAPE) for name in names]
    out.append(case(BlockMask.full(200, 900), SHAPE, seed=1))
    return [(inputs, run(inputs)) for inputs in out]


#: One for each kind of mistake, for every commit: a wait, a release, a word, a turn, others' steps.
BY_DAY = (
    "V not awaited",
    "K given back while it is multiplied",
    "the step of the block before",
    "a turn kept",
    "others' last steps not given on",
)
#: Those that show races first, then what needs no deadlock to show.
RUNS = [SETTINGS[-1] | {"check_races": 1, "seed": seed} for seed in (3, 6)] + SETTINGS


def survives(kernel) -> bool:
    return all(
        right(inputs, want, ctas=2, forward=kernel, **LIMITS, **options)
        for inputs, want in cases()
        for options in RUNS
    )


def mutated(folder, name: str):
    """From a configuration to a forward with a defect, of its own or of the class it is made of."""
    where, *pieces = MUTANTS[name]
    mutant = changed(folder, where, *pieces)
    if where == OWN:
        return functools.cache(lambda chosen: mutant.build(chosen, compile=ptxsim.compile))

    @functools.cache
    def kernel(chosen):
        module = simulated.module_of(chosen)
        base = mutant.ForwardSm90
        with pytest.MonkeyPatch.context() as patch:
            for method in ("mainloop", "qk_block"):
                patch.setattr(module.ForwardNoOverlapSm90, method, getattr(base, method))
            return module.build(chosen, compile=ptxsim.compile)

    return kernel


def test_the_intact_kernel_survives():
    assert survives(simulated.kernel)


@pytest.mark.parametrize("name", often(MUTANTS, BY_DAY))
def test_mutants_are_killed(tmp_path, name):
    kernel = mutated(tmp_path, name)
    cases()
    assert not survives(kernel)
