"""The portable attention: Triton kernels, their launcher and their plan."""
