"""Load a checkpoint so that no rank holds the whole model.

The model is made without memory, patched and cut; then each rank allocates its parts, and reads
them from the files: rows or columns of a tensor, as safetensors can.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentValueError, expected
from ...runtime import process_groups
from ..patch import api
from . import checks, shards

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Settings of ``generate``, such as the tokens that end a text.
_GENERATION = "generation_config.json"
#: Types of weights in safetensors; others are codes, which something has to scale.
_WEIGHTS = ("BF16", "F16", "F32", "F64")


def from_pretrained(
    folder: str | os.PathLike,
    *,
    mesh: object,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    make: Callable[[object], torch.nn.Module] | None = None,
    **options: object,
) -> torch.nn.Module:
    """Load a causal LM of transformers that is cut over a mesh, as ``ck.patch(mesh=)`` cuts it.

    Args:
        folder: What ``save_pretrained`` wrote: config.json, safetensors in one file or more, and
            generation_config.json if it is there.
        mesh: As in ``ck.patch``.
        dtype: Of the parameters; None: that of the config, or fp32.
        device: Where they are; None: that of the mesh.
        make: Makes the model from its config, as ``AutoModelForCausalLM.from_config`` does, which
            is the default.
        options: Of ``ck.patch``; ``order`` is ``"tree"``.

    Returns:
        The model, patched, in evaluation.

    Raises:
        ArgumentValueError: the folder has no such files, a parameter is in none of them, one has
            another shape, the files have one that the model has not (a bias), or its weights are
            quantized; the message names it.
        Others: as ``ck.patch``.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        want = "a checkpoint of plain weights"
        raise ArgumentValueError(expected("folder", want, "a config with quantization_config"))
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    if device is None:
        is_mesh = isinstance(mesh, DeviceMesh)
        group = process_groups.group_of(mesh, "mesh")
        device = mesh.device_type if is_mesh else process_groups.devices(group)[0]
    if make is None:
        make = functools.partial(transformers.AutoModelForCausalLM.from_config, dtype=wanted)
    files = _files(Path(folder))
    with torch.device("meta"):
        model = make(config)
    _refuse_unused(model, files)
    model.tie_weights()
    # First buffers, such as rotary tables, as a patch reads them.
    allocate = functools.partial(_allocate, device=torch.device(device))
    shards.replace_tensors([m._buffers for m in model.modules()], allocate)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers passes them over
    model.initialize_weights()  # buffers that no file has
    api.patch(model, mesh=mesh, **{"order": "tree", **options})
    shards.replace_tensors([m._parameters for m in model.modules()], allocate)
    _fill(model, files)
    if (Path(folder) / _GENERATION).is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that has it."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        names = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    file = folder / _SINGLE
    if not file.is_file():
        want = f"a folder with {_SINGLE}, or its index"
        raise ArgumentValueError(expected("folder", want, folder))
    with safe_open(file, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _refuse_unused(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Refuse files with a parameter that a module of the model could have and has not."""
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


def _allocate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer, or for this rank's part of a parameter."""
    empty = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


@torch.no_grad()
def _fill(model: torch.nn.Module, files: dict[str, Path]) -> None:
    """Read this rank's part of every parameter, and every buffer that is saved."""
    from safetensors import safe_open

    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    by_file: dict[Path, list[str]] = {}
    for tied in names.values():
        # A tied tensor is in the files under one of its names.
        name = next((name for name in tied if name in files), None)
        if name is None:
            raise ArgumentValueError(expected("folder", f"a checkpoint with {tied[0]}", "none"))
        by_file.setdefault(files[name], []).append(name)
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as opened:
            for name in wanted:
                _read(name, opened.get_slice(name), tensors[name])


def _read(name: str, source, tensor: torch.Tensor) -> None:
    """Read this rank's part of a tensor from its file."""
    checks.whole_shape(f"folder: {name}", tensor, source.get_shape())
    if tensor.is_floating_point() and source.get_dtype() not in _WEIGHTS:
        want = f"weights ({', '.join(_WEIGHTS)})"
        raise ArgumentValueError(expected(f"folder: {name}", want, source.get_dtype()))
    if not hasattr(tensor, "placements"):
        tensor.copy_(source[(slice(None),) * tensor.dim()])
        return
    for box in shards.boxes(tensor.shape, tensor.device_mesh, tensor.placements):
        box.view(tensor.to_local()).copy_(source[box.slices()])
