"""Parameters that every rank of a mesh has whole, as ``DTensor`` with ``Replicate``.

A cut model then has DTensors alone, which torch's optimizers and ``clip_grad_norm_`` need: their
foreach and fused forms refuse a mixture.  A forward reads local tensors: a pre-hook puts them over
the parameters, and a hook takes them away.  Nothing is exchanged; a gradient has the same bytes on
each rank.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...integrations.sharded_head import SCORES
from ...runtime import main_grad as destination
from ...runtime.dynamo import untraced
from . import checks, forwards
from .exchange import local

#: Attribute of a module whose parameters are replicated: ids of its hooks.
HOOKS = "_cute_kernels_replicas"
#: Hooks of a module in the order of the ids in `HOOKS`.
_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


def wrap(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Replace plain parameters by DTensors on a mesh; memory and ties stay."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = _mesh_of_parts(model, mesh)
    replicas: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if type(parameter) is not torch.nn.Parameter:
                continue
            if id(parameter) not in replicas:
                values = DTensor.from_local(
                    parameter.detach(), mesh, [Replicate()], run_check=False
                )
                replica = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
                replicas[id(parameter)] = replica
            module._parameters[name] = replicas[id(parameter)]


def hook(module: torch.nn.Module) -> None:
    """Let the forward of a module that is not cut read local tensors of its parameters."""
    pre = module.register_forward_pre_hook(_show_local)
    post = module.register_forward_hook(_show_parameters, always_call=True)
    vars(module)[HOOKS] = pre.id, post.id
    if isinstance(module, torch.nn.Linear):
        vars(module)[SCORES] = forwards.whole_scores


def unhook(module: torch.nn.Module) -> None:
    """Remove what `hook` wrote on a module."""
    ids = vars(module).pop(HOOKS, None)
    if ids is None:
        return
    vars(module).pop(SCORES, None)
    pre, post = ids
    for registry, number in zip(_REGISTRIES, (pre, post, post), strict=True):
        getattr(module, registry).pop(number, None)


def _mesh_of_parts(model: torch.nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """Mesh of parts that transformers has cut, else ``mesh``: one op takes one mesh."""
    meshes = (p.device_mesh for p in model.parameters() if hasattr(p, "placements"))
    return next((each for each in meshes if each.ndim == 1), mesh)


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
