"""A whole model measured: its audit, a training step, decoding; patched beside torch."""
