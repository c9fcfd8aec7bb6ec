"""Kernels around tensor maps that the tests run on the simulator."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from .samples import stream

_OPS = {
    "load": cpasync.CopyBulkTensorTileG2SOp,
    "store": cpasync.CopyBulkTensorTileS2GOp,
    "reduce": cpasync.CopyReduceBulkTensorTileS2GOp,
}


class DescriptorKernel:
    """Passes one TMA descriptor to a kernel that only prefetches it."""

    def __init__(self, box, swizzle=None, op="load", internal_type=None):
        self.box, self.swizzle, self.op, self.internal_type = box, swizzle, op, internal_type

    @cute.jit
    def __call__(self, tensor: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout(self.box)
        if cutlass.const_expr(self.swizzle is not None):
            layout = cute.make_composed_layout(cute.make_swizzle(*self.swizzle), 0, layout)
        atom, coordinates = cpasync.make_tiled_tma_atom(
            _OPS[self.op](), tensor, layout, self.box, internal_type=self.internal_type
        )
        self.kernel(atom, coordinates).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, coordinates: cute.Tensor):
        cpasync.prefetch_descriptor(atom)


def descriptor_signature(dtype, rank):
    """Compile arguments of `DescriptorKernel`."""
    unit = max(1, 128 // dtype.width)
    strides = (1, *(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)))
    shape = tuple(cute.sym_int() for _ in range(rank))
    return make_fake_tensor(dtype, shape, stride=strides, assumed_align=16), stream()


class TmaCopy:
    """b = a, or b += a: a bulk load fills shared memory, a bulk store or reduction writes it.

    shift: ``a`` is one row, and is loaded as row ``shift`` of a tensor that begins ``shift`` rows
    of `FAR` elements before it, below address 0: what ragged copies do.
    """

    FAR = 1 << 33

    def __init__(self, dtype, box, swizzle=None, add=False, shift=0):
        self.dtype, self.box, self.swizzle, self.add = dtype, box, swizzle, add
        self.shift = shift

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout(self.box)
        if cutlass.const_expr(self.swizzle is not None):
            layout = cute.make_composed_layout(cute.make_swizzle(*self.swizzle), 0, layout)
        source = a
        if cutlass.const_expr(self.shift):
            first = a.iterator - cutlass.Int64(self.shift) * self.FAR
            shape = (a.shape[0], self.shift + 1)
            source = cute.make_tensor(first, cute.make_layout(shape, stride=(1, self.FAR)))
        load, tma_a = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, layout, self.box
        )
        out = _OPS["reduce" if cutlass.const_expr(self.add) else "store"]()
        store, tma_b = cpasync.make_tiled_tma_atom(out, b, layout, self.box)
        grid = [
            cute.ceil_div(cute.size(a, mode=[0]), self.box[0]),
            cute.ceil_div(cute.size(a, mode=[1]), self.box[1]),
            1,
        ]
        self.kernel(load, tma_a, store, tma_b).launch(grid=grid, block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, load: cute.CopyAtom, tma_a: cute.Tensor, store: cute.CopyAtom, tma_b: cute.Tensor
    ):
        thread, _, _ = cute.arch.thread_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        plain = cute.make_layout(self.box)
        swizzle = None
        if cutlass.const_expr(self.swizzle is not None):
            swizzle = cute.make_swizzle(*self.swizzle)
        buffer = smem.allocate_tensor(self.dtype, plain, 1024, swizzle=swizzle)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        one = cute.make_layout(1)
        g_a = cute.local_tile(tma_a, self.box, (block_m, block_n + self.shift))
        g_b = cute.local_tile(tma_b, self.box, (block_m, block_n))
        s_in, g_in = cpasync.tma_partition(
            load, 0, one, cute.group_modes(buffer, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        s_out, g_out = cpasync.tma_partition(
            store, 0, one, cute.group_modes(buffer, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                barrier, self.box[0] * self.box[1] * self.dtype.width // 8
            )
        cute.copy(load, g_in, s_in, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.copy(store, s_out, g_out)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class TmaFill:
    """b[i] = i (mod 64): threads fill shared memory, one bulk store per CTA writes it."""

    def __init__(self, fence=True):
        self.fence = fence

    @cute.jit
    def __call__(self, b: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout(64)
        op = cpasync.CopyBulkTensorTileS2GOp()
        store, tma_b = cpasync.make_tiled_tma_atom(op, b, layout, (64,))
        grid = [cute.ceil_div(cute.size(b), 64), 1, 1]
        self.kernel(store, tma_b).launch(grid=grid, block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, store: cute.CopyAtom, tma_b: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffer = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64), 128)
        buffer[thread] = cutlass.Float32(thread)
        if cutlass.const_expr(self.fence):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            tile = cute.local_tile(tma_b, (64,), (block,))
            s_out, g_out = cpasync.tma_partition(store, 0, cute.make_layout(1), buffer, tile)
            cute.copy(store, s_out, g_out)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
