"""Turns of a backward at tiles of dQ: waiting for one, and what is done in it."""

import cutlass
from cutlass import cute

from ...dsl import turnstile
from ..config import BackwardConfig
from .backward_state import DqTensors


@cute.jit
def wait(
    dq: DqTensors,
    config: cutlass.Constexpr[BackwardConfig],
    row: cutlass.Int64,
    rank: cutlass.Int32,
    half: cutlass.Int32 = 0,
):
    """Wait for the turn at a tile of rows."""
    turnstile.wait_turn(dq.mSemaphore.iterator + row * config.turns + half, rank)


@cute.jit
def put(
    target: cute.Pointer,
    source: cute.Pointer,
    size: cutlass.Constexpr[int],
    rank: cutlass.Int32,
    first_stores: cutlass.Constexpr[bool],
):
    """Add ``size`` bytes to those of the visits before, or store them if there are none."""
    if cutlass.const_expr(first_stores):
        if rank == 0:
            turnstile.store(target, source, size)
        else:
            turnstile.add(target, source, size)
    else:
        turnstile.add(target, source, size)
