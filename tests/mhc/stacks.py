"""Stacks of hyper-connections for the tests of `recompute_streams`."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import cute_kernels as ck
from cute_kernels.mhc import op, recompute_streams
from tests.contract import same_bytes

M, C, N = 6, 16, 4
#: Bytes of the streams of M tokens in fp32.
STREAMS = 4 * M * C * N


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Sublayer(nn.Module):
    """Linear layer that remembers what it returned last."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(C, C, dtype=dtype)

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        self.f = torch.tanh(self.inner(out))
        return self.f


def stack(
    sites: int = 6, n: int = N, dtype=torch.float32, biased=(True,), **others
) -> nn.ModuleList:
    """Sites with weights far from their start; ``biased``: of each, in turn."""
    torch.manual_seed(3)
    modules = nn.ModuleList(
        ck.mhc.HyperConnection(Sublayer(dtype), C, n, bias=biased[i % len(biased)], **others)
        for i in range(sites)
    )
    with torch.no_grad():
        for weight in modules.parameters():
            weight += 0.3 * torch.randn(weight.shape, dtype=weight.dtype)
    return modules


def context(sites: int | None):
    return contextlib.nullcontext() if sites is None else recompute_streams(sites)


def streams(n: int = N, layout: str = "cn") -> torch.Tensor:
    return drawn(M, *((C, n) if layout == "cn" else (n, C))).requires_grad_()


def forward(modules, x, sites=None, between=lambda i, y: y):
    with context(sites):
        for i, module in enumerate(modules):
            x = between(i, module(x))
    return x


def cotangent(y: torch.Tensor) -> torch.Tensor:
    return drawn(*y.shape, seed=9).to(y.dtype)


def gradients(modules, y: torch.Tensor, x: torch.Tensor, **options) -> list[torch.Tensor]:
    inputs = [x, *modules.parameters()]
    return list(torch.autograd.grad(y, inputs, cotangent(y), **options))


def results(modules, x, sites=None, between=lambda i, y: y) -> list[torch.Tensor]:
    y = forward(modules, x, sites, between)
    return [y.detach(), *gradients(modules, y, x)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    assert len(one) == len(other)
    return all(same_bytes(*pair) for pair in zip(one, other, strict=True))


@contextlib.contextmanager
def recorded():
    """Count the recomputations: the number of streams that each one made, and their storages."""
    sizes: list[int] = []
    storages: list[StorageWeakRef] = []
    plain = op.recompute

    def counted(*args):
        made = plain(*args)
        sizes.append(len(made))
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in made)
        return made

    with mock.patch.object(op, "recompute", counted):
        yield sizes, storages


def kept_bytes(y: torch.Tensor) -> int:
    """Bytes of the distinct storages that the graph of y saves."""
    pending, nodes, storages = [y.grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        pending += [before for before, _ in node.next_functions]
        saved = list(getattr(node, "saved_tensors", ()))
        saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for t in saved:
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
