"""Tests of perf/digest."""
