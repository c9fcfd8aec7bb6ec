"""What the kernels of logp share: vectors of an accumulator, and exact sums of them."""
