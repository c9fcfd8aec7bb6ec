"""CuTe code that the SM90 kernels of linear attention share."""
