"""Replace the modules of a whole model, in place."""
