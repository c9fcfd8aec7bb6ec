"""One of two ranks of vime's provider, over gloo on a CPU: test_vime.py starts both."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from cute_kernels.integrations import verl, vime
from tests.contract import same_bytes
from tests.integrations.vime_cases import CASES, request_of, results_of, tensors_of, wanted
from tests.ranks import joined

WORLD = 2


def differing(got: dict, want: dict, rank: int) -> list[str]:
    """Names of results that have other bytes than the whole vocabulary's."""
    names = []
    for name, value in got.items():
        if value is None:
            continue
        whole = want[name]
        if name in ("weight", "bias"):
            rows = len(whole) // WORLD
            whole = whole[rank * rows : (rank + 1) * rows]
        if not same_bytes(value, whole):
            names.append(name)
    return names


def served(case, rank: int) -> dict:
    t = tensors_of(case)
    request = request_of(case, t, rank, WORLD, dist.group.WORLD)
    return results_of(vime.provider(request), request, t)


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    with joined(rank, store, WORLD):
        wrong = {}
        for case in CASES:
            got = served(case, rank)
            size = case.padded if case.padded == 1280 else case.real
            wrong[str(case)] = differing(got, wanted(case, "tree", size), rank)
        case, t = CASES[1], tensors_of(CASES[1])
        rows = slice(rank * 512, rank * 512 + 512)
        logp, entropy = verl.linear_cross_entropy(
            t.hidden, t.weight[rows], t.target, t.temperature, "none", dist.group.WORLD
        )
        print(
            json.dumps(
                {
                    "differing": wrong,
                    "verl": [t.tolist() for t in (logp, entropy)],
                }
            )
        )


if __name__ == "__main__":
    main()
