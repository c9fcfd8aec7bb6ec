"""Lists, ranks and tickets of SM90 packs, which follow from formulas: their edges, and defects.

Offsets are those of `pack_cases.trusted`: nobody has looked at them.
"""

from __future__ import annotations

import functools

import pytest
import torch

import ptxsim
from cute_kernels.sparse_attn import config
from ptxsim import skips
from tests.sparse_attn import pack_cases as known
from tests.sparse_attn import pack_tables, simulated

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_tokens_behind_the_last_sequence test_no_sequence test_wild_offsets_stay_inside "
    "test_mutants_are_killed test_the_catalogue_has_what_packs_ask_for"
)
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]
varlen = skips.import_module("cute_kernels.sparse_attn.device.varlen")
walk = skips.import_module("cute_kernels.sparse_attn.device.walk")
modules = {
    "pack": skips.import_module("cute_kernels.sparse_attn.kernel_varlen_tables_sm90"),
    "forward": skips.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90"),
    "pre": skips.import_module("cute_kernels.sparse_attn.kernel_bwd_pre_sm90"),
    "backward": skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90"),
    "post": skips.import_module("cute_kernels.sparse_attn.kernel_bwd_post_sm90"),
}
cutlass = varlen.cutlass
NIGHT = pytest.mark.nightly

#: Three blocks and more, so that a window has columns on both sides; one token behind a block.
LENGTHS = [300, 129, 0, 500]
#: Tokens behind them: more than a block, and no whole one.
BEHIND = 150
WINDOW = (140, 100)
ANY = {"async_mode": "random", "wgmma_mode": "random", "warp_order": "random", "seed": 4}


def drawn(dim: int, behind: int = 0, heads: tuple[int, int] = (2, 1)) -> list[torch.Tensor]:
    """NaN in all that lies behind the sequences."""
    tokens = sum(LENGTHS) + behind
    out = known.drawn(tokens, seed=dim, heads=heads, dim=dim)
    for t in out[:4]:
        t[sum(LENGTHS) :] = torch.nan
    return out


@pytest.mark.parametrize(
    ("dim", "window", "heads"),
    [
        (64, WINDOW, (4, 2)),
        (128, (None, 0), (2, 2)),
        pytest.param(96, (None, None), (2, 1), marks=NIGHT),
        pytest.param(128, (300, None), (8, 2), marks=NIGHT),
        pytest.param(64, (None, 130), (3, 3), marks=NIGHT),
    ],
    ids=str,
)
def test_tokens_behind_the_last_sequence(dim, window, heads):
    """Are rows that see nothing; the sequences have their bytes, and so have sinks their sums."""
    tensors, offsets = drawn(dim, BEHIND, heads), known.offsets(LENGTHS)
    end = int(offsets[-1])
    sequence_tensors = [t[:, :end] if t.dim() == 2 else t[:end] for t in tensors]
    sinks = torch.linspace(-1, 1, heads[0]) if dim == 64 else None
    with known.on_sm90(ctas=5):
        packed_results = known.trusted(tensors, offsets, window, sinks)
        want = known.trusted(sequence_tensors, offsets, window, sinks)
        rule = (False, window)
        options = {} if sinks is None else {"sinks": sinks}
        assert known.differing(want, known.alone(sequence_tensors, LENGTHS, *rule, **options)) == []
    out, lse, *grads = packed_results
    rows = [out[:end], lse[:, :end], *(t[:end] for t in grads)]
    assert known.differing(rows, want) == []
    for t in (out, *grads):
        assert (t[end:].view(torch.int16) == 0).all()
    assert (lse[:, end:] == -torch.inf).all()


def test_sinks_of_tokens_of_no_sequence_have_no_gradient():
    tensors, offsets = drawn(64, BEHIND), known.offsets(LENGTHS)
    end = int(offsets[-1])
    tensors[4][:, end:] = 1.0
    found = []
    for inputs in (tensors, [t[:, :end] if t.dim() == 2 else t[:end] for t in tensors]):
        sinks = torch.tensor([0.5, -1.0], requires_grad=True)
        with known.on_sm90():
            q, k, v, dout, dlse = inputs
            args = [t[None] for t in (q, k, v)]
            out, lse = known.attention_op.varlen_attention(
                *args, offsets, None, 0, 0.125, 0.0, sinks
            )
            found.append(torch.autograd.grad((out[0], lse[0]), sinks, (dout, dlse))[0])
    assert found[0].isfinite().all() and torch.allclose(*found, rtol=1e-6)


