"""Arguments and sizes of a cut model -> what can be cut, or one exception that names one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    PatchError,
    ShapeError,
    UnsupportedTransformError,
    expected,
)
from ...integrations import tensor_parallel
from ...integrations.experts import gates_by_default as gates
from ...rowwise import checks as rowwise_checks
from ...runtime import digests, process_groups
from ...runtime import main_grad as destination
from ...schedulers.tiles import leaves
from ..patch.forwards import mixers


def mesh_of(value: object, model: torch.nn.Module) -> DeviceMesh:
    """The mesh of ``ck.patch(mesh=)``: one dimension, of 1, 2, 4 or 8 ranks."""
    group = tensor_parallel.group_of_mesh(value)
    kinds = {p.device.type for p in model.parameters() if p.device.type != "meta"}
    able = process_groups.devices(group)
    if group.size() > 1 and not kinds <= set(able):
        want = f"parameters on a device that mesh can exchange from ({', '.join(able)})"
        raise DeviceError(expected("model", want, ", ".join(sorted(kinds))))
    if isinstance(value, DeviceMesh):
        return value
    return DeviceMesh.from_group(value, next(iter(kinds), able[0]))


def planned(models: list[torch.nn.Module]) -> tuple[torch.nn.Module, dict[str, str]]:
    """The outermost model of transformers, and its tensor-parallel plan.

    The plan: name of modules, numbers as ``*``, -> style.
    """
    if not models:
        want = "a model of transformers (with a mesh its tensor-parallel plan is read)"
        raise ArgumentTypeError(expected("model", want, "none inside"))
    root = models[0]
    plan = dict(getattr(root, "tp_plan", None) or {})
    if not plan:
        want = "one with a tensor-parallel plan (config.base_model_tp_plan)"
        raise ArgumentValueError(expected("model", want, f"none of {type(root).__name__}"))
    if mixing := mixers.mixers_in(root):
        want = "one without gated delta nets, which are not cut over ranks"
        raise ArgumentValueError(expected("model", want, type(mixing[0]).__name__))
    return root, plan


def styles(plan: dict[str, str], carried: Iterable[str]) -> None:
    """Check that each style of a plan is one that is carried."""
    for name, style in plan.items():
        if style not in carried:
            want = f"one of the styles {', '.join(sorted(carried))}"
            raise ArgumentValueError(expected(f"tp_plan[{name!r}]", want, repr(style)))


def replaced(name: str, action, reason: str | None, style: str):
    """The replacement of a module that the plan names."""
    kinds = ("rms_norm",) if style.startswith("replicated") else ("linear", "head")
    kinds = ("experts",) if "experts" in style else kinds
    if action is None or action.kind not in kinds:
        kind = reason or (action and action.kind) or "another module"
        raise PatchError(expected(name, f"a module that ck.patch replaces, cut as {style}", kind))
    return action


def family(model: torch.nn.Module, known: Iterable[str], kind: str) -> str:
    """``model_type`` of a model, which must be a known one."""
    name = model.config.get_text_config().model_type
    if name not in known:
        raise ArgumentValueError(expected("model", f"{kind} ({', '.join(known)})", name))
    return name


def expert_parameters(wanted: dict[str, str], plan: dict[str, str]) -> None:
    """Check that a plan cuts the parameters of experts as ours are cut."""
    for name, style in wanted.items():
        if plan.get(name) != style:
            want = f"{style!r}, as its experts are cut over ranks"
            raise ArgumentValueError(expected(f"tp_plan[{name!r}]", want, repr(plan.get(name))))


def expert_width(name: str, module: torch.nn.Module) -> int:
    """Inner width of experts, which are cut along it: of a default gate, without biases."""
    if module.is_transposed or module.has_bias or not module.has_gate or not gates(module):
        want = "experts [E, N, K] of two halves, gate and up, without biases"
        raise ArgumentValueError(expected(name, want, type(module).__name__))
    return module.down_proj.shape[2]


def degree(mesh: DeviceMesh, cuts: list[tuple[str, int, tuple[str, int] | None]]) -> None:
    """Check that the ranks cut every size at the edges of its leaves and heads.

    cuts: (name of the linear layer, size of the sum that is cut, (name, number) of its heads).
    """
    ranks, works = mesh.size(), set(tensor_parallel.DEGREES)
    for _, size, heads in cuts:
        works &= {d for d in tensor_parallel.cutting(size) if not (heads and heads[1] % d)}
    able = f"({' or '.join(map(str, sorted(works)))} can cut this model)"
    for name, size, heads in cuts:
        if heads is not None and heads[1] % ranks:
            want = f"a multiple of the {ranks} ranks of mesh {able}"
            raise ShapeError(expected(f"config.{heads[0]}", want, heads[1]))
        if ranks not in tensor_parallel.cutting(size):
            length = leaves.length(size)
            want = f"a size that {ranks} ranks cut at the edges of leaves of {length} {able}"
            raise ShapeError(expected(name, want, size))


def why_not_vocabulary(entries: set[int], ranks: int) -> str | None:
    """Why ranks cannot cut a vocabulary; None: they can."""
    if len(entries) > 1:
        return f"the embedding and the head have different sizes {sorted(entries)}"
    (size,) = entries
    if ranks in tensor_parallel.cutting(size):
        return None
    length = leaves.length(size)
    return f"{ranks} ranks do not cut {size} entries at the edges of leaves of {length}"


def uncut(name: str, parameter: torch.Tensor, mesh: DeviceMesh, placement) -> bool:
    """Whether a parameter is whole; False: transformers has cut it in the same way."""
    if not hasattr(parameter, "placements"):
        return True
    if placement in _placements_over(parameter, mesh):
        return False
    want = f"a whole parameter, or one cut over mesh as {placement} (patch before fully_shard)"
    raise ArgumentTypeError(expected(name, want, f"a DTensor of {tuple(parameter.placements)}"))


#: Attributes of a parameter that a part of it does not have.
_HELD = ("grad", "main_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def bare(name: str, parameter: torch.Tensor) -> None:
    """Check that a parameter to cut has no gradients and hooks, which would be lost in silence."""
    for attribute in _HELD:
        value = getattr(parameter, attribute, None)
        if isinstance(value, torch.Tensor) or value:
            shown = attribute.strip("_").replace("_", " ") if attribute[0] == "_" else attribute
            want = f"a parameter without {shown}, which its part would not have (patch first)"
            raise ArgumentValueError(expected(name, want, "one with it"))


def not_sharded(name: str, parameter: torch.Tensor | None, mesh: DeviceMesh) -> None:
    """Check that a parameter which every rank needs whole is not cut over the mesh."""
    for placement in _placements_over(parameter, mesh):
        if not placement.is_replicate():
            want = "a parameter that every rank of mesh has whole (its module is not cut)"
            raise ArgumentTypeError(expected(name, want, f"a DTensor of {placement}"))


def _placements_over(parameter: torch.Tensor | None, mesh: DeviceMesh) -> list:
    """Placements of a parameter over the group of a mesh; of a plain tensor, none."""
    group = mesh.get_group()
    return [
        placement
        for dim, placement in enumerate(getattr(parameter, "placements", ()))
        if parameter.device_mesh.get_group(dim) == group
    ]


def whole(name: str, parameter: torch.Tensor) -> None:
    """Check that a parameter can be gathered over one mesh alone."""
    if hasattr(parameter, "device_mesh") and parameter.device_mesh.ndim != 1:
        want = "a parameter that one mesh dimension cuts (unpatch a model before fully_shard)"
        raise PatchError(expected(name, want, f"a DTensor of {parameter.device_mesh}"))


def carries_packed(missing: list[str]) -> None:
    """Check that torch has what is replaced for experts' gate and up, of one parameter."""
    if missing:
        want = f"a release with {', '.join(missing)}, to make parts of experts whole"
        raise PatchError(expected("torch", want, torch.__version__))


