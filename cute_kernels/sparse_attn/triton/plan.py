"""The tiles of the Triton backend, one for every shape: the bits depend on them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """One kernel: the query and key rows of a step, which divide 128, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2
    hip_stages: int = 2


@dataclass(frozen=True)
class TritonPlan:
    """The kernels of one padded head size; every fused multiply-add is written as one.

    ``lanes``: entries that the list kernel moves at once.  The ``hip`` fields pin the MFMA shape
    and the K packing; other devices ignore them.  Stages, which do not touch the bits, are fewer
    where registers are.
    """

    block_d: int
    block_dv: int
    forward: Tile
    dkdv: Tile
    dq: Tile
    delta: Tile
    lanes: int = 128
    fp_fusion: bool = False
    hip_matrix_instr_nonkdim: int = 16
    hip_kpack: int = 1


_64 = TritonPlan(
    block_d=64,
    block_dv=64,
    forward=Tile(128, 64),
    dkdv=Tile(32, 128, hip_stages=1),
    dq=Tile(128, 64),
    delta=Tile(128, 128, num_warps=4),
)
_128 = replace(_64, block_d=128, block_dv=128, dq=Tile(128, 32), delta=Tile(64, 128, num_warps=4))
# Steps are as wide as 99 KiB of shared memory and 255 registers let them be.
_192 = TritonPlan(
    block_d=256,
    block_dv=128,
    forward=Tile(64, 32),
    dkdv=Tile(16, 64, hip_stages=1),
    dq=Tile(64, 32, hip_stages=1),
    delta=Tile(64, 128, num_warps=4),
)
_256 = replace(_192, block_dv=256, dq=Tile(64, 16, hip_stages=1), delta=Tile(32, 128, num_warps=4))
#: By head size of q and k; 96 and 192 are padded with zeros.
TRITON = {64: _64, 96: _128, 128: _128, 192: _192, 256: _256}
