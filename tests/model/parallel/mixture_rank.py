"""One of four ranks of mixtures of experts that are cut over ranks, over gloo on a CPU.

A part is a function of `PARTS`; test_mixtures.py runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import cute_kernels as ck
from cute_kernels.model.parallel import clip, dtensor, load, shards
from cute_kernels.moe import op
from tests.contract import same_bytes
from tests.model.parallel import cases, packed, sharded
from tests.model.patch import families

WORLD = 4
CUT = "ck.moe.permute, column_ and row_parallel_grouped_linear, ck.moe.combine"


# ---- bytes --------------------------------------------------------------------------------------


def bytes_of_one(meshes: dict) -> dict:
    """Results that differ from one rank's, by family and degree."""
    brief = cases.differing("qwen3_moe", meshes[2], brief=True)
    return _differing(meshes, {"mixtral": (4,)}) | {"qwen3_moe 2, brief": brief}


def others(meshes: dict) -> dict:
    """Families and degrees that are not run at every commit."""
    degrees = {"mixtral": (1, 2), "qwen3_moe": (1, 2, 4), "qwen2_moe": (1, 2, 4), "olmoe": (2, 4)}
    return _differing(meshes, degrees)


def _differing(meshes: dict, degrees: dict[str, tuple[int, ...]]) -> dict:
    return {
        f"{name} {d}": cases.differing(name, meshes[d])
        for name, several in degrees.items()
        for d in several
    }


def eight_ranks(meshes: dict) -> dict:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return {name: cases.differing(name, meshes[8], **heads) for name in ("mixtral", "qwen3_moe")}


def fully_sharded(meshes: dict) -> list[str]:
    """FSDP2 over the other dimension of a 2 x 2 mesh: gradients and weights that differ."""
    return sharded.training("mixtral", meshes["2d"])


# ---- state dicts --------------------------------------------------------------------------------


def kept(meshes: dict) -> dict:
    """Whole state dicts, in and out, a second patch, a checkpoint part by part, unpatch."""
    source, net = cases.model("mixtral"), cases.model("mixtral", seed=4)
    want, ids, folder = source.state_dict(), cases.tokens(), cases.shared_folder()
    report = ck.patch(net, order="tree", mesh=meshes[2], strict=True)
    experts = net.model.layers[0].mlp.experts
    local = experts.gate_up_proj.to_local()
    net.load_state_dict(want)
    gate_up = want["model.layers.0.mlp.experts.gate_up_proj"]
    mine = [half.chunk(2, 1)[meshes[2].get_local_rank()] for half in gate_up.chunk(2, 1)]
    if dist.get_rank() == 0:
        # transformers' save_pretrained has other names, and an expert's weights apart.
        source.config.save_pretrained(folder)
        save_file({name: t.contiguous() for name, t in want.items()}, folder / "model.safetensors")
    dist.barrier()
    read = load.from_pretrained(folder, mesh=meshes[2], strict=True, dtype=torch.bfloat16)
    again = ck.patch(net, order="tree", mesh=meshes[2], strict=True)
    logits = families.logits(net, ids)
    out = {
        "report": [entry.by for entry in report.replaced if entry.part == "MixtralExperts"],
        "router": any(p.is_shard() for p in net.model.layers[0].mlp.gate.weight.placements),
        "part": same_bytes(experts.gate_up_proj.to_local(), torch.cat(mine, 1)),
        "memory": local.untyped_storage().nbytes() == local.nbytes == gate_up.nbytes // 2,
        "whole": cases.different(want, {n: cases.whole(t) for n, t in net.state_dict().items()}),
        "read": cases.different(want, {n: cases.whole(t) for n, t in read.state_dict().items()}),
        "second patch": again.complete,
        "read logits": same_bytes(families.logits(read, ids), logits),
    }
    ck.unpatch(net)
    out["unpatched"] = cases.different(want, net.state_dict())
    out["plain"] = not any(hasattr(p, "placements") for p in net.parameters())
    out["logits"] = same_bytes(families.logits(net, ids), families.logits(source, ids))
    return out


def transformers_loaded(meshes: dict) -> dict:
    return cases.loaded_by_transformers("mixtral", meshes[4], saves=False)


def packed_states(meshes: dict) -> dict:
    """Checkpoints across layouts, whole state dicts, clipping: what differs; mutants that live."""
    layouts = (None, 2, "2d")
    others = {
        function.__name__: function(meshes)
        for function in (packed.survivors, packed.into_meta, packed.other_layouts)
    }
    return packed.checkpoints(meshes, layouts) | packed.whole_states(meshes, layouts) | others


def packed_degrees(meshes: dict) -> dict:
    """The same with four ranks besides."""
    layouts = (None, 2, 4, "2d")
    return packed.checkpoints(meshes, layouts) | packed.whole_states(meshes, (4,))


# ---- mutants ------------------------------------------------------------------------------------


def rounded_leaves() -> object:
    """Partial sums in bf16, as an all-reduce exchanges them."""
    true = op.grouped_leaf_sums
    return mock.patch.object(op, "grouped_leaf_sums", lambda *a: true(*a).bfloat16().float())


@contextlib.contextmanager
def cut_as_one_matrix() -> Iterator[None]:
    """Rank 0 has all of gate, rank 1 all of up."""
    with mock.patch.object(shards, "packed", lambda dim, pieces: Shard(dim)):
        yield


