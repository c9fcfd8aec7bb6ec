"""Manifest of published weights: contents, publisher, and digests that reveal damage.

One JSON object.  The publisher's own metadata lie beside the resolved fields, which win: what a
caller believes of the layout never replaces what the publisher saw.  ``sha256`` is that of all the
other fields, so that a manifest that was changed or cut says so itself.  Digests find damage, not
forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from ..errors import ArgumentTypeError, ManifestError, expected

NAME = "manifest.json"
FORMAT = 1
#: Bytes of the largest manifest: it lists names and shapes.
LIMIT = 1 << 28

_DIGEST = "sha256"


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
            raise ManifestError(f"{NAME} is cut short or no JSON: {error}") from None
        if not isinstance(body, dict):
            raise ManifestError(f"{NAME} holds no JSON object")
        if _DIGEST not in body:
            raise ManifestError(f"{NAME} lacks the field {_DIGEST!r}")
        stored_digest = body.pop(_DIGEST)
        if stored_digest != _digest(body):
            raise ManifestError(f"{NAME} was changed after it was written: its digest differs")
        if body.get("format") != FORMAT:
            raise ManifestError(f"{NAME} has format {body.get('format')}, this reads {FORMAT}")
        names = _resolved()
        if lacking := sorted(names - body.keys()):
            raise ManifestError(f"{NAME} lacks the field {lacking[0]!r}")
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
