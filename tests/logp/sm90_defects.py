"""Defects of the SM90 kernels of logp: each replaces one helper while a kernel is compiled."""

from __future__ import annotations

from cute_kernels.logp.device import column, exact, gradient, tile, vectors


def neighbours_two_apart_first(monkeypatch, module):
    """A unit's sum in another order: lanes 2 apart meet before neighbours."""
    cute = module.cute

    @cute.jit
    def to_lanes(partials, odd, high):
        sums = [one + cute.arch.shuffle_sync_bfly(one, offset=2) for one in partials]
        sums = [one + cute.arch.shuffle_sync_bfly(one, offset=1) for one in sums]
        return vectors._of_lane(sums, odd, high)

    monkeypatch.setattr(vectors, "_to_lanes", to_lanes)


def bins_not_lowered(monkeypatch, module):
    monkeypatch.setattr(exact, "_lower", lambda state, row, by: None)


def padding_not_masked(monkeypatch, module):
    for where in (tile, column, gradient):
        monkeypatch.setattr(where, "mask", lambda *a, **k: None)


def nothing_chosen(monkeypatch, module):
    for where in (tile, column):
        monkeypatch.setattr(where, "choose", lambda *a, **k: None)


def lanes_do_not_meet(monkeypatch, module):
    monkeypatch.setattr(exact, "add_lane", lambda *a, **k: None)


def exponent_rounded_up(monkeypatch, module):
    """M is the next integer, not the nearest: another unit of the integers."""
    true = vectors.exponent_of

    def above(top, scale):
        exponent, shift = true(top + 0.5, scale)
        return exponent, shift

    monkeypatch.setattr(vectors, "exponent_of", above)


def one_warp_is_forgotten(monkeypatch, module):
    true = column.store_warp

    def store_warp(state, states, tokens, columns):
        exact.clear(state)
        true(state, states, tokens, columns)

    monkeypatch.setattr(column, "store_warp", store_warp)


def lse_left_out(monkeypatch, module):
    true = gradient.load

    def load(rows, args, row0, cLogits):
        true(rows, args, row0, cLogits)
        rows.lse2.fill(0.0)

    monkeypatch.setattr(gradient, "load", load)