def packed_alone(name: str, placements: Sequence) -> None:
    """Check that ``fully_shard`` has not cut the pieces of a parameter that is cut by pieces.

    torch has no placement of what it makes then, and takes it for another layout.
    """
    *others, last = placements or (None,)
    dims = [getattr(placement, "dim", None) for placement in others]
    if getattr(last, "split_factor", 1) > 1 and last.dim in dims:
        want = f"another dimension than {last.dim} in fully_shard's shard_placement_fn"
        raise PatchError(expected(name, want, f"a DTensor of {tuple(placements)}"))


def whole_shape(name: str, target: torch.Tensor, shape: Sequence[int]) -> None:
    """Check that a saved tensor has the whole shape of what it is copied into."""
    if list(target.shape) != list(shape):
        want = f"a tensor of shape {list(target.shape)}"
        raise ArgumentValueError(expected(name, want, list(shape)))


def same_ranks(
    model: torch.nn.Module,
    described: list[str],
    refusal: Exception | None,
    group: dist.ProcessGroup,
) -> None:
    """Check that all ranks cut the same model in the same way, with the same values.

    Values are compared by a digest of each parameter, made where they are.  If a rank refuses its
    arguments, all of them raise.
    """
    values = []
    if refusal is None and group.size() > 1:
        # Each by itself: they may be on several devices.
        plain = (p for p in model.parameters() if not (hasattr(p, "placements") or p.is_meta))
        values = [digests.digest(p).item() for p in plain]
    digest = [_digest("\n".join(described)), _digest(str(values))]
    heard = process_groups.agree(digest, refusal, group, "mesh")
    wants = ("names, shapes and styles of the modules", "values of the parameters")
    for what, answers in zip(wants, zip(*heard, strict=True), strict=True):
        process_groups.alike_values(f"model: {what}", answers, "mesh")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def lookup(
    ids: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    padding_idx: int | None,
    main_grad: torch.Tensor | None,
) -> int:
    """Check a look-up in a table of ``size`` entries, some of which ``weight`` has.

    Returns:
        The entry without a gradient; -1: none.
    """
    whole = weight.detach()[:1].expand(size, -1)
    if ids.device.type != "cpu":
        # No rank may have an entry outside: its row would be zeros.
        torch._assert_async(((ids >= 0) & (ids < size)).all())
    if main_grad is not None:
        destination.check(main_grad, weight, ids, "ids")
    return rowwise_checks.embedding(ids, whole, padding_idx, None).padding


