"""Text that ships with the package: its own source and its licence, as bytes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

PAD = 0  # the one byte that no text has
VOCAB = 256

_BLOCK = 1024
_HELD_EVERY = 16
_PACKAGES = ("cute_kernels", "cute_kernels.schedulers")


def corpus() -> bytes:
    """Every Python file of the package in name order, then the licence if the install has it."""
    files = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations if spec else ():
            for path in Path(folder).rglob("*.py"):
                files[path.resolve()] = (package, path.relative_to(folder).as_posix())
    texts = [path.read_bytes() for path in sorted(files, key=files.__getitem__)]
    return b"\n".join([*texts, _licence()]).replace(bytes([PAD]), b"")


def split(text: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts text into blocks of 1024 bytes: (training, held out), every 16th block held out."""
    blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
    unseen = [block for i, block in enumerate(blocks) if i % _HELD_EVERY == _HELD_EVERY - 1]
    seen = [block for i, block in enumerate(blocks) if i % _HELD_EVERY != _HELD_EVERY - 1]
    return encode(b"".join(seen)), encode(b"".join(unseen))


def encode(text: bytes) -> torch.Tensor:
    """Bytes to int64 token ids, [len(text)]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def decode(tokens: torch.Tensor) -> str:
    """Token ids to text; bytes that are not UTF-8 show as replacement characters."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def windows(tokens: torch.Tensor, count: int, length: int, generator: torch.Generator):
    """``count`` windows of ``length`` tokens at random places, [count, length]."""
    starts = torch.randint(len(tokens) - length + 1, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def _licence() -> bytes:
    try:
        text = importlib.metadata.distribution("cute-kernels").read_text("licenses/LICENSE")
    except importlib.metadata.PackageNotFoundError:
        return b""
    return (text or "").encode()
