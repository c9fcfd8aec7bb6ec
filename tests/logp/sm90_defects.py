"""Defects of the SM90 kernels of logp: each replaces one helper while a kernel is compiled."""

from __future__ import annotations

from cute_kernels.logp.device import column, exact, gradient, tile, units


def neighbours_two_apart_first(monkeypatch, module):
    """A unit's sum in another order: lanes 2 apart meet before neighbours."""
    cute = module.cute

    @cute.jit
    def to_lanes(parts, odd, high):
        parts = [part + cute.arch.shuffle_sync_bfly(part, offset=2) for part in parts]
        parts = [part + cute.arch.shuffle_sync_bfly(part, offset=1) for part in parts]
        return units._of_lane(parts, odd, high)

    monkeypatch.setattr(units, "_to_lanes", to_lanes)


def bins_not_lowered(monkeypatch, module):
    monkeypatch.setattr(exact, "_lower", lambda own, row, by: None)


def padding_not_masked(monkeypatch, module):
    for where in (tile, column, gradient):
        monkeypatch.setattr(where, "mask", lambda *a, **k: None)


def nothing_chosen(monkeypatch, module):
    for where in (tile, column):
        monkeypatch.setattr(where, "choose", lambda *a, **k: None)


def lanes_do_not_meet(monkeypatch, module):
    monkeypatch.setattr(exact, "meet", lambda *a, **k: None)


def exponent_rounded_up(monkeypatch, module):
    """M is the next integer, not the nearest: another unit of the integers."""
    true = units.exponent_of

    def above(top, scale):
        exponent, shift = true(top + 0.5, scale)
        return exponent, shift

    monkeypatch.setattr(units, "exponent_of", above)


def one_warp_is_forgotten(monkeypatch, module):
    true = column.keep

    def keep(own, kept, tokens, columns):
        exact.clear(own)
        true(own, kept, tokens, columns)

    monkeypatch.setattr(column, "keep", keep)


def lse_left_out(monkeypatch, module):
    true = gradient.load

    def load(own, tokens, row0, at, start):
        true(own, tokens, row0, at, start)
        own.lse2.fill(0.0)

    monkeypatch.setattr(gradient, "load", load)
