"""Small CuTe kernels for the certificate tests: right ones, and the same with one defect each.

`compile_*` functions call ``cute.compile`` once, against fake tensors, and need no GPU.
"""
# ruff: noqa: SIM102  (a constexpr branch is decided in Python, the branch in it on the device)

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

F32, I32 = cutlass.Float32, cutlass.Int32
COLUMNS = 64  # columns of the ordered sums, and threads of their CTAs


def _vector(dtype):
    return make_fake_compact_tensor(dtype, (cute.sym_int(),))


def _rows(dtype, stride=None, columns=COLUMNS):
    stride = cute.sym_int64(divisibility=4) if stride is None else stride
    return make_fake_tensor(dtype, (cute.sym_int(), columns), (stride, 1), assumed_align=16)


class Elementwise:
    """y = 2 x, and a counter; `extra` adds one thing that class A forbids."""

    def __init__(self, extra=""):
        self.extra = extra

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, count: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y, count).launch(
            grid=[cute.ceil_div(cute.size(x), 128), 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, count: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if i < cute.size(x):
            value = x[i] * F32(2.0)
            if cutlass.const_expr(self.extra == "clock"):
                value = value + F32(cute.arch.clock())
            if cutlass.const_expr(self.extra == "smid"):
                value = value + F32(cute.arch.smid())
            y[i] = value
            if cutlass.const_expr(self.extra == "float atomic"):
                cute.arch.atomic_add(y.iterator, value)
            if cutlass.const_expr(self.extra == "float swap"):
                old = I32(0)
                recorded = I32(-1)
                while recorded != old:
                    old = cute.arch.load(count.iterator, I32)
                    new = I32(F32(old) + value)
                    recorded = cute.arch.atomic_cas(count.iterator, cmp=old, val=new)
        cute.arch.atomic_add(count.iterator, I32(1))


def compile_elementwise(extra=""):
    return cute.compile(
        Elementwise(extra), _vector(F32), _vector(F32), _vector(I32), make_fake_stream()
    )


class RowCopy:
    """y[row] = x[row], one row per CTA, with row offsets as wide as the strides are.

    wait: Where a launch before its predecessor's end waits for it: "first", "late" or "never"; ""
    for one after it.
    """

    def __init__(self, wait):
        self.wait = wait

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        grid = [cute.size(x, mode=[0]), 1, 1]
        early = self.wait != ""
        self.kernel(x, y).launch(grid=grid, block=[COLUMNS, 1, 1], stream=stream, use_pdl=early)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.wait == "first"):
            cute.arch.griddepcontrol_wait()
        value = x[row, thread]
        if cutlass.const_expr(self.wait == "late"):
            cute.arch.griddepcontrol_wait()
        y[row, thread] = value


def compile_row_copy(strides, wait=""):
    """`strides`: "int64", "int32" (a 32-bit variable) or a constant."""
    make = {"int64": cute.sym_int64, "int32": cute.sym_int}
    x, y = (
        _rows(F32, strides if isinstance(strides, int) else make[strides](divisibility=4))
        for _ in range(2)
    )
    return cute.compile(RowCopy(wait), x, y, make_fake_stream())


@dsl_user_op
def bulk_add(dst, src, size, *, loc=None, ip=None):
    """Adds `size` bytes of fp32 in shared memory to global memory, asynchronously."""
    llvm.inline_asm(
        None,
        [
            dst.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            src.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            I32(size).ir_value(loc=loc, ip=ip),
        ],
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def spin(semaphore: cute.Pointer, rank: I32, sem: cutlass.Constexpr):
    recorded = cute.arch.load(semaphore, I32, sem=sem, scope="gpu")
    while recorded != rank:
        recorded = cute.arch.load(semaphore, I32, sem=sem, scope="gpu")


class OrderedSum:
    """total[m] += values[cta], the CTAs of each row m taking turns by rank[m, cta].

    `style`: "thread" (one thread takes the whole turn), "lanes" (lane 0 of warp 1 spins and
    releases, the elected lane adds), "plain" (every thread adds with red, thread 0 spins and
    releases), "fence" (a fence and a relaxed write for a release), "late" (the release of a row
    follows the addition to the next).  `defect` names what is left out or changed.
    """

    def __init__(self, style="thread", defect=""):
        self.style, self.defect = style, defect
        self.sem = "relaxed" if defect == "relaxed spin" else "acquire"

    @cute.jit
    def __call__(
        self,
        values: cute.Tensor,
        total: cute.Tensor,
        rank: cute.Tensor,
        semaphore: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.kernel(values, total, rank, semaphore).launch(
            grid=[cute.size(values, mode=[0]), 1, 1], block=[COLUMNS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, values: cute.Tensor, total: cute.Tensor, rank: cute.Tensor, semaphore: cute.Tensor
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        buffer = smem.allocate_tensor(F32, cute.make_layout(COLUMNS), 128)
        buffer[thread] = values[block, thread]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        rows = cute.size(total, mode=[0])
        if cutlass.const_expr(self.defect == "one spin for all rows"):
            if thread == 0:
                spin(semaphore.iterator, rank[0, block], self.sem)
        if cutlass.const_expr(self.style == "late"):
            if thread == 0:
                self.add(total[0, None], buffer, semaphore.iterator, rank[0, block])
                for m in cutlass.range(1, rows, unroll=1):
                    self.add(total[m, None], buffer, semaphore.iterator + m, rank[m, block])
                    cute.arch.cp_async_bulk_wait_group(self.kept(), read=False)
                    self.release(semaphore.iterator + m - 1)
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                self.release(semaphore.iterator + rows - 1)
        else:
            for m in cutlass.range(rows, unroll=1):
                self.turn(total[m, None], buffer, semaphore.iterator + m, rank[m, block])

    def kept(self):
        return 2 if self.defect == "waits for one group less" else 1

    @cute.jit
    def add(self, row: cute.Tensor, buffer: cute.Tensor, semaphore: cute.Pointer, rank: I32):
        spin(semaphore, rank, self.sem)
        bulk_add(row.iterator, buffer.iterator, COLUMNS * 4)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def turn(self, row: cute.Tensor, buffer: cute.Tensor, semaphore: cute.Pointer, rank: I32):
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.style in ("thread", "fence")):
            if thread == 0:
                self.spin(semaphore, rank)
                bulk_add(row.iterator, buffer.iterator, COLUMNS * 4)
                cute.arch.cp_async_bulk_commit_group()
                self.wait_and_release(semaphore)
        if cutlass.const_expr(self.style == "lanes"):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 1:
                lane = cute.arch.lane_idx()
                if lane == 0:
                    self.spin(semaphore, rank)
                self.sync_warp("before the addition")
                with cute.arch.elect_one():
                    bulk_add(row.iterator, buffer.iterator, COLUMNS * 4)
                    cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=self.defect == "read wait")
                self.sync_warp("before the release")
                if lane == 0:
                    self.release(semaphore)
        if cutlass.const_expr(self.style == "plain"):
            if thread == 0:
                self.spin(semaphore, rank)
            cute.arch.sync_threads()
            pointer = row.iterator + thread
            cute.arch.red(
                pointer, buffer[thread], op="add", dtype="f32", sem="relaxed", scope="gpu"
            )
            if cutlass.const_expr(self.defect != "no barrier before the release"):
                cute.arch.sync_threads()
            if thread == 0:
                self.release(semaphore)

    def spin(self, semaphore, rank):
        if self.defect not in ("no spin", "one spin for all rows"):
            spin(semaphore, rank, self.sem)

    def sync_warp(self, where):
        if self.defect != f"no barrier {where}":
            cute.arch.sync_warp()

    def wait_and_release(self, semaphore):
        if self.defect == "release before the wait":
            self.release(semaphore)
        cute.arch.cp_async_bulk_wait_group(0, read=self.defect == "read wait")
        if self.defect not in ("no release", "release before the wait"):
            self.release(semaphore)

    def release(self, semaphore):
        sem = "release"
        if self.style == "fence":
            cute.arch.fence_acq_rel_gpu()
            sem = "relaxed"
        cute.arch.red(semaphore, I32(1), op="add", dtype="s32", sem=sem, scope="gpu")


def compile_ordered_sum(style="thread", defect=""):
    return cute.compile(
        OrderedSum(style, defect),
        _rows(F32),
        _rows(F32),
        make_fake_tensor(I32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1)),
        _vector(I32),
        make_fake_stream(),
    )


class Roles:
    """y = x; warpgroup 0 lowers its register count to `dec`, the others raise theirs to `inc`."""

    def __init__(self, dec, inc, min_blocks=1):
        self.dec, self.inc, self.min_blocks = dec, inc, min_blocks

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(
            grid=[1, 1, 1],
            block=[384, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.dec)
        else:
            cute.arch.setmaxregister_increase(self.inc)
        y[thread] = x[thread]


def compile_roles(dec, inc, min_blocks=1):
    return cute.compile(Roles(dec, inc, min_blocks), _vector(F32), _vector(F32), make_fake_stream())