def test_no_sequence():
    tensors = drawn(64, BEHIND)
    for offsets in (torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
        with known.on_sm90():
            out, lse, *grads = known.trusted(tensors, offsets)
        assert not any(t.view(torch.int16).any() for t in (out, *grads))
        assert (lse == -torch.inf).all()


def test_sequences_that_are_none_cost_nothing_but_blocks():
    """As offsets have them that are padded to a number: most blocks are not in use."""
    tensors, lengths = drawn(64, BEHIND), LENGTHS + [0] * 60
    with known.on_sm90(ctas=3) as used:
        out = known.trusted(tensors, known.offsets(lengths), WINDOW)
    assert known.differing(out, right(WINDOW)) == []
    (space,) = used
    blocks = space.total.shape[2]
    assert blocks == pack_tables.Case(torch.zeros(len(lengths), 2), 1079, WINDOW).blocks
    rows = space.lse2[0, 0].isnan().any(dim=1), space.total[0, 0].isnan().all(dim=1)
    # dQ of blocks that no visit has, those of the tokens left over among them, is not written.
    assert not rows[0].any() and rows[1].sum() == blocks - (3 + 2 + 4)


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=NIGHT)])
def test_wild_offsets_stay_inside(count):
    """No access outside of a tensor, no hang, and the same bytes again."""
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        low, high = (-500, 1100) if seed % 2 else (-(2**31), 2**31 - 1)
        offsets = torch.randint(low, high, (int(torch.randint(1, 7, (1,), generator=g)),))
        offsets = offsets.to((torch.int32, torch.int64)[seed // 2 % 2])
        tensors = known.drawn(600, seed, dim=64)
        window = pack_tables.WINDOWS[seed % len(pack_tables.WINDOWS)]
        with known.on_sm90(ctas=3):
            one, two = (known.trusted(tensors, offsets, window) for _ in range(2))
        assert known.differing(one, two) == []


@pytest.mark.parametrize("dim", [64, pytest.param(96, marks=NIGHT), pytest.param(128, marks=NIGHT)])
def test_any_number_of_resident_ctas(dim):
    """Also with CTAs in any order, groups of query heads, and more heads than alternate."""
    tensors, offsets = drawn(dim, 20, (10, 5)), known.offsets(LENGTHS)
    out = []
    for n in (1, 2, 7, 132):
        with known.on_sm90(ctas=132, resident_ctas=n, cta_order="random", **ANY):
            out.append(known.trusted(tensors, offsets, WINDOW))
    assert all(known.differing(one, out[0]) == [] for one in out[1:])


# ---- mutants -------------------------------------------------------------------------------------


def survives(window=WINDOW, **kernels) -> bool:
    """Whether the bytes are right, few CTAs resident."""
    tensors, offsets = drawn(64, BEHIND), known.offsets(LENGTHS)
    try:
        with known.on_sm90(ctas=3, resident_ctas=2, **ANY, max_steps=20_000_000, **kernels):
            out = known.trusted(tensors, offsets, window)
    except (ptxsim.PtxsimError, AssertionError):
        return False
    return known.differing(out, right(window)) == []


@functools.cache
def right(window) -> list[torch.Tensor]:
    with known.on_sm90(ctas=7):
        return known.trusted(drawn(64, BEHIND), known.offsets(LENGTHS), window)


def reaches(before: int, behind: int):
    def mutant(patch):
        true = varlen.reach

        def reach(lo, hi):
            left, right = true(lo, hi)
            return left + before, right + behind

        patch.setattr(varlen, "reach", reach)

    return mutant


def ranks_ascending(patch):
    def rank_at(self, index, base):
        first, _ = varlen.sequence_of(self.table, base.block)
        return base.block - cutlass.max(first, index - varlen.reach(self.lo, self.hi)[0])

    patch.setattr(walk.VarlenLists, "rank_at", rank_at)


def ranks_of_the_neighbour(patch):
    true = varlen.sequence_of

    def rank_base(self, block):
        return walk.RankBase(block, true(self.table, block + 1)[1])

    patch.setattr(walk.VarlenLists, "rank_base", rank_base)


def lists_of_the_neighbour(patch):
    true = varlen.sequence_of
    patch.setattr(varlen, "sequence_of", lambda table, block: true(table, block + 1))


def tickets_one_fewer(patch):
    true = walk.VarlenLists.total
    patch.setattr(walk.VarlenLists, "total", lambda self: true(self) - 1)


def nothing_is_partial(patch):
    patch.setattr(varlen, "cuts", lambda lo, hi, distance: cutlass.Boolean(False))


def partial_one_off(patch):
    """A block whose last pair is hidden is taken for a full one."""
    true = varlen.cuts
    patch.setattr(varlen, "cuts", lambda lo, hi, distance: true(lo - 1, hi + 1, distance))


def rows_see_one_more(patch):
    true = varlen.row_bounds
    patch.setattr(varlen, "row_bounds", lambda lo, hi, end, row: true(lo - 1, hi, end, row))


def rows_see_beyond_their_end(patch):
    true = varlen.row_bounds
    patch.setattr(varlen, "row_bounds", lambda lo, hi, end, row: true(lo, hi, end + 1, row))


def tiles_one_fewer(patch):
    """Of a column's rows, the last tile."""
    true = walk.VarlenLists.ends

    def ends(self, sizes, block, tile_m):
        tile, key = true(self, sizes, block, tile_m)
        return tile - 1, key

    patch.setattr(walk.VarlenLists, "ends", ends)


MUTANTS = [
    ("forward", reaches(-1, 0), WINDOW),
    ("forward", reaches(0, -1), WINDOW),
    ("pack", reaches(-1, 0), WINDOW),
    ("pack", reaches(0, -1), WINDOW),
    ("pack", reaches(0, 1), WINDOW),
    ("backward", reaches(0, 1), WINDOW),
    ("backward", ranks_ascending, (None, 0)),
    ("backward", ranks_of_the_neighbour, (None, None)),
    ("forward", lists_of_the_neighbour, (None, None)),
    ("backward", tickets_one_fewer, WINDOW),
    ("backward", nothing_is_partial, WINDOW),
    ("backward", partial_one_off, (126, 126)),
    ("forward", rows_see_one_more, WINDOW),
    ("forward", rows_see_beyond_their_end, (None, None)),
    ("backward", tiles_one_fewer, (None, None)),
]


@pytest.mark.parametrize(
    ("name", "mutant", "window"), MUTANTS, ids=lambda given: getattr(given, "__name__", None)
)
def test_mutants_are_killed(name, mutant, window):
    intact = simulated.kernel

    @functools.cache
    def build(chosen):
        if not getattr(chosen, "packed", True):
            return intact(chosen)
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            return modules[name].build(chosen, compile=ptxsim.compile)

    assert not survives(window, **{name: build})


def test_intact_kernels_survive():
    for window in {window for _, _, window in MUTANTS}:
        assert survives(window)


def test_the_catalogue_has_what_packs_ask_for():
    """Every kernel of packs, in one form."""
    known_kernels = {entry.kernel.identity for entry in known.launch.catalogue()}
    for dtype in ("bf16", "fp16"):
        for dim in config.HEAD_DIMS:
            for softcap in (False, True):
                for sinks in (False, True):
                    kernel_config = config.configure_forward(
                        dtype, dim, config.VARLEN_FORM, softcap, sinks, True
                    )
                    assert known.launch.entry(kernel_config).identity in known_kernels
                kernel_config = config.configure(
                    dtype, dim, config.VARLEN_FORM, True, softcap, packed=True
                )
                assert known.launch.entry(kernel_config).identity in known_kernels
