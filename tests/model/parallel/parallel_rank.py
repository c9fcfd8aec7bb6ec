"""One of four ranks of models that are cut over ranks, over gloo on a CPU.

A part is a function of `PARTS`; test_parallel.py runs them.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_kernels as ck
from cute_kernels.gemm import op as gemm_op
from cute_kernels.integrations.transformers import token_logps
from cute_kernels.model.parallel import clip, exchange, load
from tests.contract import same_bytes
from tests.model.parallel import cases, files, optimizers, sharded
from tests.model.patch import families

WORLD = 4


# ---- bytes --------------------------------------------------------------------------------------


def families_of_every_commit(meshes: dict) -> dict:
    """Results that differ from one rank's, by family and degree."""
    return {
        f"{family} {degree}": cases.differing(family, meshes[degree])
        for family, degrees in {"llama": (2, 4), "qwen3": (4,), "gemma3": (2,)}.items()
        for degree in degrees
    }


def other_families(meshes: dict) -> dict:
    names = ("qwen2", "mistral", "gemma2", "phi3", "olmo2", "gpt_neox")
    return {f"{name} {d}": cases.differing(name, meshes[d]) for name in names for d in (2, 4)}


def other_degrees(meshes: dict) -> dict:
    """Degrees of the families above that are not run at every commit."""
    left = {"llama": (1,), "qwen3": (1, 2), "gemma3": (1, 4)}
    return {f"{name} {d}": cases.differing(name, meshes[d]) for name in left for d in left[name]}


def fully_sharded(meshes: dict) -> dict:
    """FSDP2 over the other dimension: training, checkpoints, what is refused."""
    mesh = meshes["2d"]
    return {"training": sharded.training("llama", mesh), **sharded.checkpoints(mesh)}


def other_families_sharded(meshes: dict) -> dict:
    return {name: sharded.training(name, meshes["2d"]) for name in ("qwen3", "gemma3")}


def tied(meshes: dict) -> dict:
    """Embedding and head share one part."""
    net = cases.model("llama", tie_word_embeddings=True)
    ck.patch(net, order="tree", mesh=meshes[2])
    shared = net.lm_head.weight is net.model.embed_tokens.weight
    wrong = cases.differing("llama", meshes[2], tie_word_embeddings=True)
    return {"shared": shared, "differing": wrong}


def whole_vocabulary(meshes: dict) -> dict:
    """97 entries are not cut at the edges of leaves: every rank has them; the report says so."""
    net = cases.model("llama", vocab_size=97)
    report = ck.patch(net, order="tree", mesh=meshes[2], strict=True)
    reference = cases.model("llama", vocab_size=97)
    ck.patch(reference, order="tree")
    ids = families.ids(2, 9)
    results = []
    for model in (reference, net):
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        results.append({"logits": families.logits(model, ids), **cases.gradients(model)})
    return {
        "left": [part.part for part in report.left],
        "cut": any(p.is_shard() for p in net.lm_head.weight.placements),
        "differing": cases.different(*results),
    }


def settings(meshes: dict) -> dict:
    """main_grad in two micro-batches, checkpointing, static caches, log-probs: what differs."""
    ids, wrong = cases.tokens(4), {}
    for family in ("llama", "qwen3"):
        found, norms = [], []
        for mesh in (None, meshes[2]):
            net = cases.model(family).train()
            ck.patch(net, order="tree", main_grad=True, mesh=mesh)
            for p in net.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            for half in ids.split(2):
                loss = net(half, labels=half, use_cache=False, num_items_in_batch=70).loss
                loss.backward()
            assert all(p.grad is None for p in net.parameters())
            norm = ck.clip_grad_norm_ if mesh is None else clip.clip_grad_norm_
            norms.append(norm(net.parameters(), cases.MOST, main_grad=True))
            found.append({name: cases.whole(p.main_grad) for name, p in net.named_parameters()})
        wrong[f"main_grad {family}"] = cases.different(*found) + ["norm"] * (not same_bytes(*norms))
    found = []
    for mesh in (None, meshes[2]):
        net = cases.model("qwen3")
        ck.patch(net, order="tree", mesh=mesh)
        out = {"static": net.generate(
            ids[:, :7], max_new_tokens=4, do_sample=False, cache_implementation="static"
        )}  # fmt: skip
        scored = token_logps(net, ids, order="tree", temperature=0.7, return_entropy=True)
        out["log p"], out["entropy"] = (t.detach() for t in scored)
        net.train().gradient_checkpointing_enable()
        net(ids, labels=ids, use_cache=False).loss.backward()
        largest = ck.clip_grad_norm_ if mesh is None else clip.clip_grad_norm_
        out["largest"] = largest(net.parameters(), 1e-3, norm_type=float("inf"))
        found.append(out | cases.gradients(net))
    return wrong | {"others": cases.different(*found)}


