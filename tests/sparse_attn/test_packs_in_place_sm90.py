"""SM90 kernels that read packs where they lie: every mode of the simulator, and defects put in.

The same kernels without a pack, which read a copy of it, say what is right.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.sparse_attn import config
from ptxsim import skips
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn import pack_cases as known
from tests.sparse_attn import simulated

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_random_orders test_mutants_are_killed"
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]
varlen = skips.import_module("cute_kernels.sparse_attn.device.varlen")
before = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_pre_sm90")
after = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_post_sm90")
cute, cutlass = varlen.cute, varlen.cutlass

#: Ends in both halves of a block, between boxes of 64 rows, and none; a tile of 192 rows of three.
LENGTHS = [70, 130, 128, 1, 190]
TOKENS = sum(LENGTHS)
#: Every row sees the last block of its sequence.
RULE = (False, (None, None))
MODES = [
    *SETTINGS,
    *(SETTINGS[-1] | {"resident_ctas": n} for n in (1, 2, 7)),
    SETTINGS[-1] | {"check_races": 1},
]


def tensors(dim: int) -> list[torch.Tensor]:
    """With NaN behind every sequence but the last two: what the next one begins with."""
    out = known.drawn(TOKENS, seed=dim, heads=(2, 1), dim=dim)
    for t in out[:4]:
        t[200:328] = torch.nan
    return out


def attended(dim: int, rule, **options) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of the pack, without the sequence of NaN."""
    with known.on_sm90(ctas=3, **options):
        packed_results = known.packed(tensors(dim), LENGTHS, *rule)
    kept = torch.cat((torch.arange(200), torch.arange(328, TOKENS)))
    return [t[:, kept] if i == 1 else t[kept] for i, t in enumerate(packed_results)]


@functools.cache
def right(dim: int, rule) -> list[torch.Tensor]:
    with mock.patch.object(known, "IN_PLACE", False):
        out = attended(dim, rule)
    assert all(t.isfinite().all() for t in out)
    return out


def survives(dim: int, rule, modes=MODES, **kernels) -> bool:
    """Whether every run has the right bytes, and the simulator nothing to report."""
    for mode in modes:
        ptxsim.clear_launches()
        try:
            out = attended(dim, rule, **kernels, **mode, **LIMITS)
        except (ptxsim.PtxsimError, AssertionError):
            return False
        reports = [launch["report"] for launch in ptxsim.launches()]
        if any(r["races"] or r["fence_warnings"]["count"] for r in reports):
            return False
        if known.differing(out, right(dim, rule)):
            return False
    return True


@pytest.mark.parametrize(
    ("dim", "rule"),
    [(64, RULE), (128, known.RULES[2]), (192, RULE), (256, known.RULES[2])],
    ids=str,
)
def test_random_orders(dim, rule):
    """With races reported."""
    assert survives(dim, rule, MODES[-1:])


@pytest.mark.nightly
@pytest.mark.parametrize("dim", config.HEAD_DIMS)
@pytest.mark.parametrize("rule", known.RULES, ids=str)
def test_every_mode(dim, rule):
    assert survives(dim, rule)


# ---- mutants -------------------------------------------------------------------------------------


def neighbours_not_overwritten(patch):
    true = varlen.clean
    patch.setattr(varlen, "clean", lambda *a: true(*a[:3], cutlass.Int32(a[2].rows), a[4]))


def one_row_too_few(patch):
    true = varlen.clean
    patch.setattr(varlen, "clean", lambda *a: true(*a[:3], a[3] + 1, a[4]))


def one_row_too_many(patch):
    true = varlen.clean
    patch.setattr(varlen, "clean", lambda *a: true(*a[:3], a[3] - 1, a[4]))


def zeros_not_fenced(patch):
    """What WGMMA reads may be what was there before."""
    true, fence = varlen.clean, cute.arch.fence_proxy

    def clean(*args):
        vars(cute.arch)["fence_proxy"] = lambda *a, **k: None
        try:
            true(*args)
        finally:
            vars(cute.arch)["fence_proxy"] = fence

    patch.setattr(varlen, "clean", clean)


def zeros_before_the_tile(patch):
    """Not awaited: TMA writes over them."""
    true, wait = varlen.clean, cute.arch.mbarrier_wait

    def clean(*args):
        vars(cute.arch)["mbarrier_wait"] = lambda *a, **k: None
        try:
            true(*args)
        finally:
            vars(cute.arch)["mbarrier_wait"] = wait

    patch.setattr(varlen, "clean", clean)


def whole_tiles_stored(patch):
    true = varlen.store_rows
    patch.setattr(varlen, "store_rows", lambda *a: true(*a[:4], cutlass.Int32(a[1].rows), *a[5:]))


def last_row_not_stored(patch):
    true = varlen.store_rows
    patch.setattr(varlen, "store_rows", lambda *a: true(*a[:4], a[4] - 1, *a[5:]))


def row_range_the_next_block(patch):
    true = varlen.row_range
    patch.setattr(varlen, "row_range", lambda table, block: true(table, block + 1))


def end_of_the_block(patch):
    """As if a sequence ended where its last block does."""
    true = varlen.row_range

    def row_range(table, block):
        rows = true(table, block)
        return varlen.RowRange(rows.shift, (rows.end + 127) // 128 * 128)

    patch.setattr(varlen, "row_range", row_range)


MUTANTS = [
    neighbours_not_overwritten,
    one_row_too_few,
    one_row_too_many,
    zeros_not_fenced,
    zeros_before_the_tile,
    whole_tiles_stored,
    last_row_not_stored,
    row_range_the_next_block,
    end_of_the_block,
]


def compiled(mutant):
    """The kernels of packs with a defect; others as they are."""

    def kernel(module, intact):
        @functools.cache
        def build(chosen):
            if not chosen.packed:
                return intact(chosen)
            with pytest.MonkeyPatch.context() as patch:
                mutant(patch)
                return module(chosen).build(chosen, compile=ptxsim.compile)

        return build

    return {
        "forward": kernel(simulated.module_of, simulated.kernel),
        "pre": kernel(lambda chosen: before, simulated.kernel),
        "backward": kernel(simulated.module_of, simulated.kernel),
        "post": kernel(lambda chosen: after, simulated.kernel),
    }


def by_name(given) -> str:
    return getattr(given, "__name__", given)


@pytest.mark.parametrize("mutant", MUTANTS, ids=by_name)
def test_mutants_are_killed(mutant):
    assert not survives(64, RULE, **compiled(mutant))


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [96, 128, 192, 256])
@pytest.mark.parametrize("mutant", MUTANTS, ids=by_name)
def test_mutants_of_other_sizes_are_killed(mutant, dim):
    assert not survives(dim, RULE, **compiled(mutant))


def only_the(name: str, mutant):
    return {name: compiled(mutant)[name]}


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        pytest.param("forward", neighbours_not_overwritten, marks=pytest.mark.nightly),
        ("backward", neighbours_not_overwritten),
        pytest.param("forward", whole_tiles_stored, marks=pytest.mark.nightly),
        pytest.param("backward", last_row_not_stored, marks=pytest.mark.nightly),
        pytest.param("pre", row_range_the_next_block, marks=pytest.mark.nightly),
        ("pre", end_of_the_block),
        pytest.param("post", row_range_the_next_block, marks=pytest.mark.nightly),
        ("post", end_of_the_block),
    ],
    ids=by_name,
)
def test_a_defect_in_one_kernel_is_killed(name, mutant):
    assert not survives(128, RULE, **only_the(name, mutant))
