"""Golden vectors: operands and the bits a card made of them, checked by a CPU ever after.

One file `tests/golden/wgmma_<arch>.npz` holds, for every kind of operands, A and B (bf16 bits as
uint16), C and D (fp32 bits as uint32), and `about`: JSON with card, driver, versions, commit, date.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from . import truncation
from .tally import Tally

SIZE = (64, 32, 64)  # M, N, K of one kind: 28 KB


def _bits(t: torch.Tensor) -> np.ndarray:
    int_dtype = torch.int16 if t.dtype == torch.bfloat16 else torch.int32
    raw = t.cpu().contiguous().view(int_dtype).numpy()
    return raw.view(np.uint16 if int_dtype == torch.int16 else np.uint32)


def _tensor(raw: np.ndarray) -> torch.Tensor:
    if raw.dtype == np.uint16:
        return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(raw.view(np.int32).copy()).view(torch.float32)


def write(path: Path, vectors: dict[str, tuple[torch.Tensor, ...]], about: dict) -> None:
    """Write the vectors: kind -> (A, B, C, D), D as a card computed it from C."""
    arrays = {"about": np.array(json.dumps(about, sort_keys=True))}
    for kind, tensors in vectors.items():
        for name, tensor in zip("abcd", tensors, strict=True):
            arrays[f"{kind}/{name}"] = _bits(tensor)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def read(path: Path) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict]:
    """The vectors and the `about` of one file."""
    with np.load(path, allow_pickle=False) as archive:
        about = json.loads(str(archive["about"]))
        kinds = sorted({name.split("/")[0] for name in archive.files if "/" in name})
        vectors = {kind: tuple(_tensor(archive[f"{kind}/{x}"]) for x in "abcd") for kind in kinds}
    return vectors, about


def verify(path: Path) -> dict[str, Tally]:
    """The truncation model against every stored bit, by kind."""
    tallies = {}
    for kind, (a, b, c, d) in read(path)[0].items():
        tallies[kind] = Tally()
        tallies[kind].add(truncation.chain(a, b, c), d, kind)
    return tallies
