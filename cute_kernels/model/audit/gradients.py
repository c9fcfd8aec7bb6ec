"""Gradients of parameters, one shot against other cuts of the batch, byte by byte.

There is no loss: fixed random numbers, drawn for each token, come in where its gradient would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ..observe import rows
from . import cases, checks
from .cases import Call
from .checks import Problem

#: Seed of the numbers drawn in place of a loss's gradient.
_SEED = 20261122


def cuts(problem: Problem, transform: str) -> dict[str, list[Call]]:
    """Return label -> micro-batches of consecutive sequences, in order, of a transform."""
    every = problem.all
    if transform == "gradient_repeat":
        groups_by_label = {"one batch, again": [every]}
    else:
        groups_by_label = {f"{len(every)} of 1 sequence": [(i,) for i in every]}
        if len(every) > 2:
            half = len(every) // 2
            label = f"{half} and {len(every) - half} sequences"
            groups_by_label[label] = [every[:half], every[half:]]
    return {
        label: cases.micro_batches(problem, groups) for label, groups in groups_by_label.items()
    }


def gradients(problem: Problem, calls: Sequence[Call]) -> dict[str, torch.Tensor]:
    """Return name -> gradient on the CPU, summed by these backwards from zero."""
    with _cleared_gradients(problem.model) as sums:
        for call in calls:
            with torch.enable_grad():
                result = problem.model(call.ids, **call.options(None))
            path, out = _output(result, problem)
            torch.autograd.backward([out], [_incoming(out, path, call, problem)])
        grads = {
            name: parameter.grad
            for name, parameter in problem.model.named_parameters()
            if parameter.grad is not None
        }
        grads |= sums
        return {name: t.detach().to("cpu", copy=True) for name, t in grads.items()}


def _output(result: object, problem: Problem) -> tuple[str, torch.Tensor]:
    """Return the first floating output with a row for each token and a graph to parameters."""
    paths = problem.facts.outputs
    outputs = [(p, t) for p, t in rows.tensors(result) if t.requires_grad and p in paths]
    checks.with_a_way_back(outputs)
    return outputs[0]


def _incoming(out: torch.Tensor, path: str, call: Call, problem: Problem) -> torch.Tensor:
    """Return a gradient of ``out`` with random numbers for each token and 0 for padding."""
    gradient = torch.zeros_like(out, memory_format=torch.contiguous_format)
    view = rows.grid(gradient, problem.facts.layouts[("", 0), "out", path], call.shape)
    tokens = call.shape[1]
    for position, cell in zip(call.where.tolist(), call.cells.tolist(), strict=True):
        drawn = _drawn(cell, view.shape[2:])
        view[position // tokens, position % tokens] = drawn.to(out.device, out.dtype)
    return gradient


def _drawn(cell: int, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(_SEED + cell)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def _cleared_gradients(model: nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Clear gradients and main_grads within the block, and restore them at the end.

    Yields the main_grads by name: of parameters, or of the modules that hold one.
    """
    parameters = list(model.parameters())
    grads = [parameter.grad for parameter in parameters]
    sums = _main_grads(model)
    before = {name: t.clone() for name, t in sums.items()}
    try:
        for parameter in parameters:
            parameter.grad = None
        for t in sums.values():
            t.zero_()
        yield sums
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for name, t in sums.items():
            t.copy_(before[name])


def _main_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the main_grads by name, each once: of parameters first."""
    main_grads: dict[int, tuple[str, torch.Tensor]] = {}
    for name, owner in (*model.named_parameters(), *model.named_modules()):
        main_grad = getattr(owner, "main_grad", None)
        if isinstance(main_grad, torch.Tensor):
            main_grads.setdefault(id(main_grad), (f"{name}.main_grad", main_grad))
    return dict(main_grads.values())
