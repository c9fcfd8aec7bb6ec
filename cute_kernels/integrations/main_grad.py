"""An optimizer that reads ``main_grad``, and the mean of main_grads over data-parallel ranks.

report = ck.patch(model, main_grad=True, strict=True)
optimizer = MainGradAdamW(model.parameters(), max_norm=1.0, lr=1e-3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from ..cpu.ieee import ieee_on
from ..errors import ArgumentTypeError, expected
from ..rowwise.api import clip_grad_norm_
from ..runtime import process_groups

__all__ = ["MainGradAdamW", "reduce_main_grads"]

#: Elements of a main_grad that ranks exchange at a time.
_BLOCK = 1 << 24


class MainGradAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of the weights, whose gradients are the weights' main_grads.

    Each weight gets a ``main_grad`` of zeros.  A ``grad``, of parameters that
    ``Report.main_grad_left`` names, is added to it.  The state dict has the copies, as ``masters``.

    Guarantees:
        The weights after a step have the same bytes for every cut of a rank's tokens into
        micro-batches at multiples of ``Report.granularity`` tokens.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        max_norm: float | None = None,
        *,
        group: object | None = None,
        **options: object,
    ):
        """Create an optimizer.

        Args:
            params: Parameters, or groups of them, as ``torch.optim.AdamW`` takes; those without
                ``requires_grad`` are passed over.
            max_norm: Of ``ck.clip_grad_norm_`` before each step; None: gradients are not clipped.
            group: Ranks with copies of the model, whose main_grads `reduce_main_grads` averages
                before each step; None: this process alone.
            options: Of ``torch.optim.AdamW``.
        """
        groups = list(params)
        if not (groups and isinstance(groups[0], Mapping)):
            groups = [{"params": groups}]
        trained = [[w for w in g["params"] if w.requires_grad] for g in groups]
        self.weights = [weight for weights in trained for weight in weights]
        self.max_norm, self.group = max_norm, group
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        copies = [[w.detach().float().clone() for w in weights] for weights in trained]
        super().__init__(
            [g | {"params": p} for g, p in zip(groups, copies, strict=True)], **options
        )

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 copies, in the order of ``weights``."""
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object | None:
        """Run a step, write the weights, and set all gradients to zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight in self.weights:
            if weight.grad is not None:
                weight.main_grad += weight.grad
        if self.group is not None:
            reduce_main_grads(self.weights, self.group)
        masters = self.masters
        for master, weight in zip(masters, self.weights, strict=True):
            master.grad = weight.main_grad
        if self.max_norm is not None:
            clip_grad_norm_(masters, self.max_norm)
        super().step()
        for master, weight in zip(masters, self.weights, strict=True):
            weight.copy_(master)
        self.zero_grad()
        return loss

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set each main_grad to zero, and each grad to None."""
        for weight in self.weights:
            weight.main_grad.zero_()
            weight.grad = None
        super().zero_grad()

    def state_dict(self) -> dict[str, object]:
        """The state of AdamW, and ``masters``."""
        return super().state_dict() | {"masters": [m.clone() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load a state of `state_dict`."""
        state = dict(state_dict)
        for master, saved in zip(self.masters, state.pop("masters"), strict=True):
            master.copy_(saved)
        super().load_state_dict(state)


@torch.no_grad()
def reduce_main_grads(weights: Iterable[torch.Tensor], group: object) -> None:
    """Replace main_grads by their mean over ranks, as DistributedDataParallel averages ``grad``.

    Forward and backward run without DDP's reduction before: inside ``ddp.no_sync()``, or without
    DDP.  fp32 sums, from rank 0 up; collectives only move bytes.

    Args:
        weights: Parameters with a ``main_grad``, the same on every rank; every rank calls it.
        group: A ProcessGroup, or one dimension of a DeviceMesh.

    Guarantees:
        ``run_to_run`` for a number of ranks, with equal bytes on all of them, for every cut of a
        rank's tokens into micro-batches that keeps its main_grad.  Another number of ranks adds
        other partial sums, and has other bytes.

    Raises:
        ArgumentTypeError: a weight without ``main_grad``.  RankError: ranks have others; all raise.
        ArgumentTypeError, ArgumentValueError: ``group``; the message names it.
    """
    group = process_groups.group_of(group, "group")
    grads = [getattr(weight, "main_grad", None) for weight in weights]
    missing = sum(grad is None for grad in grads)
    refusal = None
    if missing:
        want = "parameters with a main_grad"
        refusal = ArgumentTypeError(expected("weights", want, f"{missing} without"))
    sizes = [0 if grad is None else grad.numel() for grad in grads]
    described = [len(sizes), sum(sizes), hash(tuple(sizes)) % (1 << 62)]
    of_ranks = process_groups.agree(described, refusal, group, "group")
    columns = zip(*of_ranks, strict=True)
    for name, values in zip(("weights", "elements", "sizes"), columns, strict=True):
        process_groups.alike(name, values, "group")
    for grad in grads:
        flat = grad.reshape(-1)
        for block in flat.split(_BLOCK):
            _average(block, group)
        if flat.data_ptr() != grad.data_ptr():
            grad.copy_(flat.view(grad.shape))


def _average(block: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Average a flat tensor: each rank adds the parts of all ranks of one slice, and shares it."""
    ranks = group.size()
    size = -(-len(block) // ranks)
    sent = block.new_zeros(ranks * size)
    sent[: len(block)] = block
    parts = torch.empty_like(sent)
    sizes = [size] * ranks
    process_groups.start_all_to_all(parts, sent, sizes, sizes, group)()
    first, *others = parts.view(ranks, size)
    with ieee_on(first):
        for part in others:
            first += part
        first *= 1 / ranks
    block.copy_(process_groups.all_gather(first, group).view(-1)[: len(block)])
