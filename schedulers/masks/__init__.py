"""Block masks: rules, bits, and the lists that kernels read."""
