"""What ranks of models that are cut do, over gloo on a CPU: each part returns what is wrong.

test_parallel.py runs them.
"""

from __future__ import annotations

import copy
import io
import os

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import cute_kernels as ck
from cute_kernels.integrations.transformers import token_logps
from cute_kernels.model.parallel import load
from tests.contract import same_bytes
from tests.model.parallel import cases, mutants, optimizers, packed, refused, sharded
from tests.model.patch import families

EXPERTS = "ck.moe.permute, column_ and row_parallel_grouped_linear, ck.moe.combine"
#: Family -> degrees at every commit, and by night.
DEGREES = {
    "llama": ((1, 2, 4), ()),
    "qwen3": ((4,), (1, 2)),
    "gemma3": ((2,), (1, 4)),
    "mixtral": ((4,), (1, 2)),
    **dict.fromkeys(("qwen2", "mistral", "gemma2", "phi3", "olmo2", "gpt_neox"), ((), (2, 4))),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "olmoe"), ((), (1, 2, 4))),
}


# ---- bytes --------------------------------------------------------------------------------------


def _differing(meshes: dict, night: bool) -> list[str]:
    degrees = cases.WORLDS[dist.get_world_size()]
    rows = [(name, d) for name, both in DEGREES.items() for d in both[night] if d in degrees]
    differing = {f"{name}_{degree}": cases.differing(name, meshes[degree]) for name, degree in rows}
    return cases.failing(**differing)


def every_commit(meshes: dict) -> list[str]:
    """Results that differ from one rank's, by family and degree."""
    return _differing(meshes, False)


def other_degrees(meshes: dict) -> list[str]:
    return _differing(meshes, True)


def eight_ranks(meshes: dict) -> list[str]:
    names = ("llama", "qwen3", "mixtral", "qwen3_moe")
    differing = {n: cases.differing(n, meshes[8], **cases.EIGHT_HEADS) for n in names}
    return cases.failing(**differing)


def another_mixture(meshes: dict) -> list[str]:
    return cases.differing("qwen3_moe", meshes[2], brief=True)


def tied(meshes: dict) -> list[str]:
    """Embedding and head share one part."""
    net = cases.patched("llama", meshes[2], tie_word_embeddings=True)
    return cases.failing(
        shared=net.lm_head.weight is net.model.embed_tokens.weight,
        differing=cases.differing("llama", meshes[2], brief=True, tie_word_embeddings=True),
    )


def whole_vocabulary(meshes: dict) -> list[str]:
    """97 entries are not cut at the edges of leaves: every rank has them; the report says so."""
    net = cases.model("llama", vocab_size=97)
    report = ck.patch(net, order="tree", mesh=meshes[2], strict=True)
    ids, results = families.ids(2, 9), []
    for one in (cases.patched("llama", None, vocab_size=97), net):
        one.train()(ids, labels=ids, use_cache=False).loss.backward()
        results.append({"logits": families.logits(one, ids), **cases.gradients(one)})
    return cases.failing(
        left=[part.part for part in report.left] == ["vocabulary"],
        whole=not any(p.is_shard() for p in net.lm_head.weight.placements),
        differing=cases.different(*results),
    )


def static_cache(meshes: dict) -> list[str]:
    """Logits of generation with a static cache: those of one process."""
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    options |= {"cache_implementation": "static", "output_logits": True}
    results = []
    for mesh in (None, meshes[2]):
        out = cases.patched("llama", mesh).generate(cases.tokens()[:, :7], **options)
        results.append({"ids": out.sequences, "logits": torch.stack(out.logits)})
    return cases.different(*results)


def fully_sharded(meshes: dict) -> list[str]:
    """FSDP2 over the other dimension: training, checkpoints, what is refused."""
    mesh = meshes["2d"]
    return cases.failing(training=sharded.training("llama", mesh)) + sharded.checkpoints(mesh)


def others_sharded(meshes: dict) -> list[str]:
    names = ("qwen3", "gemma3", "mixtral")
    return cases.failing(**{name: sharded.training(name, meshes["2d"]) for name in names})


