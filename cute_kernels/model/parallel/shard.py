"""Replace whole parameters of a model by this rank's parts, as DTensors, and back.

A part is a ``DTensor`` that knows the whole shape and where it lies: state dicts,
``torch.distributed.checkpoint``, ``fully_shard`` and ``save_pretrained`` see whole tensors.
transformers' own tensor parallelism leaves the same, so a model that it loaded is taken as it is.
Parameters that are not cut become DTensors too (replicas.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...integrations import tensor_parallel
from ...integrations.sharded_head import SCORES
from ..patch import decisions
from ..patch.classes import EXPERTS_PARALLEL
from ..patch.decisions import Decisions
from ..patch.report import CUT, Kind, Left, Options
from . import checks, dtensor, forwards, replicas, shards, styles
from .styles import Layout, Site

# Here, as a cut model that was pickled imports this file alone.
dtensor.install()

#: Types of whole tensors in a state dict.
_WHOLE = (torch.Tensor, torch.nn.Parameter)
#: Module of the forwards that transformers' tensor parallelism puts into instances.
_TRANSFORMERS = "transformers.distributed.tensor_parallel"


@contextlib.contextmanager
def _described_whole(model: torch.nn.Module) -> Iterator[None]:
    """Give each DTensor parameter a plain stand-in of the whole shape, and free forwards.

    What plans a patch reads types, shapes and devices of parameters, and whether transformers'
    tensor parallelism stands before a module's own forward.
    """

    def stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if not hasattr(parameter, "placements"):
            return parameter
        empty = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        return torch.nn.Parameter(empty.expand(parameter.shape), parameter.requires_grad)

    saved = []
    for module in model.modules():
        attributes = [CUT, "forward"] if _is_cut_by_transformers(module) else [CUT]
        saved += [(vars(module), n, vars(module).pop(n)) for n in attributes if n in vars(module)]
        saved += [(module._parameters, *named) for named in module._parameters.items()]
    shards.replace_tensors((m._parameters for m in model.modules()), stand_in)
    try:
        yield
    finally:
        for place, name, value in saved:
            place[name] = value


def _is_cut_by_transformers(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return getattr(forward, "__module__", None) == _TRANSFORMERS


def decide(
    model: torch.nn.Module, mesh: object, options: Options
) -> tuple[Decisions, Callable[[], None]]:
    """Decide how a model is patched and cut over the ranks of a mesh; nothing is changed.

    Returns:
        The decisions, and a function that keeps this rank's parts of the parameters.

    Raises:
        RankError: ranks have other models, options or values.
        Others: as ``ck.patch``.
    """
    mesh = checks.mesh_of(mesh, model)
    refusal, described = None, []
    try:
        tensor_parallel.check_order(options.order)
        with _described_whole(model):
            decided = decisions.decide(model, options)
            layout = styles.layout(model, mesh, decided)
        described.append(str(options))
        for site in layout.sites:
            for path, module, name, _ in _placements(site):
                if not hasattr(module._parameters[name], "placements"):
                    checks.bare(path, module._parameters[name])
            sizes = [(tuple(p.shape), str(p.dtype)) for p in site.module.parameters(recurse=False)]
            described.append(f"{site.name} {site.kind} {site.axis} {site.cut.size} {sizes}")
    except Exception as error:
        refusal = error
    checks.same_ranks(model, described, refusal, mesh.get_group())
    kinds = {id(site.module): site.kind for site in layout.sites}
    for position, action in enumerate(decided.actions):
        kind = kinds.get(id(action.module), action.kind)
        decided.actions[position] = action._replace(kind=kind)
    if layout.whole is not None:
        reason = f"{layout.whole}: every rank has all of it"
        decided.left.append(Left("", "vocabulary", reason, False, Kind.ELSEWHERE))
    return decided, functools.partial(cut, model, layout, mesh)


def cut(model: torch.nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Keep this rank's part of each parameter of the sites, and replicas of the others.

    Nothing is changed if one is refused.

    Raises:
        ArgumentTypeError: a parameter is a DTensor that is cut in another way.
    """
    changes = [change for site in layout.sites for change in _placements(site)]
    known = {(id(module), name) for _, module, name, _ in changes}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if (id(module), name) not in known:
                checks.not_sharded(f"{path}.{name}", parameter, mesh)
    placements = {
        id(module._parameters[name]): placement
        for path, module, name, placement in changes
        if checks.uncut(path, module._parameters[name], mesh, placement)
    }

    def part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if id(parameter) not in placements:
            return parameter
        values = shards.from_whole(parameter.detach(), mesh, (placements[id(parameter)],))
        return torch.nn.Parameter(values, requires_grad=parameter.requires_grad)

    shards.replace_tensors((site.module._parameters for site in layout.sites), part)
    replicas.wrap(model, mesh)
    _hook_whole(model, layout)
    for site in layout.sites:
        if _is_cut_by_transformers(site.module):
            del site.module.forward
        replicas.forget(site.module)
        vars(site.module)[CUT] = site.cut
        _load_parts(site.module)
        if site.kind == EXPERTS_PARALLEL:
            handle = site.module.register_state_dict_pre_hook(_check)
            replicas.note(site.module, "_state_dict_pre_hooks", handle)
        if site.kind == "head_parallel":
            vars(site.module)[SCORES] = forwards.scores


