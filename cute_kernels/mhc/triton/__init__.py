"""The portable mhc: Triton kernels, their launcher and their plan."""
