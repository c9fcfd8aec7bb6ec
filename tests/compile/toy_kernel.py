"""The smallest real kernel: out[i] = scale * a[i] + b[i], one thread per element."""

import cutlass
import cutlass.cute as cute

from cute_kernels.compile.kernel import Kernel

ARCH = "sm_90a"


class ScaledAdd:
    def __init__(self, scale: int, threads: int):
        self.scale = scale
        self.threads = threads

    @cute.kernel
    def kernel(self, gA, gB, gOut):
        tx, _, _ = cute.arch.thread_idx()
        bx, _, _ = cute.arch.block_idx()
        i = bx * self.threads + tx
        if i < cute.size(gOut):
            gOut[i] = gA[i] * self.scale + gB[i]

    @cute.jit
    def __call__(self, gA, gB, gOut, stream):
        blocks = cute.ceil_div(cute.size(gOut), self.threads)
        self.kernel(gA, gB, gOut).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )


def compile_now(scale: int, threads: int, options: str = ""):
    n = cute.sym_int()
    tensors = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(3)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        ScaledAdd(scale, threads),
        *tensors,
        stream,
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}",
    )


def kernel(scale: int, threads: int = 128, options: str = "") -> Kernel:
    """``options`` are for what the compile also dumps; they are not part of the key."""
    return Kernel(
        "toy",
        (("scale", scale), ("threads", threads)),
        lambda: compile_now(scale, threads, options),
    )
