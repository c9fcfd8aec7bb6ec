"""The small cases of attention for compute-sanitizer: every mask form, tails, both orders."""

from __future__ import annotations

import torch

from cute_kernels.sparse_attn import config

from .soak_cases import Case

LENGTH = 200  # two blocks and a tail each way


def cases() -> list[Case]:
    """All masks with the order, causal without; MHA and GQA in turn."""
    out = []
    for dim in config.HEAD_DIMS:
        for index, mask in enumerate(("full", "causal", "random")):
            sizes = {"heads": 2, "kv_heads": 1 + index % 2, "s": LENGTH, "batch": 1}
            out.append(Case(mask, dim, **sizes))
        out.append(Case("causal", dim, ordered=False, **sizes))
    return out


def run(device: str) -> None:
    """Run each case twice; the ordered ones must repeat their bytes."""
    for case in cases():
        call = case.started(device)
        first, second = call(), call()
        if case.ordered:
            for expected, actual in zip(first, second, strict=True):
                equal = torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
                assert equal, f"{case.label}: the second call gave other bytes"
