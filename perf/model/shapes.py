"""Batches and lengths that a whole model is run with."""

from __future__ import annotations

_DECODING = ((1, 512), (8, 512), (64, 512))
#: Part -> (sequences, tokens of each) of a training step, or (sequences, tokens behind them).
TIMED = {
    "training": ((2, 1024), (4, 2048)),
    "generating": _DECODING,
    "replaying": (*_DECODING, (64, 4096)),
}
#: Parts whose step is awaited, as a loop awaits the token that it makes.
AWAITED = ("generating",)
#: Lengths of the sequences that are audited, and their name.
AUDITED = (64, 19, 40)
AUDIT = "64, 19, 40 tokens"
