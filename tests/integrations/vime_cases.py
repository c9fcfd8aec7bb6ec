"""Requests in the duck type of vime's provider boundary, and what ranks make of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.integrations import verl, vime
from tests.contract import same_bytes

TOKENS, WIDTH = 37, 96


class Case(NamedTuple):
    """A head: entries of the vocabulary, rows with padding, dtype."""

    real: int
    padded: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False


#: Two ranks begin at leaves of the real size; of the padded one alone (144 and 160 entries).
CASES = (
    Case(1000, 1024),
    Case(1024, 1024, torch.float32, bias=True),
    Case(1100, 1280),
    Case(1100, 1280, torch.float32, bias=True),
)


class Tensors(NamedTuple):
    """Operands of a whole vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    temperature: torch.Tensor
    d_logp: torch.Tensor
    d_entropy: torch.Tensor


def tensors_of(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(case.real)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    weight = (randn(case.padded, WIDTH) * 0.3).to(case.dtype)
    weight[case.real :] = 50.0  # padding that would win, if it counted
    target = torch.randint(0, case.real, (TOKENS,), generator=generator)
    return Tensors(
        hidden=randn(TOKENS, WIDTH).to(case.dtype).requires_grad_(),
        weight=weight.requires_grad_(),
        bias=randn(case.padded).to(case.dtype).requires_grad_() if case.bias else None,
        target=target,
        temperature=torch.rand(TOKENS, generator=generator) + 0.5,
        d_logp=randn(TOKENS),
        d_entropy=randn(TOKENS),
    )


def request_of(case: Case, t: Tensors, rank: int = 0, ranks: int = 1, group=None, **changed):
    """vime's request of one rank, with structural objects of no class of vime."""
    rows = case.padded // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    weight = t.weight.detach()[mine].requires_grad_()
    bias = None if t.bias is None else t.bias.detach()[mine].requires_grad_()
    context = SimpleNamespace(
        hidden=t.hidden.detach().requires_grad_(),
        projection=SimpleNamespace(weight=weight, bias=bias),
        vocab_partition=SimpleNamespace(
            local_start=mine.start, local_size=rows, real_size=case.real, padded_size=case.padded
        ),
    )
    fields = {
        "logits": torch.empty(TOKENS, rows),
        "target_ids": t.target,
        "tensor_parallel_group": group,
        "token_layout": SimpleNamespace(world_size=1, rank=0, layout="single"),
        "with_entropy": True,
        "with_entropy_grad": True,
        "chunk_size": 64,
        "log_prob_keep_mask": None,
        "context": context,
        "temperature": t.temperature,
        "metadata": {},
    }
    return SimpleNamespace(**fields | changed)


def results_of(result, request, t: Tensors) -> dict[str, torch.Tensor | None]:
    """Log p, entropy and gradients of a served request."""
    loss = (result.logp[:, 0] * t.d_logp).sum()
    if result.entropy is not None and result.entropy.requires_grad:
        loss = loss + (result.entropy * t.d_entropy).sum()
    loss.backward()
    head = request.context.projection
    return {
        "logp": result.logp[:, 0].detach(),
        "entropy": result.entropy.detach(),
        "hidden": request.context.hidden.grad,
        "weight": head.weight.grad,
        "bias": None if head.bias is None else head.bias.grad,
    }


def wanted(case: Case, order: str, size: int | None = None) -> dict[str, torch.Tensor | None]:
    """``ck.linear_logp`` of the whole vocabulary on one rank; size: that leaves are cut by."""
    t = tensors_of(case)
    bias = t.bias
    if size == case.padded != case.real:
        whole = torch.zeros(case.padded, dtype=case.dtype) if bias is None else bias
        bias = whole.masked_fill(torch.arange(case.padded) >= case.real, -torch.inf)
    logp, entropy = ck.linear_logp(
        t.hidden, t.weight, t.target, bias, temperature=t.temperature, return_entropy=True,
        order=order, vocab_size=size or case.real,
    )  # fmt: skip
    ((logp * t.d_logp).sum() + (entropy * t.d_entropy).sum()).backward()
    return {
        "logp": logp.detach(),
        "entropy": entropy.detach(),
        "hidden": t.hidden.grad,
        "weight": t.weight.grad,
        "bias": None if t.bias is None else t.bias.grad,
    }


def differing(got: dict, want: dict, rank: int = 0, ranks: int = 1) -> list[str]:
    """Names of results that have other bytes than a rank's part of the whole vocabulary's."""
    cut = ((name, want[name]) for name in ("weight", "bias") if want[name] is not None)
    parts = {name: t.chunk(ranks)[rank] for name, t in cut}
    return [n for n, t in got.items() if t is not None and not same_bytes(t, (want | parts)[n])]


def served(case: Case, provider=vime.provider, rank: int = 0, ranks: int = 1, group=None) -> dict:
    t = tensors_of(case)
    request = request_of(case, t, rank, ranks, group)
    return results_of(provider(request), request, t)


def serve_two_ranks() -> None:
    """vime's provider and verl's function on one of two ranks over gloo."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for case in CASES:
        size = case.padded if case.padded == 1280 else case.real
        got = served(case, rank=rank, ranks=2, group=group)
        wrong = differing(got, wanted(case, "tree", size), rank, 2)
        assert not wrong, (case, wrong)
    t = tensors_of(CASES[1])
    operands = t.weight[rank * 512 : rank * 512 + 512], t.target, t.temperature, "none", group
    got = verl.linear_cross_entropy(t.hidden, *operands)
    options = {"temperature": t.temperature, "order": "tree", "return_entropy": True}
    want = ck.linear_logp(t.hidden, t.weight, t.target, **options)
    assert all(same_bytes(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))
