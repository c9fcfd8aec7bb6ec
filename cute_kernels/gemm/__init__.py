"""Batch-invariant GEMM: ``linear`` and ``matmul``, forward and backward."""
