"""Packs on a card: python -m tests.sparse_attn.gpu_packs [COUNT [DEVICE]]

``COUNT`` drawn packs (512; ``128:256``: a part of them), each against its sequences alone: out,
lse, dq, dk and dv, byte for byte; all head sizes, causal, full and windows, groups of query heads,
some lengths of thousands.  Then NaN in the neighbours, and a padded batch against a launch for each
sequence.  Prints "ok" at the end.
"""

from __future__ import annotations

import sys
import time
from unittest import mock

import numpy as np
import torch

from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn import op as attention_op
from tests.sparse_attn import pack_cases as known
from tests.sparse_attn import sequence_cases

HEADS = [(2, 1), (4, 4), (8, 2), (3, 1)]
DIMS = len(config.HEAD_DIMS)


def main(count: str = "512", device: str = "cuda") -> None:
    known.DEVICE = sequence_cases.DEVICE = device
    start = time.monotonic()
    for seed in known.share(count):
        lengths, rule, drawn = pack(seed)
        out = known.packed(drawn, lengths, *rule)
        require(f"pack {seed}: {lengths}, {rule}", out, known.alone(drawn, lengths, *rule))
    print(f"{count} packs, {time.monotonic() - start:.0f} s", flush=True)
    neighbours()
    padded()
    print("ok")


def pack(seed: int) -> tuple[list[int], tuple, list[torch.Tensor]]:
    """Every sixteenth has sequences of up to 2000 tokens."""
    g = np.random.default_rng(seed)
    lengths = known.lengths_of(seed)
    if seed % 16 == 15:
        lengths = g.integers(0, 2000, 4).tolist()
    dim, heads = config.HEAD_DIMS[seed % DIMS], HEADS[seed // DIMS % len(HEADS)]
    dtype = (torch.bfloat16, torch.float16)[seed // 5 % 2]
    rule = known.RULES[seed % len(known.RULES)]
    return lengths, rule, known.drawn(sum(lengths), seed, dtype, heads, dim)


def neighbours() -> None:
    """NaN in them shows nowhere."""
    for dim in config.HEAD_DIMS:
        tensors = known.drawn(700, dim=dim)
        inside = slice(300, 531)
        sequence_tensors = [t[:, inside] if t.dim() == 2 else t[inside] for t in tensors]
        want = known.packed(sequence_tensors, [231])
        for t in tensors[:4]:
            t[:300] = t[531:] = torch.nan
        packed_results = known.packed(tensors, [300, 231, 169])
        packed_results = [
            t[:, inside] if i == 1 else t[inside] for i, t in enumerate(packed_results)
        ]
        require(f"neighbours, D = {dim}", packed_results, want)


def padded() -> None:
    """One launch and a launch for each."""
    lengths = (sequence_cases.S, 137)
    places = (40, sequence_cases.S + 40 - 137), lengths, sequence_cases.S + 40
    out = sequence_cases.behind(*places)
    with mock.patch.object(attention_op, "is_one_launch", lambda t: False):
        want = sequence_cases.behind(*places)
    for one, other in zip(out, want, strict=True):
        require("padded", one, other)


def require(what: str, made: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    cases = known if len(made) == len(known.NAMES) else sequence_cases
    differing = cases.differing(made, want)
    assert not differing, f"{what}: {differing}"


if __name__ == "__main__":
    main(*sys.argv[1:])