def transformers_loaded(meshes: dict) -> dict:
    names = ("llama", "qwen3", "gemma3")
    return {name: cases.loaded_by_transformers(name, meshes[4]) for name in names}


def compiled(meshes: dict) -> dict:
    """torch.compile breaks its graph at what is cut: same bytes; fullgraph is refused by name."""
    ids, found = cases.tokens(), {}
    net = cases.model("qwen3").train()
    ck.patch(net, order="tree", mesh=meshes[2])
    torch.compile(net, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    found["differing"] = cases.different(cases.gradients(net), cases.of_one("qwen3"))
    torch._dynamo.reset()
    try:
        torch.compile(net, backend="eager", fullgraph=True)(ids)
    except Exception as error:
        said = "cut over ranks by ck.patch(mesh=), which a graph of torch.compile does not support"
        found["fullgraph"] = [] if said in str(error) else [str(error)]
    else:
        found["fullgraph"] = ["nothing"]
    torch._dynamo.reset()
    return found


def programs(meshes: dict) -> dict:
    """Optimizers, clipping and frozen parameters; Qwen2 has biases."""
    return {
        "1": optimizers.programs("llama", meshes[1], ["AdamW foreach"]),
        "2": optimizers.programs("qwen2", meshes[2]),
        "raised": optimizers.failing_forward(meshes[2]),
    }


def eight_ranks(meshes: dict) -> dict:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return {name: cases.differing(name, meshes[8], **heads) for name in ("llama", "qwen3")}


# ---- state dicts --------------------------------------------------------------------------------


def states(meshes: dict) -> dict:
    """Whole state dicts, in and out; copies; unpatch."""
    source, net = cases.model("llama"), cases.model("llama", seed=4)
    want, ids = source.state_dict(), cases.tokens()
    ck.patch(net, order="tree", mesh=meshes[2])
    net.load_state_dict(want)
    options = StateDictOptions(full_state_dict=True)
    loaded = cases.different(want, get_model_state_dict(net, options=options))
    parts = [p.to_local().numel() * 2 == p.numel() for p in net.parameters() if p.dim() > 1]
    logits = families.logits(net, ids)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = copy.deepcopy(net), torch.load(file, weights_only=False)
    again = ck.patch(net, order="tree", mesh=meshes[2], strict=True)
    same = [same_bytes(families.logits(each, ids), logits) for each in (*copies, net)]
    ck.unpatch(net)
    return {
        "loaded": loaded,
        "parts": all(parts),
        "copies": same,
        "second patch": again.complete,
        "unpatched": cases.different(want, net.state_dict()),
        "plain": not any(hasattr(p, "placements") for p in net.parameters()),
        "logits": same_bytes(families.logits(net, ids), families.logits(source, ids)),
    }


def _loaded(meshes: dict, family: str, **settings: object) -> dict:
    """A model that is read part by part from several files, and what differs from one rank's."""
    folder = cases.shared_folder()
    if dist.get_rank() == 0:
        source = cases.model(family, **settings)
        source.generation_config.eos_token_id = [5, 7]  # of no config but this one
        source.save_pretrained(folder, max_shard_size="200KB")
    dist.barrier()
    net = load.from_pretrained(folder, mesh=meshes[2], strict=True)
    cut = [p.to_local() for p in net.parameters() if hasattr(p, "placements")]
    ends, net.generation_config.eos_token_id = net.generation_config.eos_token_id, None
    want, actual = cases.of_one(family, **settings), cases.results(net)
    return {
        "files": len(list(folder.glob("*.safetensors"))) > 2,
        "ends": ends == [5, 7],
        "memory": all(t.untyped_storage().nbytes() == t.nbytes for t in cut) and len(cut) > 5,
        "differing": cases.different(want, actual),
    }


def loaded(meshes: dict) -> dict:
    return _loaded(meshes, "gemma3")


def others_loaded(meshes: dict) -> dict:
    """Whether other families, and weights that are tied or not, are loaded right."""
    right = {"files": True, "ends": True, "memory": True, "differing": []}
    found = {name: _loaded(meshes, name) for name in ("llama", "qwen3", "phi3", "olmo2")}
    found["tied"] = _loaded(meshes, "llama", tie_word_embeddings=True)
    return {name: each for name, each in found.items() if each != right}


# ---- mutants ------------------------------------------------------------------------------------


def reversed_leaves() -> object:
    true = gemm_op.add_leaves
    return mock.patch.object(gemm_op, "add_leaves", lambda parts, *rest: true(parts.flip(0), *rest))


def added_rows() -> object:
    """The rows of a vocabulary by an all-reduce of numbers: 0 + -0.0 is 0."""

    def select(rows, group):
        dist.all_reduce(rows, group=group)
        return rows

    return mock.patch.object(exchange, "_select", select)


def tokens_of_others() -> object:
    """Tokens of other ranks' entries add to entry 0."""
    true = exchange.rowwise.embedding_gradient

    def gradient(dy, ids, padding, vocab):
        return true(dy, ids.clamp(min=0), padding, vocab)

    return mock.patch.object(exchange.rowwise, "embedding_gradient", gradient)


def parts_reversed() -> object:
    true = exchange.joined

    def joined_backwards(part, dim, group):
        return torch.cat(true(part, dim, group).chunk(group.size(), dim)[::-1], dim)

    return mock.patch.object(exchange, "joined", joined_backwards)


def rows_of_ranks() -> object:
    """The rows of all heads rank by rank, in place of token by token."""
    true = exchange.joined

    def joined_by_rank(part, dim, group):
        whole = true(part, 0, group).reshape(true(part, dim, group).shape)
        return whole if dim >= 0 else true(part, dim, group)

    return mock.patch.object(exchange, "joined", joined_by_rank)


@contextlib.contextmanager
def heads_apart() -> Iterator[None]:
    """dweight of a norm from this rank's heads alone."""
    joined_parts, part_of = exchange.joined, exchange.part_of
    only = {
        "joined": lambda t, dim, group: t if dim >= 0 else joined_parts(t, dim, group),
        "part_of": lambda t, dim, group: t if dim >= 0 else part_of(t, dim, group),
    }
    with mock.patch.multiple(exchange, **only):
        yield


#: Mutant -> the family that kills it.
MUTANTS = {
    reversed_leaves: "llama",
    added_rows: "llama",
    tokens_of_others: "llama",
    parts_reversed: "llama",
    rows_of_ranks: "qwen3",
    heads_apart: "qwen3",
}


def survivors(meshes: dict) -> list[str]:
    """Mutants that change nothing; degree 2."""
    found = []
    for mutant, family in MUTANTS.items():
        cases.of_one(family)  # of the true functions
        with mutant():
            if not cases.differing(family, meshes[2], brief=True):
                found.append(mutant.__name__)
    return found


def _other_values(meshes: dict) -> None:
    net = cases.model("llama", seed=dist.get_rank() % 2)
    ck.patch(net, order="tree", mesh=meshes[2])


def _another_order(meshes: dict) -> None:
    """The values of every rank, two rows of which are in each other's place."""
    net = cases.model("llama")
    with torch.no_grad():
        table = net.lm_head.weight
        table[:2] = table[:2].flip(0) if dist.get_rank() % 2 else table[:2].clone()
    ck.patch(net, order="tree", mesh=meshes[2])


def _holding(attribute: str):
    """A call that patches a model, a parameter of which has this attribute."""

    def call(meshes: dict) -> None:
        net = cases.model("llama")
        weight = net.lm_head.weight
        if attribute == "hook":
            weight.register_post_accumulate_grad_hook(print)
        else:
            setattr(weight, attribute, torch.zeros_like(weight))
        ck.patch(net, order="tree", mesh=meshes[2])

    return call


def _another_size(meshes: dict) -> None:
    size = 160 if meshes[4].get_local_rank() == 1 else 256
    ck.patch(cases.model("llama", intermediate_size=size), order="tree", mesh=meshes[4])


def _another_name(meshes: dict) -> None:
    name = "qwen2" if meshes[2].get_local_rank() == 1 else "llama"
    ck.patch(cases.model(name), order="tree", mesh=meshes[2])


def _other_ids(meshes: dict) -> None:
    net = cases.model("llama")
    ck.patch(net, order="tree", mesh=meshes[2])
    net(cases.tokens(seed=meshes[2].get_local_rank()), use_cache=False)


def _without_the_mesh(meshes: dict) -> None:
    net = cases.model("llama")
    ck.patch(net, order="tree", mesh=meshes[2])
    ck.patch(net, order="tree")


def _double_backward(meshes: dict) -> None:
    net, ids = cases.model("qwen3").train(), cases.tokens()
    ck.patch(net, order="tree", mesh=meshes[2])
    weight = net.model.layers[0].self_attn.k_norm.weight
    loss = (net(ids, use_cache=False).logits.float() ** 2).sum()
    torch.autograd.grad(loss, weight, create_graph=True)


def _changed(name: str, trained: bool = True):
    """A call that writes to a parameter between a forward and its backward."""

    def call(meshes: dict) -> None:
        net, ids = cases.model("llama").train(), cases.tokens()
        ck.patch(net, order="tree", mesh=meshes[2])
        weight = net.get_parameter(f"{name}.weight").requires_grad_(trained)
        loss = net(ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            weight.mul_(1.5)
        loss.backward()

    return call


def _config(name: str, **sizes: object):
    def call(meshes: dict) -> None:
        config = getattr(transformers, name)(**sizes)
        net = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        ck.patch(net, order="tree", mesh=meshes[2])

    return call


def _partial_gradient(meshes: dict) -> None:
    weight = torch.ones(4, requires_grad=True)
    whole = DTensor.from_local(weight.detach(), meshes[2], [Replicate()]).requires_grad_()
    whole.grad = DTensor.from_local(torch.ones(4), meshes[2], [Partial()])
    clip.clip_grad_norm_([whole], 1.0)


def _plain_main_grad(meshes: dict) -> None:
    weight = DTensor.from_local(torch.ones(4), meshes[2], [Shard(0)]).requires_grad_()
    weight.main_grad = torch.ones(4)
    clip.clip_grad_norm_([weight], 1.0, main_grad=True)


def _not_of_transformers(meshes: dict) -> None:
    ck.patch(torch.nn.Linear(128, 128).bfloat16(), order="tree", mesh=meshes[2])


_TINY = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "head_dim": 64}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
_UP, _BIAS = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
#: What is refused -> (call, type of the error, what the message names).
REFUSED = {
    "chain": (cases.patching("llama", order="chain"), "ArgumentValueError", ("order:", "'tree'")),
    "no mesh": (cases.patching("llama", "tp"), "ArgumentTypeError", ("mesh:", "str")),
    "heads": (
        cases.patching("llama", 4, num_key_value_heads=2),
        "ShapeError",
        ("config.num_key_value_heads", "1 or 2 can cut"),
    ),
    "leaves": (
        cases.patching("llama", intermediate_size=160),
        "ShapeError",
        ("model.layers.0.mlp.gate_proj", "leaves of 32", "1 can cut"),
    ),
    "left": (cases.patching("llama", linear=False), "PatchError", ("q_proj", "linear=False")),
    "experts": (
        _config("MiniMaxM2Config", **_TINY, **_HEADS, num_local_experts=2),
        "ArgumentValueError",
        ("model:", "mixtral", "minimax_m2"),
    ),
    "no plan": (
        _config("GPT2Config", n_embd=128, n_layer=1, n_head=2, vocab_size=256),
        "ArgumentValueError",
        ("model:", "plan", "GPT2"),
    ),
    "no model": (_not_of_transformers, "ArgumentTypeError", ("model:", "transformers")),
    "values": (_other_values, "RankError", ("model:", "values of the parameters")),
    **{
        f"a {held}": (_holding(held), "ArgumentValueError", ("lm_head.weight:", f"without {said}"))
        for held, said in (("grad", "grad,"), ("main_grad", "main_grad,"), ("hook", "post accum"))
    },
    "an order": (_another_order, "RankError", ("model:", "values of the parameters")),
    "a size on one rank": (_another_size, ("RankError", "ShapeError"), ()),
    "models": (_another_name, "RankError", ("model:", "names, shapes and styles")),
    "ids": (_other_ids, "RankError", ("input_ids:",)),
    "without the mesh": (_without_the_mesh, "ArgumentValueError", ("mesh:", "ck.unpatch")),
    "a partial gradient": (_partial_gradient, "ArgumentTypeError", ("parameters[0]", "Partial")),
    "a plain main_grad": (_plain_main_grad, "ArgumentTypeError", ("parameters[0]", "DTensor")),
    "quantized": (
        files.checkpoint({"quantization_config": {"quant_method": "fp8"}}),
        "ArgumentValueError",
        ("folder:", "quantization_config"),
    ),
    **{
        f"codes of {dtype}": (
            files.with_tensors({_UP: lambda tensors, dtype=dtype: tensors[_UP].to(dtype)}),
            "ArgumentValueError",
            (f"folder: {_UP}", "expected weights", code),
        )
        for dtype, code in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"))
    },
    "a bias in the files": (
        files.with_tensors({_BIAS: lambda tensors: torch.ones(256)}),
        "ArgumentValueError",
        (f"folder: {_BIAS}", "no such parameter"),
    ),
    "no files": (files.without_tensors, "ArgumentValueError", ("folder:", "model.safetensors")),
    "no such parameter": (
        files.checkpoint({"num_hidden_layers": 2}),
        "ArgumentValueError",
        ("folder:", "model.layers.1."),
    ),
    "another shape": (
        files.checkpoint({"intermediate_size": 128}),
        "ArgumentValueError",
        ("folder: model.layers.0.mlp.", "[128, 128]", "[256, 128]"),
    ),
    **{
        f"{name} changed": (_changed(*of), "ArgumentValueError", ("weight:", "changed in place"))
        for name, of in {
            "a head": ("lm_head",),
            "columns": ("model.layers.0.self_attn.q_proj",),
            "rows": ("model.layers.0.mlp.down_proj",),
            "frozen rows": ("model.layers.0.mlp.down_proj", False),
        }.items()
    },
    "double backward": (_double_backward, "UnsupportedTransformError", ("create_graph",)),
}


def refused(meshes: dict) -> dict:
    """Of each case: whether its error is the one that is meant, else what came."""
    return cases.refusals(REFUSED, meshes)


PARTS = {
    function.__name__: function
    for function in (
        families_of_every_commit, tied, whole_vocabulary, states, refused, survivors,
        fully_sharded, loaded, others_loaded, other_families, other_degrees,
        other_families_sharded, settings, compiled, transformers_loaded,
        eight_ranks, programs,
    )
}  # fmt: skip
