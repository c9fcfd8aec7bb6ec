"""The battery of drawn routings on the CPU, and mutants that it kills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.moe import routing_op
from cute_kernels.runtime import dispatch

from . import battery

#: Every kind, dtype and choice; by night all draws.
BY_DAY = (56, *range(0, 108, 5))


def test_a_slice():
    for seed in BY_DAY:
        battery.check(battery.draw(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, battery.DRAWS, 200))
def test_every_draw(first):
    for seed in range(first, first + 200):
        battery.check(battery.draw(seed))


def test_draws_have_every_kind():
    """Empty experts, one expert with all tokens, duplicates and k = E are among the first draws."""
    seen = set()
    for seed in BY_DAY:
        case = battery.draw(seed)
        if case.indices is None:
            seen |= {"k = E"} if case.k == case.experts > 1 else {"chosen"}
            continue
        counts = case.indices.flatten().bincount(minlength=case.experts)
        seen |= {"empty experts"} if (counts == 0).any() else set()
        seen |= {"one expert"} if counts.max() == len(case.x) * case.k > 1 else set()
        duplicates = any(len(set(row)) < case.k for row in case.indices.tolist())
        seen |= {"duplicates"} if duplicates else set()
    assert seen == {"k = E", "chosen", "empty experts", "one expert", "duplicates"}


# ---- mutants -------------------------------------------------------------------------------------


def _combine_by_batch(entry, operands):
    """A batch of several tokens adds a token's rows in descending order."""
    rows, weights, offsets, positions = operands
    if entry == "moe_combine" and len(positions) > 1:
        return rows.flip(0), weights, offsets, len(rows) - 1 - positions
    return operands


def _last_row_of_the_previous_expert(entry, operands):
    """The first row of an expert is multiplied with the weight of the expert before."""
    a, b, offsets, bias = operands
    shifted = offsets.clone()
    shifted[1:-1] = torch.minimum(shifted[1:-1] + 1, offsets[-1])
    return (a, b, shifted, bias) if entry == "grouped_gemm" else operands


def _rows_descending(entry, operands):
    """dW of an expert adds its rows from the last one."""
    dy, x, offsets, accumulator = operands
    if entry != "grouped_dw":
        return operands
    expert = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(x)), right=True)
    order = (expert * len(x) + (len(x) - 1 - torch.arange(len(x)))).argsort()
    return dy[order], x[order], offsets, accumulator


def _gradients_by_choice(entry, operands):
    """The gradient of a token adds its rows in the order of its choices."""
    rows, weights, offsets, positions = operands
    if entry == "moe_combine" and weights is None:
        flat = positions.flatten().long()
        slots = torch.arange(len(flat), dtype=torch.int32).view(positions.shape)
        return rows[flat], None, offsets, slots
    return operands


def _experts_by_batch(entry, operands):
    """A batch of several tokens breaks ties by the highest index."""
    scores, *others = operands
    if entry == "moe_select" and len(scores) > 1:
        return scores + torch.arange(scores.shape[1]) * 1e-6, *others
    return operands


MUTANTS = {
    "combine_by_batch": (routing_op, "moe_combine", _combine_by_batch),
    "row_of_another_expert": (dispatch, "grouped_gemm", _last_row_of_the_previous_expert),
    "rows_descending": (dispatch, "grouped_dw", _rows_descending),
    "gradients_by_choice": (routing_op, "moe_combine", _gradients_by_choice),
    "experts_by_batch": (routing_op, "moe_select", _experts_by_batch),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name, monkeypatch):
    module, wanted, change = MUTANTS[name]
    launch, plan = routing_op._launch, dispatch.plan

    def launched(entry, device, dtype, *operands):
        operands = change(entry, operands) if entry == wanted else operands
        return launch(entry, device, dtype, *operands)

    def planned(entry, *arguments):
        made = plan(entry, *arguments)
        if entry != wanted:
            return made
        return replace(made, run=lambda *operands: made.run(*change(entry, operands)))

    if module is dispatch:
        monkeypatch.setattr(dispatch, "plan", planned)
    else:
        monkeypatch.setattr(module, "_launch", launched)
    with pytest.raises(AssertionError):
        for seed in BY_DAY:
            battery.check(battery.draw(seed))
