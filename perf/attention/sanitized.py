"""The small cases of attention for compute-sanitizer: every mask form, tails, both orders."""

from __future__ import annotations

import torch

from cute_kernels.sparse_attn import config

from .soak_cases import Case

LENGTH = 200  # two blocks and a tail each way


def cases() -> list[Case]:
    """All masks with the order, causal without; MHA and GQA in turn."""
    found = []
    for dim in config.SM90_HEAD_DIMS:
        for at, mask in enumerate(("full", "causal", "random")):
            sizes = {"heads": 2, "kv_heads": 1 + at % 2, "s": LENGTH, "batch": 1}
            found.append(Case(mask, dim, **sizes))
        found.append(Case("causal", dim, ordered=False, **sizes))
    return found


def run(device: str) -> None:
    """Each case twice; the ordered ones must repeat their bytes."""
    for case in cases():
        call = case.started(device)
        first, second = call(), call()
        if case.ordered:
            for one, two in zip(first, second, strict=True):
                same = torch.equal(one.view(torch.uint8), two.view(torch.uint8))
                assert same, f"{case.label}: the second call gave other bytes"
