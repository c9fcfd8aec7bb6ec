"""Modules that ranks need, imported by the server that forks them: once for all ranks."""

from __future__ import annotations

import importlib

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.optim
from transformers import generation  # noqa: F401

from cute_kernels.integrations import expert_parallel, grouped_tensor_parallel  # noqa: F401
from cute_kernels.model import parallel, patch  # noqa: F401
from tests.model.parallel import rank

for _family in rank.DEGREES:
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
for _system in ("gemm", "logp", "moe", "norm", "rowwise", "sparse_attn"):
    importlib.import_module(f"cute_kernels.{_system}.cpu")
