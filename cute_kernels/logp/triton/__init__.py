"""The portable linear_logp: Triton kernels, their launcher and their plan."""
