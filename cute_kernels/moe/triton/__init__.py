"""The Triton backend of mixtures of experts."""
