"""Tests of perf/probes."""
