"""Gradients of parameters, one shot against other cuts of the batch, byte by byte.

There is no loss: fixed random numbers, drawn for each token, come in where its gradient would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from . import checks, plans, rows
from .checks import Problem
from .plans import Call
from .probe import Facts

#: Of the numbers drawn in place of a loss's gradient.
_SEED = 20261122


def one_shot(problem: Problem) -> list[Call]:
    """All sequences in one batch."""
    return plans.micro_batches(problem, [problem.all])


def splits(problem: Problem) -> dict[str, list[Call]]:
    """Label -> micro-batches: consecutive sequences, in order."""
    every = problem.all
    made = {f"{len(every)} of 1 sequence": [(i,) for i in every]}
    if len(every) > 2:
        half = len(every) // 2
        made[f"{half} and {len(every) - half} sequences"] = [every[:half], every[half:]]
    return {label: plans.micro_batches(problem, groups) for label, groups in made.items()}


def gradients(problem: Problem, facts: Facts, calls: Sequence[Call]) -> dict[str, torch.Tensor]:
    """Name -> gradient, on the CPU: what these backwards added, from nothing."""
    with _from_nothing(problem.model) as sums:
        for call in calls:
            with torch.enable_grad():
                result = problem.model(call.ids, **call.options(None))
            path, out = _output(result, facts)
            torch.autograd.backward([out], [_incoming(out, facts, path, call, problem)])
        found = {
            name: parameter.grad
            for name, parameter in problem.model.named_parameters()
            if parameter.grad is not None
        }
        found |= sums
        return {name: t.detach().to("cpu", copy=True) for name, t in found.items()}


def backward_order(model: nn.Module, ended: Sequence[str]) -> dict[str, int]:
    """Name of a parameter or main_grad -> its place; later modules of the forward come first."""
    last = {name: place for place, name in enumerate(ended)}
    owners: dict[str, int] = {}
    for name, module in model.named_modules():
        for own in (*dict(module.named_parameters(recurse=False)), "main_grad"):
            owners[f"{name}.{own}" if name else own] = last.get(name, -1)
    return owners


def _output(result: object, facts: Facts) -> tuple[str, torch.Tensor]:
    """The model's first floating output with a row for each token and a way back."""
    found = [
        (path, t) for path, t in rows.tensors(result) if t.requires_grad and path in facts.outputs
    ]
    checks.with_a_way_back(found)
    return found[0]


def _incoming(
    out: torch.Tensor, facts: Facts, path: str, call: Call, problem: Problem
) -> torch.Tensor:
    """The gradient of ``out``: a token's numbers are its own, those of padding 0."""
    made = torch.zeros_like(out, memory_format=torch.contiguous_format)
    view = rows.grid(made, facts.layouts[("", 0), "out", path], call.shape)
    tokens = call.shape[1]
    for place, cell in zip(call.where.tolist(), call.cells.tolist(), strict=True):
        drawn = _drawn(cell, view.shape[2:])
        view[place // tokens, place % tokens] = drawn.to(out.device, out.dtype)
    return made


def _drawn(cell: int, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(_SEED + cell)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def _from_nothing(model: nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Inside, no parameter has a gradient and each main_grad is 0; afterwards all is as it was.

    Yields the main_grads by name: of parameters, or of the modules that hold one.
    """
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    sums = _main_grads(model)
    held = {name: t.clone() for name, t in sums.items()}
    try:
        for parameter in model.parameters():
            parameter.grad = None
        for t in sums.values():
            t.zero_()
        yield sums
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = before[name]
        for name, t in sums.items():
            t.copy_(held[name])


def _main_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
            found[f"{name}.main_grad"] = parameter.main_grad
    known = {id(t) for t in found.values()}
    for name, module in model.named_modules():
        own = getattr(module, "main_grad", None)
        if isinstance(own, torch.Tensor) and id(own) not in known:
            found[f"{name}.main_grad"] = own
    return found
