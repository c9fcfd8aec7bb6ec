"""The engine's side of published weights: the version that is asked for, whole, or an error.

    trainer: publish_weights(path, model) ─> version 3 ─> RPC: load version 3
    engine:  load_published(path, 3, model=...) ─> contract: weights "version 3, sha256 ..."

A version that is not the newest, or older than the one in use, is stale and refused by name.  Bytes
are verified before any of them is used.  publish.py says what a killed publisher leaves: nothing
that a reader sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ManifestError, ShapeError, expected
from ..runtime import checking
from . import publish
from .publish import Manifest, Published

#: Attribute of a model: `InUse`; None: it holds no published weights, or an update did not end.
IN_USE = "cute_kernels_weights"
#: Elements that are digested at a time.
_CHUNK = 1 << 22
#: Bytes of an element -> integers of that size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Odd factor of a chunk's digest.
_FACTOR = 1_000_003


class InUse(NamedTuple):
    """The manifest of published weights, and a digest of the model's tensors that hold them."""

    manifest: Manifest
    digest: list[int]


Update = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def load_published(
    path: str | os.PathLike,
    expected_version: int | None = None,
    *,
    model: torch.nn.Module | None = None,
    update: Update | None = None,
    contract_ids: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    allow_older: bool = False,
) -> Published:
    """Read a version of published weights, and give it to a model.

    Args:
        path: Folder of ``publish_weights``.
        expected_version: Version that the trainer said; None: the newest.
        model: What holds the weights from now on, in place; it remembers their manifest, which
            ``ck.contract`` of the engine then states.  None: they are only read.
        update: Function that takes (name, tensor) pairs in the place of ``model.load_state_dict``,
            such as ``load_weights`` of vLLM's models.
        contract_ids: Op -> contract id here; each must be that of the trainer.
        device: Where tensors are read to.
        allow_older: Whether ``expected_version`` may be older than the newest, and than the one in
            use.

    Returns:
        (tensors, manifest).

    Raises:
        ManifestError: a stale version; what `publish.read_weights` raises for one that is damaged,
            absent or of other contracts.  The model is unchanged.
        ShapeError: a tensor of the model has another shape; without ``update`` it is unchanged.
        ArgumentTypeError, ArgumentValueError: an argument is wrong.
        RuntimeError: of torch or the engine, where the tensors are not the model's.  It then holds
            weights of no version, and its contract states none, until a load ends.
    """
    for name, value in (("model", model), ("update", update)):
        if value is not None and not (isinstance(value, torch.nn.Module) or callable(value)):
            want = "a torch.nn.Module" if name == "model" else "a function"
            raise ArgumentTypeError(expected(name, want, type(value).__name__))
    number = _fresh(Path(path), expected_version, model, allow_older)
    read = publish.read_weights(path, version=number, contract_ids=contract_ids, device=device)
    tensors = read.tensors
    if model is None:
        if update is not None:
            update(tensors.items())
        return read
    if update is None:
        for name, t in model.state_dict().items():
            if name in tensors and tensors[name].shape != t.shape:
                raise ShapeError(expected(name, list(t.shape), list(tensors[name].shape)))
    setattr(model, IN_USE, None)
    if update is None:
        model.load_state_dict(tensors)
    else:
        update(tensors.items())
    setattr(model, IN_USE, InUse(read.manifest, tensors_digest(model)))
    return read


def verified_folder(
    path: str | os.PathLike, expected_version: int | None = None, *, allow_older: bool = False
) -> Path:
    """Return the folder of a version, verified, for an engine that reads files by itself.

    SGLang's ``update_weights_from_disk`` and vLLM's ``reload_weights`` take such a folder.  A
    publisher removes it with the versions that it does not ``keep``.

    Args, Raises: As `load_published`.
    """
    number = _fresh(Path(path), expected_version, None, allow_older)
    publish.read_weights(path, version=number)
    return Path(path) / publish.folder_name(number)


def manifest_in_use(model: torch.nn.Module) -> Manifest | None:
    """Return the manifest of the published weights that a model holds; None: it holds others.

    All parameters and buffers of its checkpoint are read: weights that were written in any other
    way since (``load_weights``, an update by a collective, a copy into a parameter, a level of
    sleep that drops them) are those of no version.  While vLLM's weights are asleep: None.
    """
    in_use = getattr(model, IN_USE, None)
    if in_use is None or _asleep():
        return None
    if tensors_digest(model) != in_use.digest:
        setattr(model, IN_USE, None)
        return None
    return in_use.manifest


@torch.no_grad()
def tensors_digest(model: torch.nn.Module) -> list[int]:
    """Return a number for each tensor of a model's checkpoint, which follows each of its bits.

    Integers modulo 2^64: the same on every device, in every order of their sums.
    """
    sums = []
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "to_local", lambda t=tensor: t)().detach().contiguous()
            words = tensor.reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int64))
            total = torch.zeros((), dtype=torch.int64, device=tensor.device)
            factors = torch.arange(1, 2 * min(_CHUNK, len(words)), 2, device=tensor.device)
            for chunk in words.split(_CHUNK):
                total = total * _FACTOR + (chunk.long() * factors[: len(chunk)]).sum()
            sums.append(total)
    # One copy to the host, however many tensors there are.
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []


def _asleep() -> bool:
    """Whether vLLM's weights are asleep in this process: their memory cannot be read."""
    allocators = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(allocators, "CuMemAllocator", None), "instance", None)
    allocations = getattr(allocator, "pointer_to_data", {}).values()
    return any(getattr(a, "is_asleep", False) and a.tag == "weights" for a in allocations)


def version_in_use(model: torch.nn.Module) -> int | None:
    """Return the version of published weights that a model holds; None: of none."""
    manifest = manifest_in_use(model)
    return None if manifest is None else manifest.version


def require_version(model: torch.nn.Module, version: int) -> None:
    """Check, before an engine generates, that its model holds a version.

    Raises:
        ManifestError: it holds another one, or none; the message has both.
    """
    held = version_in_use(model)
    if held != version:
        text = "none that was published" if held is None else f"version {held}"
        raise ManifestError(
            f"the engine's weights are stale: expected version {version}, got {text}"
        )


def _fresh(path: Path, number: int | None, model: object, allow_older: bool) -> int | None:
    """Return the version to read, or raise: it is stale."""
    if number is None:
        return None
    if checking.integer("expected_version", number, "a version, or None for the newest") < 0:
        raise ArgumentValueError(expected("expected_version", "at least 0", number))
    if allow_older:
        return number
    newest = max(publish.versions(path), default=number)
    if newest > number:
        raise ManifestError(f"{path}: version {number} is stale: {newest} is published")
    held = version_in_use(model)
    if held is not None and held > number:
        raise ManifestError(f"{path}: version {number} is stale: {held} is in use")
    return number