def heads(x: torch.Tensor, cut) -> None:
    """Check that a norm gets this rank's heads where its family has them."""
    want = cut.size // cut.mesh.size()
    if x.dim() != 4 or x.shape[cut.dim] != want:
        want = f"4 dimensions with {want} heads in dimension {cut.dim}"
        raise ShapeError(expected("hidden_states", want, list(x.shape)))


def no_partial_gradient(name: str, parameter: object) -> None:
    """Check that no gradient is a sum that ranks have yet to add: such an order is torch's.

    Nor may the gradient of a parameter that is cut be a plain tensor, a part or the whole.
    """
    for gradient in (getattr(parameter, "grad", None), getattr(parameter, "main_grad", None)):
        if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
            want = "gradients that are whole, or parts of them"
            raise ArgumentTypeError(expected(name, want, f"a DTensor of {gradient.placements}"))
        plain = gradient is not None and not hasattr(gradient, "placements")
        if plain and hasattr(parameter, "placements"):
            want = "a DTensor, as its parameter, for a gradient or main_grad"
            raise ArgumentTypeError(expected(name, want, type(gradient).__name__))


def not_compiled(module: torch.nn.Module) -> None:
    """Refuse to be part of a graph of torch.compile; outside of ``fullgraph`` it is broken here."""
    if torch.compiler.is_compiling():
        raise UnsupportedTransformError(
            f"{type(module).__name__}: cut over ranks by ck.patch(mesh=), which a graph of "
            "torch.compile does not support; compile without fullgraph=True"
        )


def not_changed(parameter: torch.Tensor, version: int) -> None:
    """Refuse a backward that would read other values of a parameter than its forward."""
    if parameter._version != version:
        want = "the values that its forward read"
        got = f"a parameter {list(parameter.shape)} that was changed in place since"
        raise ArgumentValueError(expected("weight", want, got))


def same_input(ids: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that all ranks look up the same ids, where that makes no rank wait for a GPU."""
    if group.size() == 1 or "cpu" not in process_groups.devices(group):
        return
    numbers = [*ids.shape[:1], ids.numel()]
    if ids.device.type == "cpu":
        numbers.append(_digest(str(ids.reshape(-1).tolist())))
    elif torch.cuda.is_current_stream_capturing():
        return
    for values in zip(*process_groups.agree(numbers, None, group, "mesh"), strict=True):
        process_groups.alike("input_ids", values, "mesh")
