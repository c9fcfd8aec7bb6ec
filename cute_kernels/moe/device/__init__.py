"""Device code of the kernels of experts."""
