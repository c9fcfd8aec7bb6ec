"""Parameters that every rank of a mesh has whole, as ``DTensor`` with ``Replicate``.

A cut model then has DTensors alone, which torch's optimizers and ``clip_grad_norm_`` need: their
foreach and fused forms refuse a mixture.  A forward reads local tensors: a pre-hook puts them over
the parameters, and a hook takes them away.  Nothing is exchanged; a gradient has the same bytes on
each rank.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ...integrations.sharded_head import SCORES
from ...runtime import main_grad as destination
from ...runtime.dynamo import untraced
from ..patch.report import CUT
from . import checks, forwards, shards
from .exchange import local

#: Attribute of a module of a cut model: (dictionary of its hooks, id) of each of ours.
HOOKS = "_cute_kernels_parallel_hooks"


def wrap(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Replace plain parameters by DTensors on a mesh; memory and ties stay."""
    from torch.distributed.tensor import DTensor, Replicate

    # One op takes one mesh: that of parts which transformers has cut, if there are any.
    meshes = (p.device_mesh for p in model.parameters() if hasattr(p, "placements"))
    mesh = next((each for each in meshes if each.ndim == 1), mesh)

    def replica(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if type(parameter) is not torch.nn.Parameter:
            return parameter
        values = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        return torch.nn.Parameter(values, requires_grad=parameter.requires_grad)

    shards.replace_tensors((module._parameters for module in model.modules()), replica)


def hook(module: torch.nn.Module) -> None:
    """Let the forward of a module that is not cut read local tensors of its parameters."""
    note(module, "_forward_pre_hooks", module.register_forward_pre_hook(_show_local))
    handle = module.register_forward_hook(_show_parameters, always_call=True)
    note(module, "_forward_hooks", handle)
    note(module, "_forward_hooks_always_called", handle)
    if isinstance(module, torch.nn.Linear):
        vars(module)[SCORES] = forwards.scores


def note(module: torch.nn.Module, hooks: str, handle: RemovableHandle) -> None:
    """Note a hook of ours, which `forget` removes."""
    vars(module).setdefault(HOOKS, []).append((hooks, handle.id))


def forget(module: torch.nn.Module) -> None:
    """Remove what a cut wrote on a module, besides its parameters."""
    for hooks, key in vars(module).pop(HOOKS, ()):
        getattr(module, hooks).pop(key, None)
    vars(module).pop(CUT, None)
    vars(module).pop(SCORES, None)


@untraced
def _show_local(module: torch.nn.Module, args: tuple) -> None:
    """Put local tensors where attribute look-up comes before parameters."""
    checks.not_compiled(module)
    attributes = vars(module)
    for name, parameter in module._parameters.items():
        if not hasattr(parameter, "to_local"):
            continue
        into = getattr(parameter, "main_grad", None)
        # Here, as the op gets no Parameter.
        x = args[0] if args else parameter
        destination.check_values(x, parameter, None, into)
        attributes[name] = part = local(parameter)
        if into is not None and torch.is_grad_enabled():
            part.main_grad = local(into)


@untraced
def _show_parameters(module: torch.nn.Module, args: tuple, output: object) -> None:
    for name in module._parameters:
        vars(module).pop(name, None)
