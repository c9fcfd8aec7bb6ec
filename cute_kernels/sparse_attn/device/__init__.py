"""CuTe helpers of the attention kernels alone."""