def settings(meshes: dict) -> list[str]:
    """main_grad in two micro-batches, checkpointing, static caches, log-probs."""
    ids, wrong = cases.tokens(4), {}
    for family in ("llama", "qwen3"):
        results = []
        for mesh in (None, meshes[2]):
            net = cases.patched(family, mesh, main_grad=True).train()
            for p in net.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            for half in ids.split(2):
                net(half, labels=half, use_cache=False, num_items_in_batch=70).loss.backward()
            assert all(p.grad is None for p in net.parameters())
            norm = {"norm": cases.clipped(net, main_grad=True)}
            results.append(cases.wholes({n: p.main_grad for n, p in net.named_parameters()}) | norm)
        wrong[family] = cases.different(*results)
    results, options = [], {"max_new_tokens": 4, "do_sample": False}
    for mesh in (None, meshes[2]):
        net = cases.patched("qwen3", mesh)
        out = {"static": net.generate(ids[:, :7], cache_implementation="static", **options)}
        scored = token_logps(net, ids, order="tree", temperature=0.7, return_entropy=True)
        out["log p"], out["entropy"] = (t.detach() for t in scored)
        net.train().gradient_checkpointing_enable()
        net(ids, labels=ids, use_cache=False).loss.backward()
        out["largest"] = cases.clipped(net, 1e-3, norm_type=float("inf"))
        results.append(out | cases.gradients(net))
    return cases.failing(**wrong, others=cases.different(*results))


