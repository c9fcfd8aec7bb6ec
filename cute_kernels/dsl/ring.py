"""A ring of stages in shared memory that every lane fills and reads for itself: ``cp.async``.

What is under way takes no registers, and nobody waits for another lane.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

WARP = 32


@dataclass(frozen=True)
class Slots:
    """Where a lane's pieces of one stage lie.

    pieces: bytes of each: 4, 8 or 16.  The pieces of a warp's lanes are neighbours.
    """

    pieces: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of a warp's stage."""
        return sum(self.pieces) * WARP

    @cute.jit
    def fetch(self, stage: cute.Pointer, piece: cutlass.Constexpr, source: cute.Tensor, there=None):
        """One piece from global memory, asynchronously; zeros if it is not there to be read."""
        size = self.pieces[piece]
        # Past the first-level cache, if the copy can: nobody reads it again from there.
        kind = "cg" if size == 16 else "ca"
        words = f"cp.async.{kind}.shared.global [{{$r0}}], [{{$r1}}], {size}"
        args = [self.address(stage, piece), source.iterator.toint()]
        if cutlass.const_expr(there is None):
            cute.arch.inline_ptx(f"{words};", read_only_args=args)
        else:
            read = cutlass.Int32(size) if there else cutlass.Int32(0)
            cute.arch.inline_ptx(f"{words}, {{$r2}};", read_only_args=[*args, read])

    @cute.jit
    def read(self, stage: cute.Pointer, piece: cutlass.Constexpr, target: cute.Tensor):
        """One piece that has arrived."""
        pointer = cute.make_ptr(
            target.element_type,
            self.address(stage, piece),
            cute.AddressSpace.smem,
            assumed_align=self.pieces[piece],
        )
        target.store(cute.make_tensor(pointer, cute.make_layout(cute.size(target))).load())

    @cute.jit
    def address(self, stage: cute.Pointer, piece: cutlass.Constexpr):
        """Of a lane's piece."""
        first = sum(self.pieces[:piece]) * WARP
        return (stage + (first + cute.arch.lane_idx() * self.pieces[piece])).toint()
