"""The forward's promises in the simulator: what may surround a query row and not change a byte.

Timing and dispatch order, the chunk it comes in, its batch and head, padding, what other rows,
heads and masked keys hold, which blocks its neighbours need, how the mask is written down.  Each
has a defect that it, and it alone here, must notice: it breaks a promise, not the result.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import masks
from ptxsim import modes
from tests import certified, contract
from tests.sparse_attn import battery, mutated, simulated
from tests.sparse_attn.simulated_fwd import MASKS, Case, case, run, zeros
from tests.sparse_attn.test_fwd_sm90_mutants import MUTANTS as DEFECTS

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_other_rows_of_the_mask test_battery_mutants_are_killed"
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

SEED = 7


def on_card(inputs: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the truncating adder of the card, as far as it is known."""
    return run(inputs, wgmma_math="hopper")


def same(got, want, label="", rows=slice(None)) -> None:
    """(out, lse) of all rows in ``got`` and of ``rows`` in ``want`` agree, byte for byte."""
    for name, a, b in (
        ("out", got[0], want[0][:, rows]),
        ("lse", got[1].mT, want[1].mT[:, rows]),
    ):
        contract.require_same(a, b, op=name, transform=label, case=str(rows), seed=SEED)


def sequences(mask: str) -> battery.SequenceOp:
    """The forward as the shared battery calls it."""

    def attend(q, k, v, block_mask, return_lse=True):
        return on_card(Case(q, k, v, block_mask, 1.5 * q.shape[3] ** -0.5))

    return battery.SequenceOp(mask, attend, battery.MASKS[mask], {})


def with_neighbours(inputs: Case) -> dict[str, Case]:
    """NaN, Inf and huge values in all that rows 40 to 60 of head 0 do not see."""
    rows, visible = slice(40, 60), inputs.allowed[0, 0, 40:60].any(0)
    visited = inputs.allowed[0, 0, :128].any(0).view(-1, 128).any(1).repeat_interleave(128)
    assert not visible.all() and not visited.all()
    cases = {}
    for label, value in (("nan", math.nan), ("inf", math.inf), ("huge", 3e38)):
        q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v.clone()
        other = torch.ones(q.shape[1], dtype=torch.bool)
        other[rows] = False
        q[:, other], q[:, :, 1:] = value, value
        k[:, ~visible] = value
        # P = 0 times V: where the tile's blocks reach, V must be finite.
        v[:, ~visible] = 3e38
        v[:, ~visited] = value
        cases[label] = dataclasses.replace(inputs, q=q, k=k, v=v)
    return cases


@pytest.mark.parametrize(
    ("name", "shape", "lengths"),
    [
        ("full", (1, 2, 2, 96), (200, 383)),
        ("window", (1, 4, 1, 64), (383, 383)),
        ("random", (2, 2, 1, 128), (300, 512)),
        ("causal", (1, 2, 1, 192), (383, 300)),
        ("random", (1, 2, 2, 256), (300, 512)),
    ],
)
def test_schedules(name, shape, lengths):
    """Every mode of the simulator: late and early data, random warps, any order and residency."""
    inputs = case(MASKS[name](*lengths), shape, seed=SEED)
    results = modes.run_modes(lambda: run(inputs))
    # The arithmetic is another one, and shows: the modes do compare something.
    assert not contract.same_bytes(results["default"][0], results["hopper-late"][0])


#: Transforms of sequences, by name: (one sequence, two of them) and the operation.
PARTS = {
    "chunks": lambda op, one, two: battery.check_chunks(op, one, battery.CUTS),
    "padding": lambda op, one, two: battery.check_padding(op, one, [1, 106, 400]),
    "batches": lambda op, one, two: battery.check_batch(op, two, shuffles=1),
    "heads": lambda op, one, two: battery.check_heads(op, one),
    "layouts": lambda op, one, two: battery.check_layout(op, one),
}


@pytest.mark.parametrize("width", simulated.widths(64))
@pytest.mark.parametrize("mask", battery.MASKS)
@pytest.mark.parametrize("part", PARTS)
def test_transforms(part, mask, width):
    """The transforms of the shared battery: chunked prefill, decoding, batches, heads, layouts."""
    two = battery.sequence(dim=width)
    assert PARTS[part](sequences(mask), tuple(t[:1] for t in two), two) > 4


