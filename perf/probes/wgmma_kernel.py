"""A bare WGMMA chain on SM90: the instrument behind the hardware probes.

Formula:  D[M, N] = C + sum_k A[M, K] * B[N, K]     bf16 operands, fp32 accumulators and result.

Layouts: A and B are contiguous along K; C and D have any strides, so exchanging the operands
(`swap`) is a call with (B, A) and transposed views, not another kernel.

Summation order: ascending k16 groups into one fp32 accumulator that starts from C (or from zero).
With `promote_every = P`, every P groups form a leaf that starts from zero; leaves are added in
ascending order to an fp32 register sum by CUDA cores (round to nearest), which starts from C.

Limits: one CTA per output tile of 64*warpgroups x n, one shared-memory stage, no overlap of loads
and products.  It is for reading bits.  With `resident=True` the first K block is loaded once and
multiplied K / block_k times, which times the tensor cores without the loads (probe `promotion`).

Run on an H200: docs/numerics.md.  Its bits are tested in ptxsim.
"""

from dataclasses import dataclass, field

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

GROUP_K = 16  # elements of K that one bf16 WGMMA consumes


@dataclass(frozen=True)
class Chain:
    """Compile-time configuration of the kernel.

    n: width of the instruction, 8..256 in steps of 8.  warpgroups: 64-row slices of the tile.
    block_k: K elements per shared-memory block (16, 32, 64 or 128).  promote_every: k16 groups per
    leaf, 0 for one chain; a leaf is a whole number of blocks.  resident: multiply block 0 only.
    registers: A goes through registers, not from shared memory into the instruction.
    """

    n: int = 64
    warpgroups: int = 1
    block_k: int = 64
    promote_every: int = 0
    resident: bool = False
    registers: bool = field(default=False, repr=False)

    def __post_init__(self):
        assert self.n in range(8, 257, 8), f"n: expected 8..256 in steps of 8, got {self.n}"
        assert self.warpgroups in (1, 2), f"warpgroups: expected 1 or 2, got {self.warpgroups}"
        assert self.block_k in (16, 32, 64, 128), f"block_k: got {self.block_k}"
        leaf = self.promote_every * GROUP_K
        assert leaf % self.block_k == 0, f"promote_every: {leaf} is no multiple of {self.block_k}"

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups


