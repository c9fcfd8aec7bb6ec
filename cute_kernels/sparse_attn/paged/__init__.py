"""Attention over paged caches, and of one query a sequence, with the dense forward's bits."""