@pytest.mark.parametrize(
    ("name", "width"), [("window", 64), ("document", 64), ("random", 64), ("random", 256)]
)
def test_neighbours(name, width):
    inputs = case(MASKS[name](256, 640), (1, 2, 1, width), seed=SEED)
    want = on_card(inputs)
    for label, changed in with_neighbours(inputs).items():
        out, lse = on_card(changed)
        part = (out[:, 40:60, :1], lse[:, :1, 40:60])
        same(part, (want[0][:, :, :1], want[1][:, :1]), label, slice(40, 60))


@pytest.mark.parametrize("width", simulated.widths(64, 256))
def test_other_rows_of_the_mask(width):
    """Which blocks the rows around it visit, and which form the mask has, is no row's business."""
    allowed = torch.rand(128, 640, generator=torch.Generator().manual_seed(SEED)) < 0.3
    allowed[:64, :128] = allowed[:64, 256:384] = False
    alone = allowed.clone()
    alone[64:] = False
    inputs = case(BlockMask.from_dense(allowed), (1, 1, 1, width), seed=SEED)
    narrow = dataclasses.replace(inputs, mask=BlockMask.from_dense(alone))
    assert masks.lower(inputs.mask).kv_count.item() == 5
    assert masks.lower(narrow.mask).kv_count.item() == 3
    want = on_card(narrow)
    got = on_card(inputs)
    same((got[0][:, :64], got[1][..., :64]), want, "neighbours' blocks", slice(0, 64))


@pytest.mark.parametrize("width", simulated.widths(64, 128, 192, 256))
def test_forms(width):
    """The same elements as a band, as bits, and (all of them) as no mask: one set of bytes."""
    for mask in (BlockMask.causal(200, 383), BlockMask.full(200, 383)):
        inputs = case(mask, (1, 2, 1, width), seed=SEED)
        bits = BlockMask.from_dense(inputs.allowed)
        same(on_card(dataclasses.replace(inputs, mask=bits)), on_card(inputs), str(mask.rule))


def test_zero_has_one_sign():
    """Adding a block's zeros would turn an accumulator of -0 into +0: O is +0 either way."""
    for extra in (False, True):
        out, _ = run(zeros(extra), wgmma_math="fma")
        assert (contract.bits(out[:, 1:]) == 0).all()


# ---- mutants -------------------------------------------------------------------------------------

_C = "scalars.c, scalars.inner\n        return Context"
_C_OF = (
    "scalars.c * (1.0 + {}.to(cutlass.Float32) * 2.0**-20), scalars.inner\n        return Context"
)


def _scaled(count: str) -> tuple[str, ...]:
    """The scale depends on a number in its last bits."""
    return "sparse_attn.kernel_fwd_sm90", _C, _C_OF.format(count)


PLACE, COUNT = _scaled("cute.arch.block_idx()[0]"), _scaled("buffers.tile_info.count()")
EARLY, KEPT, STATE, TIMES, KEY, ZERO = (
    next(tuple(rest) for label, (_, *rest) in DEFECTS.items() if label.startswith(name))
    for name in (
        "released_before_read",
        "O told before it is written",
        "blocks without keys change",
        "masked by multiplication",
        "one key too many",
        "-0 kept",
    )
)
MUTANTS = [
    # The first one runs at every commit, on one small case.
    (STATE, test_other_rows_of_the_mask, 64),
    (EARLY, test_schedules, "window", (1, 4, 1, 64), (383, 383)),
    (KEPT, test_schedules, "full", (1, 2, 2, 96), (200, 383)),
    (COUNT, test_transforms, "chunks", "window", 64),
    (STATE, test_transforms, "chunks", "causal documents", 64),
    (PLACE, test_transforms, "chunks", "causal", 128),
    (PLACE, test_transforms, "batches", "causal", 64),
    (PLACE, test_transforms, "heads", "causal", 64),
    (PLACE, test_transforms, "padding", "causal", 64),
    (TIMES, test_transforms, "padding", "causal", 64),
    (TIMES, test_neighbours, "window", 64),
    (TIMES, test_neighbours, "document", 64),
    (COUNT, test_other_rows_of_the_mask, 64),
    (KEY, test_forms, 64),
    (ZERO, test_zero_has_one_sign),
]


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_battery_mutants_are_killed(monkeypatch, tmp_path, number):
    mutant, part, *arguments = MUTANTS[number]
    monkeypatch.setattr(simulated, "kernel", mutated.kernels(tmp_path, *mutant))
    noticed = contract.ContractViolation, modes.ModeFailure
    with pytest.raises(AssertionError if part is test_zero_has_one_sign else noticed):
        part(*arguments)
