"""DeepSpeed, ZeRO 0 to 3: log-probabilities, policy losses, publication.

    engine, *_ = deepspeed.initialize(model=model, config=...)
    logps = token_logps(engine, input_ids)             # token_logps.py, as policy_loss
    publish_weights(path, engine)

Under stage 3 the head is called as a module, so that DeepSpeed gathers it around its forward and
its backward and releases it after each; `head_logp` gathers by itself what DeepSpeed's hooks do not
(gathering.py).  So it does in an evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ..errors import ArgumentTypeError, expected
from ..runtime.optional import require
from . import gathering, publish
from .sharded_head import Scoring, head_logp

__all__ = ["Scoring", "head_logp", "publish_weights", "zero_stage"]


def zero_stage(engine: torch.nn.Module) -> int:
    """ZeRO stage of an engine, 0 to 3, as its merged config has it (``false`` is 0).

    Raises:
        ArgumentTypeError: it is no DeepSpeed engine.
        MissingPackageError: deepspeed is not installed.
    """
    require("deepspeed", "deepspeed")
    from deepspeed import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        want = "what deepspeed.initialize returns first, a DeepSpeedEngine"
        raise ArgumentTypeError(expected("engine", want, type(engine).__name__))
    return int(engine.zero_optimization_stage())


def publish_weights(
    path: str | os.PathLike,
    engine: torch.nn.Module,
    metadata: Mapping[str, object] | None = None,
    **options: object,
) -> publish.Manifest:
    """Publish an engine's weights; every rank calls it, and rank 0 writes.

    Under stage 3 parameters are gathered one at a time, and kept by rank 0 alone, in the CPU's
    memory.

    Args:
        path, metadata: As in ``publish.publish_weights``.
        engine: A DeepSpeedEngine.
        options: ``version``, ``contract_ids`` and ``keep`` of ``publish.publish_weights``.

    Returns:
        The manifest, on every rank.

    Raises:
        On rank 0: as ``publish.publish_weights``.  ManifestError on the others, if rank 0 raises.
        ArgumentTypeError: ``engine`` is none.  MissingPackageError: deepspeed is not installed.
    """
    stage = zero_stage(engine)
    options["metadata"] = metadata
    return publish.published_by_rank_0(path, engine.module, _copied, stage, **options)


def _copied(parameter: torch.Tensor, keep: bool) -> torch.Tensor | None:
    with gathering.whole((parameter,)):
        return parameter.detach().to("cpu", copy=True) if keep else None