def _hook_whole(model: torch.nn.Module, layout: Layout) -> None:
    """Hook the modules with parameters that are not cut, for forwards and for state dicts."""
    sites = {id(site.module) for site in layout.sites}
    for module in model.modules():
        parameters = module._parameters.values()
        if id(module) not in sites and any(hasattr(p, "placements") for p in parameters):
            replicas.forget(module)
            replicas.hook(module)
            _load_parts(module)


def _load_parts(module: torch.nn.Module) -> None:
    """Hook a module, so that it takes its parts of whole tensors in a state dict."""
    handle = module.register_load_state_dict_pre_hook(_take_parts)
    replicas.note(module, "_load_state_dict_pre_hooks", handle)


def restore(model: torch.nn.Module) -> None:
    """Give a model that was cut whole parameters again: every rank of the mesh gathers them.

    Raises:
        PatchError: fully_shard has cut a parameter further.
    """
    modules = [(name, m) for name, m in model.named_modules() if replicas.HOOKS in vars(m)]
    for path, module in modules:
        for name, parameter in module._parameters.items():
            checks.whole(f"{path}.{name}", parameter)

    def whole(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if not hasattr(parameter, "placements"):
            return parameter
        return torch.nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)

    shards.replace_tensors((module._parameters for _, module in modules), whole)
    for _, module in modules:
        replicas.forget(module)


def _check(module: torch.nn.Module, prefix: str, *_: object) -> None:
    """Check the layouts of parameters that enter or leave a state dict."""
    for name, parameter in module._parameters.items():
        checks.packed_alone(prefix + name, getattr(parameter, "placements", ()))


def _take_parts(module: torch.nn.Module, state: dict, prefix: str, *rest: object) -> None:
    """Replace whole tensors of a state dict by this rank's parts, before they are loaded."""
    from torch.distributed.tensor import distribute_tensor

    _check(module, prefix)
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if not hasattr(parameter, "placements") or type(value) not in _WHOLE:
            continue
        if value.shape == parameter.shape:  # else load_state_dict names both shapes
            layout = parameter.device_mesh, parameter.placements
            value = value.detach()
            if not parameter.is_meta:  # else its values are lost where assign=True wants them
                value = value.to(parameter.device)
            if shards.packed_axis(parameter.placements) is not None:
                state[prefix + name] = shards.from_whole(value, *layout)
            else:
                state[prefix + name] = distribute_tensor(value, *layout, src_data_rank=None)


def _placements(site: Site) -> list[tuple[str, torch.nn.Module, str, object]]:
    """(Path, module, name of the parameter, placement) of each parameter that is cut."""
    from torch.distributed.tensor import Shard

    if site.kind == EXPERTS_PARALLEL:
        checks.carries_packed(dtensor.install())
        # Parts of gate and of up follow each other, as in transformers' own tensor parallelism.
        placements = {"gate_up_proj": shards.packed(1, 2), "down_proj": Shard(2)}
        return [(f"{site.name}.{n}", site.module, n, p) for n, p in placements.items()]
    if site.axis is None:
        return []
    placements = {"weight": Shard(site.axis)} | ({"bias": Shard(0)} if site.cuts_bias else {})
    return [
        (f"{site.name}.{name}", site.module, name, placement)
        for name, placement in placements.items()
        if site.module._parameters.get(name) is not None
    ]
