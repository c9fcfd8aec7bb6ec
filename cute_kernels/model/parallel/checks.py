"""Arguments and sizes of a cut model -> what can be cut, or one exception that names one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def order(value: str) -> None:
    """Check that the order of sums is one that ranks can cut."""
    if value != "tree":
        want = "'tree' with a mesh, the only order that ranks can cut"
        raise ArgumentValueError(expected("order", want, repr(value)))


def root(models: list[torch.nn.Module]) -> torch.nn.Module:
    """The outermost model of transformers."""
    if not models:
        want = "a model of transformers (with a mesh its tensor-parallel plan is read)"
        raise ArgumentTypeError(expected("model", want, "none inside"))
    return models[0]


def plan_of(model: torch.nn.Module) -> dict[str, str]:
    """Tensor-parallel plan of a model: name of modules, numbers as ``*``, -> style."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        want = "one with a tensor-parallel plan (config.base_model_tp_plan)"
        raise ArgumentValueError(expected("model", want, f"none of {type(model).__name__}"))
    return plan


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


def mixture(family: str, known: tuple[str, ...]) -> None:
    """Check that a mixture of experts is one whose attention and router are known to be right."""
    if family not in known:
        want = f"a mixture that is cut over ranks ({', '.join(known)})"
        raise ArgumentValueError(expected("model", want, family))


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


def head_dim(known: dict[str, int], family: str) -> int:
    """Dimension of heads in the input of a norm of each head."""
    if family not in known:
        want = f"a family whose norms of heads are known ({', '.join(known)})"
        raise ArgumentValueError(expected("model", want, family))
    return known[family]


def degree(mesh: DeviceMesh, cuts: list[tuple[str, int, tuple[str, int] | None]]) -> None:
    """Check that the ranks cut every size at the edges of its leaves and heads.

    cuts: (name of the linear layer, size of the sum that is cut, (name, number) of its heads).
    """
    ranks = mesh.size()
    for name, size, heads in cuts:
        if heads is not None and heads[1] % ranks:
            want = f"a multiple of the {ranks} ranks of mesh ({_degrees(cuts)})"
            raise ShapeError(expected(f"config.{heads[0]}", want, heads[1]))
        if ranks not in tensor_parallel.cutting(size):
            length = leaves.length(size)
            want = f"a size that {ranks} ranks cut at the edges of leaves of {length}"
            raise ShapeError(expected(name, f"{want} ({_degrees(cuts)})", size))


def _degrees(cuts: list[tuple[str, int, tuple[str, int] | None]]) -> str:
    works = [
        d
        for d in tensor_parallel.DEGREES
        if all(
            d in tensor_parallel.cutting(n) and not (heads and heads[1] % d) for _, n, heads in cuts
        )
    ]
    return f"{' or '.join(map(str, works))} can cut this model"


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
    group, owner_mesh = mesh.get_group(), parameter.device_mesh
    for dim, actual in enumerate(parameter.placements):
        if owner_mesh.get_group(dim) == group and actual == placement:
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
    if not hasattr(parameter, "placements"):
        return
    group, owner_mesh = mesh.get_group(), parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if owner_mesh.get_group(dim) == group and not placement.is_replicate():
            want = "a parameter that every rank of mesh has whole (its module is not cut)"
            raise ArgumentTypeError(expected(name, want, f"a DTensor of {placement}"))


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
        values = [digests.digest(p).item() for p in model.parameters() if _is_plain(p)]
    digest = [_digest("\n".join(described)), _digest(str(values))]
    heard = process_groups.agree(digest, refusal, group, "mesh")
    wants = ("names, shapes and styles of the modules", "values of the parameters")
    for what, answers in zip(wants, zip(*heard, strict=True), strict=True):
        process_groups.alike_values(f"model: {what}", answers, "mesh")


def _is_plain(parameter: torch.Tensor) -> bool:
    return not hasattr(parameter, "placements") and parameter.device.type != "meta"


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


def described_input(ids: torch.Tensor, group: dist.ProcessGroup) -> list[int] | None:
    """Sizes of ids, and their digest where they are on the CPU; None: ranks do not compare."""
    if group.size() == 1 or "cpu" not in process_groups.devices(group):
        return None
    if ids.device.type != "cpu":
        return None if torch.cuda.is_current_stream_capturing() else [*ids.shape[:1], ids.numel()]
    return [*ids.shape[:1], ids.numel(), _digest(str(ids.reshape(-1).tolist()))]


def same_input(ids: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that all ranks look up the same ids, where that makes no rank wait for a GPU."""
    numbers = described_input(ids, group)
    if numbers is None:
        return
    for values in zip(*process_groups.agree(numbers, None, group, "mesh"), strict=True):
        process_groups.alike("input_ids", values, "mesh")


# ---- checkpoints --------------------------------------------------------------------------------


def device_of(mesh: object) -> str:
    """Type of device of a mesh, or of the first backend of a group."""
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    return process_groups.devices(process_groups.group_of(mesh, "mesh"))[0]


def not_quantized(config: object) -> None:
    """Refuse a checkpoint whose numbers are no weights before somebody scales them."""
    if getattr(config, "quantization_config", None):
        want = "a checkpoint of plain weights"
        raise ArgumentValueError(expected("folder", want, "a config with quantization_config"))


def checkpoint(folder: Path, file: Path) -> Path:
    """Check that a folder has safetensors."""
    if not file.is_file():
        want = f"a folder with {file.name}, or its index"
        raise ArgumentValueError(expected("folder", want, folder))
    return file


def saved(names: list[str], files: dict[str, object]) -> str:
    """The name under which a parameter is in the files."""
    present = [name for name in names if name in files]
    if not present:
        raise ArgumentValueError(expected("folder", f"a checkpoint with {names[0]}", "none"))
    return present[0]


#: Types of weights in safetensors; others are codes, which something has to scale.
_WEIGHTS = frozenset({"F64", "F32", "F16", "BF16"})


def weights(name: str, parameter: torch.Tensor, dtype: str) -> None:
    """Check that a file has weights for a parameter of weights, and no codes of quantized ones."""
    if parameter.is_floating_point() and dtype not in _WEIGHTS:
        want = f"weights ({', '.join(sorted(_WEIGHTS))})"
        raise ArgumentValueError(expected(f"folder: {name}", want, dtype))


def no_unused(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Check that the files have no parameter which a module of the model could have and has not."""
    absent = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is None
    }
    for name in names:
        if name in absent:
            want = "no such parameter, as the model of config.json has none"
            raise ArgumentValueError(expected(f"folder: {name}", want, "one"))
