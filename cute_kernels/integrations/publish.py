"""Weights on disk for a rollout engine: whole, verified, with versions that only rise.

    path/v00000003/model.safetensors
    path/v00000003/manifest.json

A version is written into a folder beside the others, ``.writing-*``, flushed to the disk and
renamed once: a reader finds all of it or nothing, whatever kills the writer.  The next writer
removes what a killed one left.  A version is never changed afterwards.

The manifest is one JSON object.  The publisher's own metadata lie beside the resolved fields, which
win.  ``sha256`` is that of all the other fields, so that a manifest that was changed or cut says so
itself.  Digests find damage, not forgery.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CuteKernelsError,
    ManifestError,
    ShapeError,
    expected,
)
from ..runtime.optional import require

WEIGHTS, MANIFEST = "model.safetensors", "manifest.json"
KIND, FORMAT = "safetensors", 1
#: Bytes of the largest manifest: it lists names and shapes.
LIMIT = 1 << 28

_DIGEST = "sha256"

_VERSION = re.compile(r"v(\d{8,})")
_UNFINISHED = ".writing-"
_LOCK = ".lock"


@dataclass(frozen=True)
class Manifest:
    """Description of published weights.

    Attributes:
        kind: How the tensors are stored: ``"safetensors"``.
        version: Publications of one folder count upwards.
        zero_stage: The stage under which they were trained: 0 to 3.
        world_size, rank: How many ranks there were, and which of them wrote.
        tensor_count: Names, tied ones included.
        contract_ids: Op -> ``ck.contract_id`` where they were made.
        files: File -> its ``size`` and ``sha256``.
        tensors: Name -> ``dtype`` and ``shape``, of those that are stored.
        tied: Name -> the stored name that is the same tensor.
        metadata: The caller's fields, but for those with a name of the above.
    """

    kind: str
    version: int
    zero_stage: int
    world_size: int
    rank: int
    tensor_count: int
    contract_ids: Mapping[str, str]
    files: Mapping[str, Mapping[str, object]]
    tensors: Mapping[str, Mapping[str, object]]
    tied: Mapping[str, str]
    metadata: Mapping[str, object] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of the file."""
        resolved = {name: value for name, value in asdict(self).items() if name != "metadata"}
        body = check_metadata(self.metadata) | resolved | {"format": FORMAT}
        return json.dumps(body | {_DIGEST: _digest(body)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Parse the manifest from the text of a file.

        Raises:
            ManifestError: it is cut short, was changed, lacks a field, or is of another format.
        """
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"{MANIFEST} is cut short or no JSON: {error}") from None
        if not isinstance(body, dict):
            raise ManifestError(f"{MANIFEST} holds no JSON object")
        if _DIGEST not in body:
            raise ManifestError(f"{MANIFEST} lacks the field {_DIGEST!r}")
        stored_digest = body.pop(_DIGEST)
        if stored_digest != _digest(body):
            raise ManifestError(f"{MANIFEST} was changed after it was written: its digest differs")
        if body.get("format") != FORMAT:
            raise ManifestError(f"{MANIFEST} has format {body.get('format')}, this reads {FORMAT}")
        names = _resolved()
        if lacking := sorted(names - body.keys()):
            raise ManifestError(f"{MANIFEST} lacks the field {lacking[0]!r}")
        metadata = {k: v for k, v in body.items() if k not in names | {"format"}}
        return cls(**{name: body[name] for name in names}, metadata=metadata)


def check_metadata(metadata: Mapping[str, object] | None) -> dict[str, object]:
    """Return the caller's metadata as JSON reads it back, without the manifest's own fields.

    Raises:
        ArgumentTypeError: it is no mapping of strings to what JSON can say.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ArgumentTypeError(expected("metadata", "a mapping", type(metadata).__name__))
    if strange := [key for key in metadata if not isinstance(key, str)]:
        raise ArgumentTypeError(expected("metadata", "strings as keys", repr(strange[0])))
    try:
        copy = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(expected("metadata", "what JSON can say", error)) from None
    reserved = _resolved() | {"format", "metadata", _DIGEST}
    return {name: value for name, value in copy.items() if name not in reserved}


def _resolved() -> set[str]:
    """Fields that the publisher fills in."""
    return {f.name for f in fields(Manifest)} - {"metadata"}


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Layout:
    """How a trainer holds what it publishes, and which rank writes."""

    zero_stage: int = 0
    world_size: int = 1
    rank: int = 0


class Published(NamedTuple):
    """Published weights as read: name -> tensor, tied names too, and the manifest."""

    tensors: dict[str, torch.Tensor]
    manifest: Manifest


def publish_weights(
    path: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor] | torch.nn.Module,
    metadata: Mapping[str, object] | None = None,
    *,
    version: int | None = None,
    contract_ids: Mapping[str, str] | None = None,
    layout: Layout = Layout(),
    keep: int = 2,
) -> Manifest:
    """Write the next version of ``path``, in this process alone.

    A trainer that several ranks make up calls ``deepspeed.publish_weights`` or
    ``fsdp.publish_weights``, which gather the tensors and end here.

    Args:
        path: A folder; it is made.  All its versions are by one publisher at a time (a file lock).
        tensors: Name -> whole tensor on any device, or a module (its ``state_dict``).  Names of one
            tensor (tied weights) are stored once.
        metadata: More fields for the manifest, such as ``{"step": 20}``.  A field that the manifest
            has by itself keeps its own value.
        version: Above every version of ``path``; None: the next.
        contract_ids: Op -> ``ck.contract_id`` of the ops that the weights were trained through.
        layout: Where they come from.
        keep: Versions that stay, this one included; older ones are removed.  0: all stay.

    Returns:
        The manifest, once the version is on the disk and visible.

    Raises:
        ManifestError: ``version`` is not above those there are.
        ArgumentTypeError, ArgumentValueError, ShapeError: something that is no whole tensor;
            metadata that JSON cannot say; ``version`` or ``keep`` is negative.
        MissingPackageError: safetensors is not installed.
    """
    require("deepspeed", "safetensors")
    for name, number in (("version", version), ("keep", keep)):
        if number is not None and (type(number) is not int or number < 0):
            raise ArgumentValueError(expected(name, "an integer of at least 0", repr(number)))
    weights, tied = _stored(tensors)
    metadata = check_metadata(metadata)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        latest = max(versions(folder), default=-1)
        number = latest + 1 if version is None else version
        if number <= latest:
            raise ManifestError(
                f"{folder}: version {number} does not rise above {latest}, which is published"
            )
        with _unfinished(folder) as staging:
            _write_weights(staging / WEIGHTS, weights)
            manifest = Manifest(
                kind=KIND,
                version=number,
                **vars(layout),
                tensor_count=len(weights) + len(tied),
                contract_ids=dict(contract_ids or {}),
                files={WEIGHTS: _facts(staging / WEIGHTS)},
                tensors={name: _form(t) for name, t in weights.items()},
                tied=tied,
                metadata=metadata,
            )
            (staging / MANIFEST).write_text(manifest.text(), encoding="utf-8")
            _flush(staging / MANIFEST)
            _flush(staging)
            os.rename(staging, folder / folder_name(number))
        _flush(folder)
        if keep:
            for old in sorted(versions(folder))[:-keep]:
                _remove(folder, old)
    return manifest


def published_by_rank_0(
    path: str | os.PathLike,
    module: torch.nn.Module,
    copied: Callable[[torch.Tensor, bool], torch.Tensor | None],
    zero_stage: int,
    **options: object,
) -> Manifest:
    """Run `publish_weights` on rank 0; every rank returns its manifest, or raises.

    Args:
        path: As there; rank 0's counts.
        module: Its parameters and persistent buffers are published, one at a time.
        copied: ``copied(parameter, keep)``, a collective: the whole parameter in the CPU's memory
            if ``keep``, else None.
        zero_stage: For the manifest.
        options: More of `publish_weights`.

    Raises:
        On rank 0: as `publish_weights`.  ManifestError elsewhere, with the same message.
    """
    joined = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    # This comes first: FSDP2 reshards what a forward left whole when it is asked for names.
    names = list(module.state_dict())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parameters |= dict(module.named_buffers(remove_duplicate=False))
    copies, tensors = {}, {}
    for name in names:
        if name not in parameters:
            continue
        # A tied parameter is gathered once, and kept once, so that it is seen to be one.
        if id(parameters[name]) not in copies:
            copies[id(parameters[name])] = copied(parameters[name], rank == 0)
        tensors[name] = copies[id(parameters[name])]
    manifest, refusal = None, None
    if rank == 0:
        layout = Layout(zero_stage, world, rank)
        try:
            manifest = publish_weights(path, tensors, layout=layout, **options)
        except (CuteKernelsError, OSError) as error:
            refusal = error
    if world > 1:
        outcome = [manifest, None if refusal is None else str(refusal)]
        dist.broadcast_object_list(outcome, src=0)
        if rank and outcome[1] is not None:
            raise ManifestError(f"rank 0 did not publish: {outcome[1]}")
        manifest = outcome[0]
    if refusal is not None:
        raise refusal
    return manifest


def versions(path: str | os.PathLike) -> list[int]:
    """Return the versions that ``path`` holds, ascending; none if there is no such folder."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))


def read_weights(
    path: str | os.PathLike,
    *,
    version: int | None = None,
    contract_ids: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
) -> Published:
    """Read a published version, verified before any of it is used.

    Args:
        path: The folder that `publish_weights` was given.
        version: The one that must be read; None: the latest.
        contract_ids: Op -> ``ck.contract_id`` here: each must be that of the trainer.
        device: Where tensors go.

    Returns:
        (tensors, manifest), the bytes that were published.

    Raises:
        ManifestError: nothing is published, or not that version; a file is missing, cut short or
            has other bytes; the manifest was changed, is that of another version, or lists other
            tensors; a contract id is another.  The message says which.
        MissingPackageError: safetensors is not installed.
    """
    require("deepspeed", "safetensors")
    folder = Path(path)
    while True:
        available = versions(folder)
        if not available:
            raise ManifestError(f"{folder}: no weights are published there")
        number = available[-1] if version is None else version
        if number not in available:
            listed = ", ".join(map(str, available))
            raise ManifestError(f"{folder}: version {number} is not there; there are: {listed}")
        try:
            return _read(folder / folder_name(number), number, dict(contract_ids or {}), device)
        except (ManifestError, FileNotFoundError):
            # The publisher may have removed an old version meanwhile.
            if number in versions(folder):
                raise


def _read(folder: Path, number: int, ids: dict[str, str], device) -> Published:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = _read_manifest(folder, number)
    if manifest.kind != KIND or set(manifest.files) != {WEIGHTS}:
        content = f"{manifest.kind}: {', '.join(sorted(manifest.files))}"
        raise ManifestError(f"{folder}: expected {KIND}: {WEIGHTS}, the manifest says {content}")
    _verify_file(folder / WEIGHTS, manifest.files[WEIGHTS])
    for op, local_id in ids.items():
        trained_id = manifest.contract_ids.get(op)
        if trained_id != local_id:
            raise ManifestError(
                f"{folder}: {op} has the contract {local_id} here "
                f"and {trained_id} where it was trained"
            )
    try:
        tensors = load_file(folder / WEIGHTS, device=str(device))
    except SafetensorError as error:
        raise ManifestError(f"{folder / WEIGHTS} is no safetensors file: {error}") from None
    _verify_tensors(folder, tensors, manifest)
    return Published(
        tensors | {name: tensors[source] for name, source in manifest.tied.items()}, manifest
    )


def _read_manifest(folder: Path, number: int) -> Manifest:
    path = folder / MANIFEST
    try:
        content = path.read_bytes() if path.stat().st_size <= LIMIT else b""
    except FileNotFoundError:
        raise ManifestError(f"{folder}: {MANIFEST} is missing") from None
    try:
        manifest = Manifest.parse(content.decode("utf-8", "replace"))
    except ManifestError as error:
        raise ManifestError(f"{folder}: {error}") from None
    if manifest.version != number:
        raise ManifestError(f"{path} is stale: it is that of version {manifest.version}")
    return manifest


def _verify_file(path: Path, facts: Mapping[str, object]) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing") from None
    if size != facts["size"]:
        damage = "cut short" if size < facts["size"] else "too long"
        raise ManifestError(f"{path} is {damage}: {size} bytes of {facts['size']}")
    if _facts(path) != facts:
        raise ManifestError(f"{path} has other bytes than were published: its sha256 differs")


def _verify_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Check that the file holds what the manifest lists: both may be whole, but differ."""
    listed = manifest.tensors
    if absent := sorted(listed.keys() - tensors.keys()):
        raise ManifestError(f"{folder}: tensor {absent[0]} is listed and missing")
    if unlisted := sorted(tensors.keys() - listed.keys()):
        raise ManifestError(f"{folder}: tensor {unlisted[0]} is there and not listed")
    for name, t in tensors.items():
        if _form(t) != listed[name]:
            raise ManifestError(f"{folder}: tensor {name} is {_form(t)}, listed as {listed[name]}")
    if dangling := sorted(name for name, source in manifest.tied.items() if source not in tensors):
        raise ManifestError(f"{folder}: tensor {dangling[0]} is tied to one that is missing")
    if manifest.tensor_count != (count := len(tensors) + len(manifest.tied)):
        raise ManifestError(
            f"{folder}: {manifest.tensor_count} tensors are listed, {count} are there"
        )


def _stored(tensors) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return name -> tensor to write, and name -> the name of the same tensor."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    if not isinstance(tensors, Mapping):
        want = "a mapping of names to tensors, or a module"
        raise ArgumentTypeError(expected("tensors", want, type(tensors).__name__))
    weights, tied, names_by_key = {}, {}, {}
    for name, t in tensors.items():
        if not isinstance(name, str) or not isinstance(t, torch.Tensor):
            entry = f"{name!r}: {type(t).__name__}"
            raise ArgumentTypeError(expected("tensors", "names and tensors", entry))
        _refuse_parts(name, t)
        t = t.detach()
        key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
        if t.numel() and key in names_by_key:
            tied[name] = names_by_key[key]
            continue
        names_by_key[key] = name
        weights[name] = t
    return weights, tied


def _refuse_parts(name: str, t: torch.Tensor) -> None:
    """Refuse a shard, which would be published as if it were the whole."""
    if hasattr(t, "ds_numel") and t.numel() != t.ds_numel:
        want = "a whole tensor (deepspeed.publish_weights gathers them)"
        raise ShapeError(expected(f"tensors[{name!r}]", want, "a partition of ZeRO-3"))
    if hasattr(t, "full_tensor"):
        want = "a whole tensor (fsdp.publish_weights gathers them)"
        raise ArgumentTypeError(expected(f"tensors[{name!r}]", want, type(t).__name__))
    if t.device.type == "meta" or t.layout is not torch.strided:
        want = "a dense tensor with memory"
        raise ArgumentTypeError(expected(f"tensors[{name!r}]", want, f"{t.layout} on {t.device}"))


def _write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # Copies: views of one flat buffer, as ZeRO keeps them, are not what safetensors takes.
    copies = {name: t.to("cpu", copy=True).contiguous() for name, t in weights.items()}
    save_file(copies, path, metadata={"format": "pt"})  # transformers requires it
    _flush(path)


def _flush(path: Path) -> None:
    """Flush a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _facts(path: Path) -> dict[str, object]:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def _form(t: torch.Tensor) -> dict[str, object]:
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}


def folder_name(number: int) -> str:
    """Return the name of a version's folder."""
    return f"v{number:08d}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system drops it when its holder dies."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to the versions, removed unless it was renamed."""
    staging = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove(folder: Path, number: int) -> None:
    """Remove a version, renamed first: no reader finds half of a version."""
    gone = folder / f"{_UNFINISHED}{folder_name(number)}"
    os.rename(folder / folder_name(number), gone)
    shutil.rmtree(gone)
