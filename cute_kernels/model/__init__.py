"""Whole models: tools that take an ``nn.Module`` and look at or change all of it."""
