"""Replacements for aten's ops."""
