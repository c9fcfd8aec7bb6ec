"""Keep the bits of torch's own ops independent of the batch, inside a mode."""
