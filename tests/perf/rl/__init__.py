"""Tests of perf/rl."""
