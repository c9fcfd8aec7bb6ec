"""Attention of sequences at their own positions in a key buffer."""
