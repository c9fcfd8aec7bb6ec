"""The SM90 forward whose products are apart: heads of 96, three consumers, lists of two blocks.

A row's bytes are those of two consumers with one list, as in test_fwd_sm90_merge.py.
"""

from __future__ import annotations

import functools

import pytest

from cute_kernels.schedulers import BlockMask
from tests import ptxsim, sim
from tests.kernels.edited import changed
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.ptxsim.available import requires_sim
from tests.sparse_attn import simulated
from tests.sparse_attn.fwd_lists import LISTS, OFTEN, by_two, listed, same
from tests.sparse_attn.fwd_masks import MASKS
from tests.sparse_attn.simulated_fwd import Case, case, chain, run

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("sparse_attn")]

NIGHT = pytest.mark.nightly
SHAPE = (1, 2, 1, 96)
CARD = {"wgmma_math": "hopper", **LIMITS}


def often(names, chosen):
    return [pytest.param(name, marks=() if name in chosen else NIGHT) for name in names]


@pytest.mark.parametrize("bits", [False, pytest.param(True, marks=NIGHT)])
@pytest.mark.parametrize("name", often(LISTS, OFTEN[1:]))
def test_lists(name, bits):
    """The order in torch, and the bytes of two consumers in the card's arithmetic."""
    given = listed(LISTS[name], bits=bits, shape=SHAPE)
    assert same(run(given, **LIMITS), chain(given))
    assert ptxsim.report()["fence_warnings"]["count"] == 0
    assert same(run(given, **CARD), by_two(given, **CARD))


@pytest.mark.parametrize("name", often(MASKS, ("causal",)))
def test_the_bytes_of_two_consumers(name):
    """Tails around every multiple of 64 rows, groups of heads, masks by head."""
    for q_len in (1, 63, 65, 127, 129, 191, 192, 193, 255, 257):
        given = case(MASKS[name](q_len, 300), SHAPE, seed=q_len)
        assert same(run(given, **CARD), by_two(given, **CARD)), q_len


@pytest.mark.parametrize("name", often(LISTS, OFTEN[1:3]))
def test_schedules(name):
    """Every mode: late and early data, random warps, 1, 2, 7 and 132 CTAs in any order."""
    given = listed(LISTS[name], bits=name == "away in turns", shape=(2, 2, 1, 96))
    seven = sim.Mode("resident-7", SETTINGS[-1] | {"resident_ctas": 7})
    sim.run_modes(lambda: run(given, **LIMITS), [*sim.QUICK_MODES, seven])


# ---- mutants -------------------------------------------------------------------------------------

_IN = 16 * " "
_WAIT, _K, _V = (
    f"{_IN}{line}\n"
    for line in (
        "warpgroup.wait_group(0)",
        "k_ring.consumer_release(state)",
        "v_ring.consumer_release(state)",
    )
)
_WORD = f"{_IN}following = word_of(words, state.index)\n"

#: What is replaced, and by what.
MUTANTS = {
    "V not awaited": (f"{_IN}v_ring.consumer_wait(state)\n{_IN}self", f"{_IN}self"),
    "the last V not awaited": (
        "            v_ring.consumer_wait(state)\n            self.add",
        "            self.add",
    ),
    "V given back while it is multiplied": (_WAIT + _V, _V + _WAIT),
    "K not awaited": (
        f"{_IN}k_ring.consumer_wait(state)\n{_IN}self.fetch",
        f"{_IN}self.fetch",
    ),
    "K given back while it is multiplied": (_WAIT + _K, _K + _WAIT),
    "the word read when K is given back": (_WORD + _WAIT + _K, _WAIT + _K + _WORD),
    "the word of the block before": (f"{_IN}word = following\n{_IN}if", f"{_IN}if"),
    "O not rescaled": (f"{_IN}softmax.rescale(acc_o, factor)\n", ""),
    "a turn awaited twice": (
        "word = self.give_on(k_ring, v_ring, consumer, state, words)",
        "word = self.skip(k_ring, v_ring, consumer, word, words)",
    ),
    "no turn awaited behind others' steps": (f"{_IN}    self.await_turn(consumer)\n", ""),
    "a turn kept": (f"{_IN}self.give_turn(consumer)\n", ""),
    "others' last steps not given on": (
        "            while word & merge.LAST == 0:\n                word = following\n",
        "            while word & merge.LAST > 1:\n                word = following\n",
    ),
}


@functools.cache
def cases() -> list[tuple[Case, tuple]]:
    """Steps of either list alone, one and many, first, between and last; more than the stages."""
    names = "alternate", "away for long", "held while another skips"
    made = [listed(LISTS[name], shape=SHAPE) for name in names]
    made.append(case(BlockMask.full(200, 900), SHAPE, seed=1))
    return [(given, run(given)) for given in made]


#: One for each kind of mistake, for every commit: a wait, a release, a word, a turn, others' steps.
BY_DAY = (
    "V not awaited",
    "K given back while it is multiplied",
    "the word of the block before",
    "a turn kept",
    "others' last steps not given on",
)
#: Those that show races first, then what needs no deadlock to show.
RUNS = [SETTINGS[-1] | {"check_races": 1, "seed": seed} for seed in (3, 6)] + SETTINGS


def survives(kernel) -> bool:
    for given, want in cases():
        for options in RUNS:
            try:
                got = run(given, ctas=2, forward=kernel, **LIMITS, **options)
            except ptxsim.PtxsimError:
                return False
            report = ptxsim.report()
            if not same(got, want) or report["fence_warnings"]["count"] or report["races"]:
                return False
    return True


def test_the_intact_kernel_survives():
    assert survives(simulated.forward_kernel)


@pytest.mark.parametrize("name", often(MUTANTS, BY_DAY))
def test_mutants_are_killed(tmp_path, name):
    made = changed(tmp_path, "sparse_attn.kernel_fwd_apart_sm90", *MUTANTS[name])
    cases()
    kernel = functools.cache(lambda chosen: made.build(chosen, compile=ptxsim.compile))
    assert not survives(kernel)
