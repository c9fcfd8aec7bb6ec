"""Tests of perf/attention."""
