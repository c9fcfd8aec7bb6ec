"""The portable gemm: Triton kernels, their launcher and their plan."""
