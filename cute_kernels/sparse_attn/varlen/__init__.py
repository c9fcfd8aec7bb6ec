"""Attention of a varlen batch: sequences packed one after another."""
