"""Small CuTe helpers shared by the SM90 kernels: shared-memory layouts, TMA, WGMMA, pipelines."""
