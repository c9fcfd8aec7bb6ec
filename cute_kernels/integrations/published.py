"""The engine's side of published weights: the version that is asked for, whole, or an error.

    trainer: publish_weights(path, model) ─> version 3 ─> RPC: load version 3
    engine:  load_published(path, 3, model=...) ─> contract: weights "version 3, sha256 ..."

A version that is not the newest, or older than the one in use, is stale and refused by name.  Bytes
are verified before any of them is used.  publish.py says what a killed publisher leaves: nothing
that a reader sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ManifestError, expected
from . import publish
from .manifest import Manifest
from .publish import Published

#: Attribute of a model: manifest of the published weights that it holds; None: of none, or of an
#: update that did not end.
IN_USE = "cute_kernels_weights"

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
    if model is None and update is None:
        return read
    if model is not None:
        setattr(model, IN_USE, None)
    if update is not None:
        update(read.tensors.items())
    else:
        model.load_state_dict(read.tensors)
    if model is not None:
        setattr(model, IN_USE, read.manifest)
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


def version_in_use(model: torch.nn.Module) -> int | None:
    """Return the version of published weights that a model holds; None: of none."""
    manifest = getattr(model, IN_USE, None)
    return manifest.version if isinstance(manifest, Manifest) else None


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
    if isinstance(number, bool) or not isinstance(number, int):
        want = "a version, or None for the newest"
        raise ArgumentTypeError(expected("expected_version", want, repr(number)))
    if number < 0:
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
