"""A WGMMA GEMM that the tests and the self-test run on the simulator, intact or with a defect."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .samples import matrix, stream

DEFECTS = (
    "no wait for the loads",
    "no wait for WGMMA",
    "WGMMA waited for after the loop",
    "only one operand expected",
)


class Gemm:
    """C = A B^T: bf16 or f16 in, f32 out; A is (M, K), B is (N, K), both contiguous along K.

    One 64 x 64 tile per CTA, TMA loads, WGMMA, one stage.  `defect` leaves out one
    synchronisation, for tests that the simulator notices.
    """

    def __init__(self, dtype, tile=(64, 64, 64), defect=None):
        self.dtype, self.tile, self.defect = dtype, tile, defect

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        bm, bn, bk = self.tile
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            tiler_mn=(64, bn),
        )
        layout_a = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, self.dtype, 1)
        layout_b = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, self.tile, self.dtype, 1)
        op = cpasync.CopyBulkTensorTileG2SOp()
        atom_a, tma_a = cpasync.make_tiled_tma_atom(
            op, a, cute.slice_(layout_a, (None, None, 0)), (bm, bk)
        )
        atom_b, tma_b = cpasync.make_tiled_tma_atom(
            op, b, cute.slice_(layout_b, (None, None, 0)), (bn, bk)
        )
        grid = [
            cute.ceil_div(cute.size(c, mode=[0]), bm),
            cute.ceil_div(cute.size(c, mode=[1]), bn),
            1,
        ]
        self.kernel(mma, atom_a, tma_a, atom_b, tma_b, c, layout_a, layout_b).launch(
            grid=grid, block=[128, 1, 1], stream=stream
        )

    def _expected_bytes(self):
        bm, bn, bk = self.tile
        rows = bm if self.defect == "only one operand expected" else bm + bn
        return rows * bk * self.dtype.width // 8

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        tma_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        tma_b: cute.Tensor,
        c: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
    ):
        bm, bn, bk = self.tile
        thread, _, _ = cute.arch.thread_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        s_a = smem.allocate_tensor(self.dtype, layout_a.outer, 1024, swizzle=layout_a.inner)
        s_b = smem.allocate_tensor(self.dtype, layout_b.outer, 1024, swizzle=layout_b.inner)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        g_a = cute.local_tile(tma_a, (bm, bk), (block_m, None))
        g_b = cute.local_tile(tma_b, (bn, bk), (block_n, None))
        one = cute.make_layout(1)
        t_sa, t_ga = cpasync.tma_partition(
            atom_a, 0, one, cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        t_sb, t_gb = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )

        thr = mma.get_slice(thread)
        f_a = mma.make_fragment_A(thr.partition_A(s_a))
        f_b = mma.make_fragment_B(thr.partition_B(s_b))
        g_c = cute.local_tile(c, (bm, bn), (block_m, block_n))
        t_c = thr.partition_C(g_c)
        acc = cute.make_rmem_tensor(t_c.shape, cutlass.Float32)
        coords = thr.partition_C(cute.make_identity_tensor((bm, bn)))

        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(cute.size(g_a, mode=[2])):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self._expected_bytes())
                cute.copy(atom_a, t_ga[None, k], t_sa[None, 0], tma_bar_ptr=barrier)
                cute.copy(atom_b, t_gb[None, k], t_sb[None, 0], tma_bar_ptr=barrier)
            if cutlass.const_expr(self.defect != "no wait for the loads"):
                cute.arch.mbarrier_wait(barrier, k % 2)
            warpgroup.fence()
            for kk in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
                cute.gemm(mma, acc, f_a[None, None, kk, 0], f_b[None, None, kk, 0], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if cutlass.const_expr(
                self.defect not in ("no wait for WGMMA", "WGMMA waited for after the loop")
            ):
                warpgroup.wait_group(0)
            cute.arch.sync_threads()
        if cutlass.const_expr(self.defect == "WGMMA waited for after the loop"):
            warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            row = block_m * bm + coords[i][0]
            col = block_n * bn + coords[i][1]
            if row < cute.size(c, mode=[0]) and col < cute.size(c, mode=[1]):
                t_c[i] = acc[i]


def gemm_signature(dtype):
    """Compile arguments of `Gemm`."""
    return matrix(dtype), matrix(dtype), matrix(cutlass.Float32, align=4), stream()