MUTANTS = (rounded_leaves, cut_as_one_matrix)


def survivors(meshes: dict) -> list[str]:
    """Mutants that change nothing; degree 2."""
    found = []
    cases.of_one("mixtral")  # of the true functions
    for mutant in MUTANTS:
        with mutant():
            if not cases.differing("mixtral", meshes[2], brief=True):
                found.append(mutant.__name__)
    return found


# ---- refusals -----------------------------------------------------------------------------------


def _other_style(net: torch.nn.Module) -> None:
    net.tp_plan = net.tp_plan | {"model.layers.*.mlp.experts.gate_up_proj": "colwise"}


def _transposed(net: torch.nn.Module) -> None:
    net.model.layers[0].mlp.experts.is_transposed = True


def _of_transformers(meshes: dict) -> None:
    """Files in which each expert's weights are tensors of their own, under other names."""
    folder = cases.shared_folder()
    if dist.get_rank() == 0:
        cases.model("mixtral").save_pretrained(folder)
    dist.barrier()
    load.from_pretrained(folder, mesh=meshes[2])


def _main_grad(meshes: dict) -> None:
    """No refusal: the report names the experts, whose gradients go to ``grad``."""
    net = cases.model("mixtral").train()
    report = ck.patch(net, order="tree", mesh=meshes[2], main_grad=True)
    named = "model.layers.0.mlp.experts.gate_up_proj" in report.main_grad_left
    raise ValueError(f"named {named}")


def _another_torch(meshes: dict) -> None:
    """A release without one of the functions that are replaced; nothing is cut."""
    net = cases.model("mixtral")
    with mock.patch.object(dtensor, "install", lambda: ["DTensor.name"]):
        try:
            ck.patch(net, order="tree", mesh=meshes[2])
        finally:
            assert not any(hasattr(p, "placements") for p in net.parameters())


def _pieces_cut(call: Callable) -> Callable:
    """``fully_shard`` of the dimension whose halves are cut."""

    def refused(meshes: dict) -> None:
        net = cases.model("mixtral")
        want = net.state_dict()
        ck.patch(net, order="tree", mesh=meshes["2d"]["tp"])
        place = {net.get_parameter(packed.GATE_UP): Shard(1)}
        fully_shard(net, mesh=meshes["2d"]["dp"], shard_placement_fn=place.get)
        call(net, want)

    return refused


def _another_shape(meshes: dict) -> None:
    """A full state dict of one expert, which would be copied into all of them."""
    net = cases.model("mixtral")
    want = net.state_dict()
    want[packed.GATE_UP] = want[packed.GATE_UP][:1]
    ck.patch(net, order="tree", mesh=meshes[2])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, want, options=options)


#: What is refused -> (call, type of the error, what the message names).
REFUSED = {
    "leaves": (
        cases.patching("mixtral", intermediate_size=160),
        "ShapeError",
        ("model.layers.0.mlp.experts.gate_up_proj", "leaves of 32", "1 can cut"),
    ),
    "experts left": (
        cases.patching(
            "mixtral",
            change=lambda net: setattr(net.model.layers[0].mlp.experts, "num_experts", 2000),
        ),
        "PatchError",
        ("model.layers.0.mlp.experts", "2000 experts"),
    ),
    "another style": (
        cases.patching("mixtral", change=_other_style),
        "ArgumentValueError",
        ("tp_plan['model.layers.*.mlp.experts.gate_up_proj']", "packed_colwise", "colwise"),
    ),
    "transposed": (
        cases.patching("mixtral", change=_transposed),
        "ArgumentValueError",
        ("model.layers.0.mlp.experts", "without biases"),
    ),
    "transformers' names": (_of_transformers, "ArgumentValueError", ("folder:", "mlp.gate.weight")),
    "a release of torch": (_another_torch, "PatchError", ("torch:", "DTensor.name")),
    **{
        f"pieces cut, {name}": (
            _pieces_cut(call),
            "PatchError",
            (named, "dimension than 1"),
        )
        for name, (named, call) in {
            "saved": (packed.GATE_UP, lambda net, want: net.state_dict()),
            "loaded": (packed.GATE_UP, lambda net, want: net.load_state_dict(want)),
            "clipped": ("parameters[", lambda net, want: clip.clip_grad_norm_(net.parameters(), 1)),
            "to read": (
                "DTensor:",
                lambda net, want: net.get_parameter(packed.GATE_UP).__create_chunk_list__(),
            ),
            "to write": (
                "w:",
                lambda net, want: net.get_parameter(packed.GATE_UP).__create_write_items__("w", 0),
            ),
        }.items()
    },
    "another shape": (
        _another_shape,
        "ArgumentValueError",
        (packed.GATE_UP, "[4, 512, 128]", "[1, 512, 128]"),
    ),
    "main_grad": (_main_grad, "ValueError", ("named True",)),
}


def refused(meshes: dict) -> dict:
    """Of each case: whether its error is the one that is meant, else what came."""
    return cases.refusals(REFUSED, meshes)


PARTS = {
    function.__name__: function
    for function in (
        bytes_of_one, kept, packed_states, packed_degrees, survivors, refused, others,
        fully_sharded, transformers_loaded, eight_ranks,
    )
}  # fmt: skip
