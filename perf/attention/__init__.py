"""`python -m perf bench attention`: block-sparse attention against its rivals on the same masks."""
