"""Measurements: benchmarks against rivals, profiles, hardware probes, and the status page."""
