"""Tests of perf/core."""
