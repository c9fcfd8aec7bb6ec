"""What the SM90 kernels of linear attention share."""
