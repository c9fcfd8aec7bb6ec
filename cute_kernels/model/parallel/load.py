"""Load a checkpoint so that no rank holds the whole model.

The model is made without memory, patched and cut; then each rank allocates its parts, and reads
them from the files: rows or columns of a tensor, as safetensors can.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..patch import api
from . import checks, shards

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Settings of ``generate``, such as the tokens that end a text.
_GENERATION = "generation_config.json"


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
    checks.not_quantized(config)
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    if device is None:
        device = checks.device_of(mesh)
    if make is None:
        make = functools.partial(transformers.AutoModelForCausalLM.from_config, dtype=wanted)
    files = _files(Path(folder))
    with torch.device("meta"):
        model = make(config)
    checks.no_unused(model, files)
    model.tie_weights()
    # First buffers, such as rotary tables, as a patch reads them.
    _materialize(model, torch.device(device), "_buffers")
    _initialize_buffers(model)
    api.patch(model, mesh=mesh, **{"order": "tree", **options})
    _materialize(model, torch.device(device), "_parameters")
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
    file = checks.checkpoint(folder, folder / _SINGLE)
    with safe_open(file, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _materialize(model: torch.nn.Module, device: torch.device, kind: str) -> None:
    """Allocate this rank's shards of parameters, or buffers; keep ties."""
    by_id: dict[int, torch.Tensor] = {}
    for module in list(model.modules()):
        tensors = getattr(module, kind)
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in by_id:
                empty = torch.empty_like(tensor.detach(), device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                by_id[id(tensor)] = empty
            tensors[name] = by_id[id(tensor)]


@torch.no_grad()
def _fill(model: torch.nn.Module, files: dict[str, Path]) -> None:
    """Read this rank's part of every parameter, and every buffer that is saved."""
    from safetensors import safe_open

    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for tied in names.values():
        # A tied tensor is in the files under one of its names.
        name = checks.saved(tied, files)
        by_file.setdefault(files[name], []).append((name, tensors[name]))
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as opened:
            for name, tensor in wanted:
                source = opened.get_slice(name)
                checks.whole_shape(f"folder: {name}", tensor, source.get_shape())
                checks.weights(name, tensor, source.get_dtype())
                _local(tensor).copy_(_read(source, tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _read(source, tensor: torch.Tensor) -> torch.Tensor:
    """Read this rank's part of a tensor from its file."""
    if not hasattr(tensor, "placements"):
        return source[(slice(None),) * tensor.dim()]
    own = shards.boxes(tensor.shape, tensor.device_mesh, tensor.placements)
    pieces = [source[box.slices()] for box in own]
    return pieces[0] if len(pieces) == 1 else shards.joined(pieces, own)


def _initialize_buffers(model: torch.nn.Module) -> None:
    """Compute buffers that no file has, as transformers does when it loads a model."""
    for tensor in model.parameters():
        tensor._is_hf_initialized = True  # transformers passes them over
    model.initialize_weights()
