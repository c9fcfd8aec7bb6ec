"""Compiling kernels: fake tensors, the object cache, ahead-of-time export, certificates."""