class WgmmaChain:
    """Host function and kernel of one `Chain`."""

    def __init__(self, chain: Chain):
        self.chain = chain

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor | None,
        d: cute.Tensor,
        stream: cuda.CUstream,
    ):
        chain = self.chain
        source = warpgroup.OperandSource
        mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16,
            cutlass.BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (chain.warpgroups, 1, 1),
            tiler_mn=(64, chain.n),
            a_source=source.RMEM if chain.registers else source.SMEM,
        )
        # Built by hand: the DSL's helper adds a stage mode whose slice aborts where n / 8 is odd.
        kind = hopper_helpers.get_smem_layout_atom(
            LayoutEnum.ROW_MAJOR, cutlass.BFloat16, chain.block_k
        )
        atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
        layout_a = cute.tile_to_shape(atom, (chain.tile_m, chain.block_k), order=(0, 1))
        layout_b = cute.tile_to_shape(atom, (chain.n, chain.block_k), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        atom_a, tma_a = cpasync.make_tiled_tma_atom(
            load, a, layout_a, (chain.tile_m, chain.block_k)
        )
        atom_b, tma_b = cpasync.make_tiled_tma_atom(load, b, layout_b, (chain.n, chain.block_k))
        grid = [
            cute.ceil_div(cute.size(d, mode=[0]), chain.tile_m),
            cute.ceil_div(cute.size(d, mode=[1]), chain.n),
            1,
        ]
        layouts = layout_a, layout_b
        self.kernel(mma, atom_a, tma_a, atom_b, tma_b, c, d, layouts).launch(
            grid=grid, block=[chain.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        gA_mk: cute.Tensor,
        atom_b: cute.CopyAtom,
        gB_nk: cute.Tensor,
        gC_mn: cute.Tensor | None,
        gD_mn: cute.Tensor,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        chain = self.chain
        layout_a, layout_b = layouts
        thread, _, _ = cute.arch.thread_idx()
        tile_m, tile_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        sA = smem.allocate_tensor(cutlass.BFloat16, layout_a.outer, 1024, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(cutlass.BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        gA = cute.local_tile(gA_mk, (chain.tile_m, chain.block_k), (tile_m, None))
        gB = cute.local_tile(gB_nk, (chain.n, chain.block_k), (tile_n, None))
        one = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(
            atom_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        tBsB, tBgB = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )

        copies = (atom_a, tAgA, tAsA), (atom_b, tBgB, tBsB)

        tile_mn = (chain.tile_m, chain.n)
        slice_d = mma.get_slice(thread)
        # The descriptors name a warpgroup's whole 64-row slice, so they come from its first thread.
        slice_ab = mma.get_slice(cute.arch.make_warp_uniform(warp // 4) * 128)
        tAsA_mma = (slice_d if chain.registers else slice_ab).partition_A(sA)
        rA = mma.make_fragment_A(tAsA_mma)
        rB = mma.make_fragment_B(slice_ab.partition_B(sB))
        tDgD = slice_d.partition_C(cute.local_tile(gD_mn, tile_mn, (tile_m, tile_n)))
        tDcD = slice_d.partition_C(cute.make_identity_tensor(tile_mn))
        acc = cute.make_rmem_tensor(tDgD.shape, cutlass.Float32)
        total = acc
        if cutlass.const_expr(chain.promote_every > 0):
            total = cute.make_rmem_tensor(tDgD.shape, cutlass.Float32)
        rows = cute.size(gD_mn, mode=[0]) - tile_m * chain.tile_m
        cols = cute.size(gD_mn, mode=[1]) - tile_n * chain.n

        # total = C
        total.fill(0.0)
        if cutlass.const_expr(gC_mn is not None):
            tDgC = slice_d.partition_C(cute.local_tile(gC_mn, tile_mn, (tile_m, tile_n)))
            for i in cutlass.range_constexpr(cute.size(total)):
                if tDcD[i][0] < rows and tDcD[i][1] < cols:
                    total[i] = tDgC[i]

        blocks = cute.size(gA, mode=[2])
        leaf_blocks = blocks
        if cutlass.const_expr(chain.promote_every > 0):
            leaf_blocks = cutlass.Int32(chain.promote_every * GROUP_K // chain.block_k)
        # D = total + sum over leaves of (sum over the leaf's blocks of A_k B_k)
        for first in range(0, blocks, leaf_blocks):
            last = cutlass.min(first + leaf_blocks, blocks)
            mma.set(warpgroup.Field.ACCUMULATE, chain.promote_every == 0 and gC_mn is not None)
            for block in range(first, last):
                if cutlass.const_expr(not chain.resident):
                    self.load(warp, full, copies, block, block % 2)
                elif block == 0:
                    self.load(warp, full, copies, 0, 0)
                if cutlass.const_expr(chain.registers):
                    cute.autovec_copy(tAsA_mma, rA)
                # acc += A_k B_k, one instruction per k16 group
                warpgroup.fence()
                for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                    cute.gemm(mma, acc, rA[None, None, k], rB[None, None, k], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if cutlass.const_expr(chain.resident):
                    warpgroup.wait_group(1)
                else:
                    warpgroup.wait_group(0)
                    cute.arch.sync_threads()
            warpgroup.wait_group(0)
            # total += leaf
            if cutlass.const_expr(chain.promote_every > 0):
                total.store(total.load() + acc.load())

        for i in cutlass.range_constexpr(cute.size(total)):
            if tDcD[i][0] < rows and tDcD[i][1] < cols:
                tDgD[i] = total[i]

    @cute.jit
    def load(self, warp, full, copies, block, phase):
        """Fills the one stage with K block `block` and waits for it."""
        chain = self.chain
        if warp == 0:
            with cute.arch.elect_one():
                count = (chain.tile_m + chain.n) * chain.block_k * cutlass.BFloat16.width // 8
                cute.arch.mbarrier_arrive_and_expect_tx(full, count)
            for atom, tXgX, tXsX in copies:
                cute.copy(atom, tXgX[None, block], tXsX, tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, phase)


def signature(with_c: bool) -> tuple:
    """Fake arguments of `WgmmaChain.__call__`; shared symbols make the call check the shapes."""
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=GROUP_K)

    def operand(rows):
        lead = cute.sym_int64(divisibility=8)  # TMA wants strides of 16 bytes
        return make_fake_tensor(cutlass.BFloat16, (rows, k), stride=(lead, 1), assumed_align=16)

    def result():
        strides = (cute.sym_int64(), cute.sym_int64())
        return make_fake_tensor(cutlass.Float32, (m, n), stride=strides, assumed_align=4)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return operand(m), operand(n), result() if with_c else None, result(), stream


def build(chain: Chain, *, with_c: bool = False, compiler=None):
    """Compiles one chain; `compiler` is `cute.compile` or the simulator's.

    Returns run(a, b, d, c=None, swap=False): bf16 a [M, K] and b [N, K], fp32 d and c [M, N];
    K a multiple of block_k.  `swap` puts b on the instruction's 64-row side.  d is overwritten.
    """
    compiler = compiler or cute.compile
    options = {} if compiler is not cute.compile else {"options": "--enable-tvm-ffi"}
    compiled = compiler(WgmmaChain(chain), *signature(with_c), **options)

    def run(a, b, d, c=None, swap=False):
        if a.shape[1] % chain.block_k:
            raise ValueError(f"a: expected K a multiple of {chain.block_k}, got {a.shape[1]}")
        if (c is not None) != with_c:
            raise ValueError(f"c: compiled with_c={with_c}, got {'none' if c is None else 'one'}")
        if swap:
            a, b, d, c = b, a, d.t(), None if c is None else c.t()
        compiled(a, b, c, d)

    return run
