"""Modules that ranks need, imported by the server that forks them: once for all ranks."""

from __future__ import annotations

import importlib

from tests.model.parallel import rank

NAMES = [
    "cute_kernels.integrations.expert_parallel",
    "cute_kernels.integrations.grouped_tensor_parallel",
    "cute_kernels.model.parallel.shard",
    "transformers.generation",
    *(f"cute_kernels.{n}.cpu" for n in ("gemm", "logp", "moe", "norm", "rowwise", "sparse_attn")),
    *(f"transformers.models.{name}.modeling_{name}" for name in rank.DEGREES),
]
for _name in NAMES:
    importlib.import_module(_name)
