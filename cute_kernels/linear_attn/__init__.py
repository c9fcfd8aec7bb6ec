"""Linear attention and state spaces (docs/linear_attention.md)."""
