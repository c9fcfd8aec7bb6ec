"""Find parameters whose gradient torch reduces over ranks, from ``parameter.grad``.

A gradient that goes to ``main_grad`` instead never reaches such a reducer.
"""

from __future__ import annotations

import sys
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

DDP = "DistributedDataParallel"
FSDP2 = "fully_shard"

#: Where torch keeps what ``fully_shard`` made of a module; imported with it, by nobody else.
FSDP2_STATES = "torch.distributed._composable_state"

_reduced: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
_sharded = WeakIdKeyDictionary()


def reducer(parameter: torch.Tensor) -> str | None:
    """``DDP`` or ``FSDP2``, if it reduces ``parameter.grad`` after the backward of this forward."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and ddp.require_backward_grad_sync:
        if ddp not in _reduced:
            _reduced[ddp] = frozenset(map(id, ddp._module_parameters))
        if id(parameter) in _reduced[ddp]:
            return DDP
    return FSDP2 if sharded(parameter) is not None else None


def sharding() -> bool:
    """Whether ``fully_shard`` has made something of any module of this process."""
    states = sys.modules.get(FSDP2_STATES)
    return states is not None and len(states._module_state_mapping) > 0


def sharded(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The sharded parameter that ``fully_shard`` gathered into ``parameter``, if it did."""
    states = sys.modules.get(FSDP2_STATES)
    if states is None or not isinstance(parameter, torch.nn.Parameter):
        return None
    if parameter not in _sharded:
        _sharded[parameter] = next(
            (
                weakref.ref(fsdp_param.sharded_param)
                for fsdp_param in _gathered(states)
                if getattr(fsdp_param, "_unsharded_param", None) is parameter
            ),
            None,
        )
    reference = _sharded[parameter]
    return None if reference is None else reference()


def compute_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype in which ``fully_shard`` gathers a sharded parameter; None: it does not shard it.

    ``MixedPrecisionPolicy(param_dtype=)``, or the parameter's own dtype.
    """
    states = sys.modules.get(FSDP2_STATES)
    for group in () if states is None else _groups(states):
        if any(fsdp_param.sharded_param is parameter for fsdp_param in group.fsdp_params):
            return group.mp_policy.param_dtype or parameter.dtype
    return None


def has_sharded_main_grad(tensor: torch.Tensor | None) -> bool:
    """Whether ``tensor`` is a parameter that ``fully_shard`` gathered from one with a main_grad."""
    return getattr(sharded(tensor), "main_grad", None) is not None


def _gathered(states):
    """FSDP2's records of the parameters of this process."""
    for group in _groups(states):
        yield from group.fsdp_params


def _groups(states):
    """FSDP2's groups of parameters that are gathered together."""
    for reference in tuple(states._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one at most
            groups = filter(None, [getattr(state, "_fsdp_param_group", None)])
        yield from groups
