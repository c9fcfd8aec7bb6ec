"""Parameters that are gathered for use only: DeepSpeed's ZeRO-3 and FSDP2's ``fully_shard``.

Both leave the Parameter object where it is and change its memory: a backward that reads a parameter
has to gather it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ..errors import ArgumentTypeError, GatherError, expected
from ..runtime.data_parallel import sharded
from ..runtime.optional import require

#: DeepSpeed's names of the states of a partitioned parameter.
_WHOLE, _PARTS = "AVAILABLE", "NOT_AVAILABLE"


def partitioned(parameter: torch.Tensor | None) -> bool:
    """Whether ZeRO-3 keeps this parameter in parts."""
    return hasattr(parameter, "ds_status")


def is_sharded(parameter: torch.Tensor | None) -> bool:
    """Whether ZeRO-3 or FSDP2 gathers and releases this parameter's memory."""
    if parameter is None:
        return False
    is_shard = hasattr(parameter, "full_tensor")  # a DTensor, outside of its module's call
    return partitioned(parameter) or is_shard or sharded(parameter) is not None


@contextlib.contextmanager
def whole(parameters: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Gather these parameters for the length of a ``with`` block.

    What ZeRO-3 has in parts is gathered, by all ranks, and released at the end.  What is there
    already (tied to another layer's, kept, gathered by a caller) is neither gathered nor released;
    one that comes twice is gathered once.

    Raises:
        ArgumentTypeError: FSDP2 has it in parts: its module was not called.
        GatherError: FSDP2 has freed it; or DeepSpeed is fetching it for another module.
        MissingPackageError: deepspeed is not installed.
    """
    present = [p for p in parameters if p is not None]
    for parameter in present:
        _refuse_shards(parameter)
    states = {id(p): (p, p.ds_status.name) for p in present if partitioned(p)}
    parts = [p for p, state in states.values() if state != _WHOLE]
    if not parts:
        yield
        return
    if any(state not in (_WHOLE, _PARTS) for _, state in states.values()):
        raise GatherError(
            "a parameter of the head is being fetched for another module of the engine: score "
            "inside the engine's forward, as token_logps(engine, ...) does"
        )
    require("deepspeed", "deepspeed")
    from deepspeed import zero

    with zero.GatheredParameters(parts):
        yield


def _refuse_shards(parameter: torch.Tensor) -> None:
    if hasattr(parameter, "full_tensor"):
        want = (
            "a whole parameter (fully_shard gathers it where its module is called: score through "
            "token_logps(model, ...))"
        )
        raise ArgumentTypeError(expected("weight", want, "a DTensor"))
    if parameter.numel() and parameter.untyped_storage().size() == 0:
        raise GatherError(
            "a parameter of the head was resharded by fully_shard and not gathered again: its "
            "backward has to run in the hooks of the module that holds it"
        )
