"""The portable norm: Triton kernels, their launcher and their plan."""
