"""Mutants of what ranks exchange and of the parts that they have: each must change a byte."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import Shard

from cute_kernels.gemm import op as gemm_op
from cute_kernels.model.parallel import dtensor, exchange, shards
from cute_kernels.moe import op as moe_op
from tests.contract import same_bytes
from tests.model.parallel import cases, packed


def _all_reduced(rows: torch.Tensor, group) -> torch.Tensor:
    """The rows of a vocabulary by an all-reduce of numbers: 0 + -0.0 is 0."""
    dist.all_reduce(rows, group=group)
    return rows


def _backwards(true: Callable) -> Callable:
    return lambda t, dim, group: torch.cat(true(t, dim, group).chunk(group.size(), dim)[::-1], dim)


def _by_rank(true: Callable) -> Callable:
    """The rows of all heads rank by rank, in place of token by token."""

    def joined(part, dim, group):
        right = true(part, dim, group)
        return right if dim < 0 else true(part, 0, group).reshape(right.shape)

    return joined


def _up_before_gate(true: Callable) -> Callable:
    def boxes(*layout):
        pairs = zip(true(*layout), true(*layout)[::-1], strict=True)
        return [box._replace(first=other.first) for box, other in pairs]

    return boxes


def _own(true: Callable) -> Callable:
    """Norms' dweight from this rank's heads alone."""
    return lambda t, dim, group: t if dim >= 0 else true(t, dim, group)


#: Name -> (family that kills it, where it is, attributes, what each becomes).
RUNS = {
    "leaves reversed": (
        "llama",
        gemm_op,
        ["add_leaves"],
        lambda true: lambda parts, *rest: true(parts.flip(0), *rest),
    ),
    "rows added": ("llama", exchange, ["_select"], lambda true: _all_reduced),
    "tokens of other ranks' entries": (
        "llama",
        exchange.rowwise,
        ["embedding_gradient"],
        lambda true: lambda dy, ids, *rest: true(dy, ids.clamp(min=0), *rest),
    ),
    "parts reversed": ("llama", exchange, ["joined"], _backwards),
    "rows of ranks": ("qwen3", exchange, ["joined"], _by_rank),
    "heads apart": ("qwen3", exchange, ["joined", "part_of"], _own),
    "leaves in bf16": (
        "mixtral",
        moe_op,
        ["grouped_leaf_sums"],
        lambda true: lambda *args: true(*args).bfloat16().float(),
    ),
}
#: Rank 0 has all of gate, rank 1 all of up.
CUT = {"one matrix": (shards, "packed", lambda true: lambda dim, pieces: Shard(dim))}
#: What torch reads of a checkpoint: one block at the first offset; up before gate.
READ = {
    "as torch": (dtensor, "_boxes", lambda true: lambda tensor: []),
    "up before gate": (shards, "boxes", _up_before_gate),
}


def _changed(holder: object, names: list[str], make: Callable) -> object:
    return mock.patch.multiple(holder, **{name: make(getattr(holder, name)) for name in names})


def survivors(meshes: dict) -> list[str]:
    """Mutants that change nothing; degree 2."""
    alive = []
    for family in ("llama", "qwen3", "mixtral"):
        net, want = cases.patched(family, meshes[2]), cases.of_one(family)
        for name, (kills, *mutant) in RUNS.items():
            if kills == family:
                with _changed(*mutant):
                    if not cases.different(cases.results(net, brief=True), want):
                        alive.append(name)
        if cases.different(cases.results(net, brief=True), want):
            alive.append(f"{family} without a mutant")
    for name, (holder, attribute, make) in CUT.items():
        with _changed(holder, [attribute], make):
            net = cases.patched_anew("mixtral", meshes[2])
            if not cases.different(cases.results(net, brief=True), cases.of_one("mixtral")):
                alive.append(name)
    source, net = cases.model("mixtral"), cases.patched("mixtral", meshes[2])
    folder = cases.shared_folder()
    checkpoint.save(source.state_dict(), checkpoint_id=folder)
    for name, (holder, attribute, make) in READ.items():
        with torch.no_grad():
            net.get_parameter(packed.GATE_UP).fill_(3.0)
        with _changed(holder, [attribute], make):
            checkpoint.load(net.state_dict(), checkpoint_id=folder)
        loaded = cases.whole(net.get_parameter(packed.GATE_UP))
        if same_bytes(loaded, source.get_parameter(packed.GATE_UP)):
            alive.append(name)
    return alive
