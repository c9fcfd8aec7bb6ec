"""Whole models: patch one so that its rows keep their bits, and find what breaks them."""
