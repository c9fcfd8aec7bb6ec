"""Small CuTe kernels that the tests and the self-test run on the simulator."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator


def stream():
    """A fake stream that the call leaves out."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def vector(dtype=cutlass.Float32, align=4):
    """A fake vector with dynamic length."""
    return make_fake_compact_tensor(dtype, (cute.sym_int(),), assumed_align=align)


def matrix(dtype, major=1, align=16):
    """A fake matrix with dynamic shape, contiguous along `major`."""
    shape = (cute.sym_int(), cute.sym_int())
    lead = cute.sym_int64(divisibility=align * 8 // dtype.width)
    strides = tuple(1 if i == major else lead for i in range(2))
    return make_fake_tensor(dtype, shape, stride=strides, assumed_align=align)


@cute.kernel
def _scale_kernel(a: cute.Tensor, b: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(a):
        b[i] = a[i] * factor


@cute.jit
def scale(a: cute.Tensor, b: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream):
    """b = a * factor."""
    _scale_kernel(a, b, factor).launch(
        grid=[cute.ceil_div(cute.size(a), 128), 1, 1], block=[128, 1, 1], stream=stream
    )


def scale_signature():
    """Compile arguments of `scale`."""
    n = cute.sym_int()
    return (
        make_fake_compact_tensor(cutlass.Float32, (n,)),
        make_fake_compact_tensor(cutlass.Float32, (n,)),
        cutlass.Float32(1.0),
        stream(),
    )


@cute.kernel
def _poke_kernel(address: cutlass.Int64):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(32))[thread] = cutlass.Float32(5.0)


@cute.jit
def poke(address: cutlass.Int64, stream: cuda.CUstream):
    """Writes 5.0 to 32 floats at an address passed as a number."""
    _poke_kernel(address).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@cute.kernel
def _overrun_kernel(a: cute.Tensor, past: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    i = thread + past * 4096
    if i >= 0:
        a[i] = cutlass.Float32(1.0)


@cute.jit
def overrun(a: cute.Tensor, past: cutlass.Int32, stream: cuda.CUstream):
    """Writes 1.0 to the first 32 elements, or past the end when `past` is 1."""
    _overrun_kernel(a, past).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@cute.kernel
def _stuck_kernel(a: cute.Tensor):
    smem = SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(barrier, 0)
    a[thread] = cutlass.Float32(1.0)


@cute.jit
def stuck(a: cute.Tensor, stream: cuda.CUstream):
    """Waits for an mbarrier that nobody completes."""
    _stuck_kernel(a).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@cute.kernel
def _chain_kernel(values: cute.Tensor, total: cute.Tensor, turn: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 0:
        seen = cutlass.Int32(-1)
        while seen != block:
            seen = cute.arch.load(turn.iterator, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()
    if thread < 64:
        total[thread] = total[thread] * cutlass.Float32(0.5) + values[block, thread]
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.red(
            turn.iterator, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu"
        )


@cute.jit
def chain(values: cute.Tensor, total: cute.Tensor, turn: cute.Tensor, stream: cuda.CUstream):
    """CTA i does total = total / 2 + values[i] when the semaphore `turn` says i."""
    _chain_kernel(values, total, turn).launch(
        grid=[cute.size(values, mode=[0]), 1, 1], block=[96, 1, 1], stream=stream
    )


def chain_signature():
    """Compile arguments of `chain`."""
    return (
        matrix(cutlass.Float32),
        make_fake_compact_tensor(cutlass.Float32, (64,)),
        make_fake_compact_tensor(cutlass.Int32, (1,)),
        stream(),
    )


@cute.kernel
def _unordered_sum_kernel(values: cute.Tensor, total: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.red(
        total.iterator + thread,
        values[block, thread],
        op="add",
        dtype="f32",
        sem="relaxed",
        scope="gpu",
    )


@cute.jit
def unordered_sum(values: cute.Tensor, total: cute.Tensor, stream: cuda.CUstream):
    """Every CTA adds its row of 64 to `total`, in the order in which CTAs arrive."""
    _unordered_sum_kernel(values, total).launch(
        grid=[cute.size(values, mode=[0]), 1, 1], block=[64, 1, 1], stream=stream
    )


class Reverse:
    """b = a reversed, 64 elements, through shared memory; without the barrier if so asked."""

    def __init__(self, barrier=True):
        self.barrier = barrier

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, stream: cuda.CUstream):
        self.kernel(a, b).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        buffer = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64), 16)
        buffer[thread] = a[thread]
        if cutlass.const_expr(self.barrier):
            cute.arch.sync_threads()
        b[thread] = buffer[63 - thread]
