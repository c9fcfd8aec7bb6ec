"""Tests of perf/gemm."""
