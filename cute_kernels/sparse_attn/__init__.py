"""Block-sparse attention: a batch-invariant forward, and a backward in a schedule's order."""
