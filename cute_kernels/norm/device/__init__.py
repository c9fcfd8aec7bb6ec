"""CuTe helpers of norm alone."""
