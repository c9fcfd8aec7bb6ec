"""Whole models whose weights are cut over the ranks of a mesh, with the bytes of one rank."""
