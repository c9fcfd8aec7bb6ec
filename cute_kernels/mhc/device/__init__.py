"""CuTe helpers of mhc alone."""
