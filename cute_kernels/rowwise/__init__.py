"""Ops that a model needs and torch computes by row count, by thread count or by atomics."""
