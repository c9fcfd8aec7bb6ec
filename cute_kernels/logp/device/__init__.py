"""What the kernels of logp share: units of an accumulator, and exact sums of them."""