def compiled(meshes: dict) -> list[str]:
    """torch.compile breaks its graph at what is cut: same bytes; fullgraph is refused by name."""
    ids, net = cases.tokens(), cases.patched("qwen3", meshes[2]).train()
    torch.compile(net, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    differing = cases.different(cases.gradients(net), cases.of_one("qwen3"))
    torch._dynamo.reset()
    said = "nothing"
    try:
        torch.compile(net, backend="eager", fullgraph=True)(ids)
    except Exception as error:
        said = str(error)
    torch._dynamo.reset()
    named = "cut over ranks by ck.patch(mesh=), which a graph of torch.compile does not support"
    return cases.failing(differing=differing, fullgraph=named in said)


def programs(meshes: dict) -> list[str]:
    """Optimizers, clipping and frozen parameters; Qwen2 has biases."""
    return cases.failing(
        one=optimizers.programs("llama", meshes[1], ["AdamW foreach"]),
        two=optimizers.programs("qwen2", meshes[2]),
        raised=optimizers.failing_forward(meshes[2]),
    )


# ---- state dicts --------------------------------------------------------------------------------


def states(meshes: dict) -> list[str]:
    """Whole state dicts, in and out; copies; a second patch; unpatch."""
    return [one for family in ("llama", "mixtral") for one in _states(family, meshes[2])]


def _states(family: str, mesh) -> list[str]:
    source, net = cases.model(family), cases.model(family, seed=4)
    want, ids = source.state_dict(), cases.tokens()
    report = ck.patch(net, order="tree", mesh=mesh, strict=True)
    net.load_state_dict(want)
    wrong = cases.different(want, get_model_state_dict(net, options=cases.FULL))
    matrices = {n: p for n, p in net.named_parameters() if p.dim() > 1}
    halves = {n for n, p in matrices.items() if p.to_local().numel() * 2 == p.numel()}
    whole = {n for n in matrices if n.endswith("mlp.gate.weight")}
    packed_right = True
    if family == "mixtral":
        packed_right = [r.by for r in report.replaced if r.part == "MixtralExperts"] == [EXPERTS]
        pieces = [
            half.chunk(2, 1)[mesh.get_local_rank()] for half in want[packed.GATE_UP].chunk(2, 1)
        ]
        local = net.get_parameter(packed.GATE_UP).to_local()
        packed_right &= same_bytes(local, torch.cat(pieces, 1))
        packed_right &= local.untyped_storage().nbytes() == local.nbytes
    logits, file = families.logits(net, ids), io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = copy.deepcopy(net), torch.load(file, weights_only=False)
    again = ck.patch(net, order="tree", mesh=mesh, strict=True)
    same = [same_bytes(families.logits(each, ids), logits) for each in (*copies, net)]
    ck.unpatch(net)
    return cases.failing(
        loaded=wrong,
        parts=halves == matrices.keys() - whole,
        packed=packed_right,
        copies=all(same),
        second_patch=again.complete,
        unpatched=cases.different(want, net.state_dict()),
        plain=not cases.is_cut(net),
        logits=same_bytes(families.logits(net, ids), families.logits(source, ids)),
    )


def packed_states(meshes: dict) -> list[str]:
    """Checkpoints across layouts, whole state dicts, clipping."""
    layouts = (None, 2, "2d")
    wrong = packed.checkpoints(meshes, layouts) | packed.whole_states(meshes, layouts)
    return cases.failing(**wrong, other_layouts=packed.other_layouts(meshes))


def packed_degrees(meshes: dict) -> list[str]:
    """The same with four ranks besides."""
    wrong = packed.checkpoints(meshes, (None, 2, 4, "2d")) | packed.whole_states(meshes, (4,))
    return cases.failing(**wrong)


def _loaded(meshes: dict, family: str, **sizes: object) -> list[str]:
    """A model that is read part by part from several files; what differs from one rank's."""
    folder = cases.shared_folder()
    if dist.get_rank() == 0:
        source = cases.model(family, **sizes)
        source.generation_config.eos_token_id = [5, 7]  # of no config but this one
        source.save_pretrained(folder, max_shard_size="200KB")
        if family == "mixtral":  # save_pretrained has other names, and an expert's weights apart
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            tensors = {name: t.contiguous() for name, t in source.state_dict().items()}
            save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    net = load.from_pretrained(folder, mesh=meshes[2], strict=True, dtype=torch.bfloat16)
    parts = [p.to_local() for p in net.parameters() if hasattr(p, "placements")]
    ends, net.generation_config.eos_token_id = net.generation_config.eos_token_id, None
    brief = family == "mixtral"
    results = cases.results(net, brief)
    return cases.failing(
        files=brief or len(list(folder.glob("*.safetensors"))) > 2,
        ends=ends == [5, 7],
        memory=len(parts) > 5 and all(t.untyped_storage().nbytes() == t.nbytes for t in parts),
        differing=cases.different(results, cases.of_one(family, **sizes)),
    )


def loaded(meshes: dict) -> list[str]:
    return _loaded(meshes, "gemma3") + _loaded(meshes, "mixtral")


def others_loaded(meshes: dict) -> list[str]:
    """Other families, and weights that are tied or not."""
    differing = {name: _loaded(meshes, name) for name in ("llama", "qwen3", "phi3", "olmo2")}
    return cases.failing(**differing, tied=_loaded(meshes, "llama", tie_word_embeddings=True))


def transformers_loaded(meshes: dict) -> list[str]:
    """Models that transformers' own tensor parallelism loaded, which are cut on."""
    names = ("llama", "qwen3", "gemma3", "mixtral")
    return cases.failing(**{name: _by_transformers(name, meshes[4]) for name in names})


def _by_transformers(family: str, mesh) -> list[str]:
    from transformers.distributed import DistributedConfig

    # transformers cuts over all ranks that the environment names.
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": "0",
    }
    folder, source, saved = cases.shared_folder(), cases.model(family), []
    if dist.get_rank() == 0:
        source.save_pretrained(folder / "whole")
    dist.barrier()
    auto, config = (
        transformers.AutoModelForCausalLM,
        DistributedConfig(tp_size=dist.get_world_size()),
    )
    net = auto.from_pretrained(folder / "whole", dtype=torch.bfloat16, distributed_config=config)
    parts = {id(p) for p in net.parameters() if hasattr(p, "placements")}
    ck.patch(net, order="tree", mesh=mesh, strict=True)
    taken = parts <= {id(p) for p in net.parameters()}
    if family != "mixtral":  # of experts, save_pretrained has other names
        net.save_pretrained(folder / "again")
        dist.barrier()
        again = auto.from_pretrained(folder / "again", dtype=torch.bfloat16).state_dict()
        saved = cases.different(source.state_dict(), again)
    differing = cases.different(cases.of_one(family), cases.results(net))
    return cases.failing(taken=taken, saved=saved, differing=differing)


#: When -> size of the group -> parts.
STARTS = {
    "every commit": {
        2: (
            every_commit, another_mixture, tied, whole_vocabulary, static_cache, states,
            packed.into_meta, refused.refused, mutants.survivors, loaded,
        ),
        4: (every_commit, refused.refused, fully_sharded, packed_states),
    },
    "night": {
        2: (other_degrees, others_loaded, settings, compiled, programs),
        4: (other_degrees, others_sharded, packed_degrees),
        8: (eight_ranks,),
    },
    "by transformers": {4: (transformers_loaded,)},
}  # fmt: skip
