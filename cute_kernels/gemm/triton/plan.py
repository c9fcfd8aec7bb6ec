"""Every constant that the bits of the Triton gemm depend on, and what is chosen by architecture."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ...runtime.triton_products import TRITON as TRITON
from ...runtime.triton_products import TRITON_FP32 as TRITON_FP32
from ...runtime.triton_products import TritonPlan

#: Bytes of sums that a call of few rows may allocate; beyond, a program adds all leaves of a tile.
WORKSPACE = 256 * 2**20


@dataclass(frozen=True)
class SkinnyPlan:
    """How the leaves of few rows are shared out on one architecture.  Not run on a GPU.

    Every number is a guess that no measurement has tuned, and no bit depends on one, but for
    ``matrix_instr_nonkdim``, which is that of `TritonPlan`.

    ``tiles``: (tokens, warps) of a tile, ascending; rows take the first that holds them, else the
    last.  ``columns``: its weight rows.  ``programs``: what a compute unit is meant to hold; leaves
    are split up to so many.  ``wave``: threads of a warp.  ``root_warps``: of the kernel that adds
    leaves.  ``matrix_instr_nonkdim`` and ``waves_per_eu`` (0: the compiler's choice) are AMD's.
    """

    num_stages: int
    wave: int
    tiles: tuple[tuple[int, int], ...] = ((16, 4), (32, 4), (64, 4), (128, 8))
    columns: int = 64
    programs: int = 2
    root_warps: int = 2
    matrix_instr_nonkdim: int = TRITON.hip_matrix_instr_nonkdim
    waves_per_eu: int = 0

    @property
    def root_columns(self) -> int:
        """Columns of a program that adds leaves: 16 bytes of fp32 for each thread."""
        return 4 * self.wave * self.root_warps


SKINNY = {
    "gfx942": SkinnyPlan(num_stages=2, wave=64, waves_per_eu=2),
    "gfx950": SkinnyPlan(num_stages=3, wave=64, waves_per_eu=2),
    "cuda": SkinnyPlan(num_stages=4, wave=32),
}
#: CUDA whose small tiles have the instruction of large ones: a test reads their code.
_SAME_INSTRUCTION = ("sm_80", "sm_86", "sm_89", "sm_90a")


@functools.cache
def skinny(arch: str, plan: TritonPlan) -> SkinnyPlan:
    """The plan of few rows on ``arch``, with tiles that are no taller than the one of ``plan``.

    Where no test reads the instructions of small tiles, all rows take the tile of the tree.
    """
    small = SKINNY.get("cuda" if arch in _SAME_INSTRUCTION else arch)
    if small is None:
        tree_tiles = ((plan.block_m, plan.num_warps),)
        return SkinnyPlan(
            plan.num_stages, wave=32, tiles=tree_tiles, columns=plan.block_n, programs=1
        )
    tiles = tuple(tile for tile in small.tiles if tile[0] <= plan.block_m)
    return replace(small, tiles=tiles)
