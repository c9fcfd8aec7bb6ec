"""One of two ranks with a ``fully_shard``ed `HyperConnection`, over gloo on a CPU.

``python -m tests.mhc.fsdp_rank RANK STORE`` prints one JSON object; test_module.py starts both.
Both ranks have the same tokens, so that the mean of two equal gradients is one process's, exactly.
"""

from __future__ import annotations

import copy
import json
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cute_kernels.errors import ArgumentValueError
from cute_kernels.mhc import HyperConnection
from tests.contract import same_bytes
from tests.ranks import joined

WORLD, C = 2, 24


def refusal(module: nn.Module, x: torch.Tensor) -> str:
    """The error of a main_grad that FSDP2 would not reduce."""
    module.phi.main_grad = torch.zeros(24, 4 * C)
    try:
        module(x)
    except ArgumentValueError as error:
        return str(error)[: len("main_grad: expected none")]
    return "nothing"


def main(rank: int, store: str) -> None:
    torch.manual_seed(1)
    alone = HyperConnection(nn.Linear(C, C), C, bias=True, norm_weight=True)
    x, cotangent = torch.randn(2, 33, C, 4)
    module = copy.deepcopy(alone)
    with joined(rank, store, WORLD):
        fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))
        out = [one(x) for one in (alone, module)]
        for y in out:
            y.backward(cotangent)
        sharded = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        named = alone.named_parameters()
        report = {
            "outputs": "same" if same_bytes(*out) else "other",
            "gradients": [name for name, p in named if not same_bytes(p.grad, sharded[name])],
            "refused": refusal(module, x),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
