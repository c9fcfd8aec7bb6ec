"""A ring of ``cp.async`` stages in shared memory, where each lane reads what it copied itself.

Data in flight takes no registers, and no lane waits for another one.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

WARP = 32


@dataclass(frozen=True)
class Slots:
    """Layout of one stage of a warp: piece by piece, and in a piece lane by lane.

    pieces: bytes that a lane copies at once: 4, 8 or 16 each.
    """

    pieces: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of a warp's stage."""
        return sum(self.pieces) * WARP

    @cute.jit
    def fetch(
        self,
        stage: cute.Pointer,
        piece: cutlass.Constexpr[int],
        source: cute.Tensor,
        predicate: cutlass.Boolean | None = None,
    ):
        """Copy one piece from global memory, asynchronously; zeros where ``predicate`` is false."""
        size = self.pieces[piece]
        # 16-byte copies bypass L1, where nothing reads the data again; smaller ones cannot.
        kind = "cg" if size == 16 else "ca"
        words = f"cp.async.{kind}.shared.global [{{$r0}}], [{{$r1}}], {size}"
        args = [self.address(stage, piece), source.iterator.toint()]
        if cutlass.const_expr(predicate is None):
            cute.arch.inline_ptx(f"{words};", read_only_args=args)
        else:
            read_bytes = cutlass.Int32(size) if predicate else cutlass.Int32(0)
            cute.arch.inline_ptx(f"{words}, {{$r2}};", read_only_args=[*args, read_bytes])

    @cute.jit
    def read(self, stage: cute.Pointer, piece: cutlass.Constexpr[int], target: cute.Tensor):
        """Load one piece that has arrived into registers."""
        pointer = cute.make_ptr(
            target.element_type,
            self.address(stage, piece),
            cute.AddressSpace.smem,
            assumed_align=self.pieces[piece],
        )
        target.store(cute.make_tensor(pointer, cute.make_layout(cute.size(target))).load())

    @cute.jit
    def address(self, stage: cute.Pointer, piece: cutlass.Constexpr[int]) -> cutlass.Int32:
        """Shared-memory address of a lane's piece.

        Computed by hand: pieces differ in size, so that no one layout describes the stage.
        """
        first = sum(self.pieces[:piece]) * WARP
        return (stage + (first + cute.arch.lane_idx() * self.pieces[piece])).toint()
