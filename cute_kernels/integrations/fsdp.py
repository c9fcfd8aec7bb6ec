"""FSDP2 (``fully_shard``): log-probabilities, a training worker, publication.

    fully_shard(model)                                 # and any of its layers, and the head
    logps = token_logps(model, input_ids)              # token_logps.py
    LogpTrainer(model, optimizer, reference, kl_weight=0.1).step(batch)
    publish_weights(path, model)

The model and the head are called as modules: FSDP2's own hooks gather the head before its forward
and again before its backward, and reshard it after both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed.fsdp import FSDPModule

from ..errors import ArgumentTypeError, expected
from . import exporting, logp_trainer
from .manifest import Manifest

#: What a manifest calls the layout: parameters, gradients and optimizer states are all cut.
STAGE = 3


class LogpTrainer(logp_trainer.Trainer):
    """Steps of a ``fully_shard``ed model on a policy gradient with KL; `step` is the parent's."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reference: torch.nn.Module | None = None,
        **options: object,
    ):
        """Arguments of the parent; ``optimizer`` was made of the sharded model's parameters.

        Raises:
            ArgumentTypeError: ``fully_shard`` was not applied to ``model``.
        """
        _check(model)
        super().__init__(model, reference, **options)
        self.optimizer = optimizer

    def update(self, loss: torch.Tensor) -> None:
        """Run the backward and the optimizer's step, and drop the gradients."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def publish(self, path: str | os.PathLike, metadata: Mapping[str, object] | None = None):
        """`publish_weights` of this model, with the contract id of the op that scores."""
        return publish_weights(path, self.model, metadata, contract_ids=self.contract_ids())


def publish_weights(
    path: str | os.PathLike,
    model: torch.nn.Module,
    metadata: Mapping[str, object] | None = None,
    **options: object,
) -> Manifest:
    """Publish a sharded model's weights; every rank calls it, and rank 0 writes.

    Parameters are gathered one at a time, and kept by rank 0 alone, in the CPU's memory.  The
    manifest calls the layout stage 3, which is what FSDP2 does.

    Args, Returns, Raises: as ``deepspeed.publish_weights``, with a model for the engine.
    """
    _check(model)
    options["metadata"] = metadata
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward without a backward leaves the outermost one whole.
            module.reshard()
    return exporting.published_by_rank_0(path, model, _copied, STAGE, **options)


def _copied(parameter: torch.Tensor, keep: bool) -> torch.Tensor | None:
    t = parameter.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return t.to("cpu", copy=True) if keep else None


def _check(model: object) -> None:
    if not isinstance(model, FSDPModule):
        want = "a module that fully_shard was applied to"
        raise ArgumentTypeError(expected("model", want, type(model).__name__))
