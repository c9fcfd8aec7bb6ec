"""Runner of the Triton gemm."""

from __future__ import annotations

import cute_kernels.gemm.triton as package
from tests.triton_runner import Runner

KERNELS = ("gemm_kernel", "column_sum_kernel", "leaves_kernel", "root_kernel")
RUNNER = Runner(package, dict.fromkeys(KERNELS, ("out_ptr",)))
RUNNERS = (RUNNER,)
