"""Whole models: audit, patch, batch_invariant (docs/model.md)."""
