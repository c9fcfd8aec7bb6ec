"""What ranks refuse: models that they cannot cut, checkpoints, and calls of cut models."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_kernels as ck
from cute_kernels.model.parallel import clip, dtensor, load
from tests.model import refusals
from tests.model.parallel import cases, packed

_UP, _BIAS = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
_EXPERTS = "model.layers.0.mlp.experts"
_STYLE = "model.layers.*.mlp.experts.gate_up_proj"


def _patching(name: str, degree: object = 2, change: Callable | None = None, **settings: object):
    """A call that patches a model, changed before, over a mesh."""
    options = {n: settings.pop(n) for n in ("linear", "order") if n in settings}

    def call(meshes: dict) -> None:
        net = cases.model(name, **settings)
        if change is not None:
            change(net)
        ck.patch(net, **{"order": "tree", "mesh": meshes.get(degree, degree), **options})

    return call


def _config(name: str, **sizes: object):
    def call(meshes: dict) -> None:
        config = getattr(transformers, name)(**sizes)
        net = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        ck.patch(net, order="tree", mesh=meshes[2])

    return call


def _by_rank(degree: int, *of_ranks: tuple[str, dict]):
    """A call that patches another model on each second rank."""

    def call(meshes: dict) -> None:
        name, settings = of_ranks[meshes[degree].get_local_rank() % 2]
        ck.patch(cases.model(name, **settings), order="tree", mesh=meshes[degree])

    return call


def _swapped(net: torch.nn.Module) -> None:
    """The values of every rank, two rows of which are in each other's place."""
    with torch.no_grad():
        table = net.lm_head.weight
        table[:2] = table[:2].flip(0) if dist.get_rank() % 2 else table[:2].clone()


def _holding(attribute: str):
    def change(net: torch.nn.Module) -> None:
        weight = net.lm_head.weight
        if attribute == "hook":
            weight.register_post_accumulate_grad_hook(print)
        else:
            setattr(weight, attribute, torch.zeros_like(weight))

    return _patching("llama", change=change)


def _checkpoint(config: dict | None = None, tensors: dict | None = None, name: str = "llama"):
    """A call that loads other settings or tensors (name -> function of all) than those of a model.

    tensors: None: there are no files.
    """

    def call(meshes: dict) -> None:
        folder, net = cases.shared_folder(), cases.model(name)
        if dist.get_rank() == 0:
            for setting, value in (config or {}).items():
                setattr(net.config, setting, value)
            net.config.save_pretrained(folder)
            if tensors is not None:
                held = net.state_dict()
                held |= {key: function(held) for key, function in tensors.items()}
                save_file(held, folder / "model.safetensors")
        dist.barrier()
        load.from_pretrained(folder, mesh=meshes[2])

    return call


def _by_save_pretrained(meshes: dict) -> None:
    """Files in which each expert's weights are tensors of their own, under other names."""
    folder = cases.shared_folder()
    if dist.get_rank() == 0:
        cases.model("mixtral").save_pretrained(folder)
    dist.barrier()
    load.from_pretrained(folder, mesh=meshes[2])


def _running(name: str, run: Callable, **options: object):
    """A call of a function of a cut model, the meshes and the state dict of before."""

    def call(meshes: dict) -> None:
        net = cases.patched(name, meshes[2], **options).train()
        run(net, meshes, cases.model(name).state_dict())

    return call


def _double_backward(net: torch.nn.Module, *_) -> None:
    weight = net.model.layers[0].self_attn.k_norm.weight
    loss = (net(cases.tokens(), use_cache=False).logits.float() ** 2).sum()
    torch.autograd.grad(loss, weight, create_graph=True)


def _changed(name: str, trained: bool = True):
    """A call that writes to a parameter between a forward and its backward."""

    def run(net: torch.nn.Module, *_) -> None:
        ids = cases.tokens()
        weight = net.get_parameter(f"{name}.weight").requires_grad_(trained)
        loss = net(ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            weight.mul_(1.5)
        loss.backward()

    return _running("llama", run)


def _partial_gradient(meshes: dict) -> None:
    whole = DTensor.from_local(torch.ones(4), meshes[2], [Replicate()]).requires_grad_()
    whole.grad = DTensor.from_local(torch.ones(4), meshes[2], [Partial()])
    clip.clip_grad_norm_([whole], 1.0)


def _plain_main_grad(meshes: dict) -> None:
    weight = DTensor.from_local(torch.ones(4), meshes[2], [Shard(0)]).requires_grad_()
    weight.main_grad = torch.ones(4)
    clip.clip_grad_norm_([weight], 1.0, main_grad=True)


def _main_grad(net: torch.nn.Module, meshes: dict, want: dict) -> None:
    """No refusal: the report names the experts, whose gradients go to ``grad``."""
    report = ck.patch(net, order="tree", mesh=meshes[2], main_grad=True)
    raise ValueError(f"named {packed.GATE_UP in report.main_grad_left}")


def _another_torch(meshes: dict) -> None:
    """A release without one of the functions that are replaced; nothing is cut."""
    net = cases.model("mixtral")
    with mock.patch.object(dtensor, "install", lambda: ["DTensor.name"]):
        try:
            ck.patch(net, order="tree", mesh=meshes[2])
        finally:
            assert not cases.is_cut(net)


def _pieces_cut(run: Callable):
    """``fully_shard`` of the dimension whose halves are cut."""

    def call(meshes: dict) -> None:
        net = cases.patched("mixtral", meshes[2])
        place = {net.get_parameter(packed.GATE_UP): Shard(1)}
        fully_shard(net, mesh=meshes["2d"]["dp"], shard_placement_fn=place.get)
        run(net, cases.model("mixtral").state_dict())

    return call


def _another_shape(net: torch.nn.Module, meshes: dict, want: dict) -> None:
    """A full state dict of one expert, which would be copied into all of them."""
    want = want | {packed.GATE_UP: want[packed.GATE_UP][:1]}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, want, options=options)


_TINY = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "head_dim": 64}
_TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
_GPT2 = {"n_embd": 128, "n_layer": 1, "n_head": 2, "vocab_size": 256}
_FP8 = {"quantization_config": {"quant_method": "fp8"}}


def _set_experts(**attributes: object) -> Callable:
    return lambda net: vars(net.model.layers[0].mlp.experts).update(attributes)


def _set_style(net: torch.nn.Module) -> None:
    net.tp_plan = net.tp_plan | {_STYLE: "colwise"}


#: What two ranks refuse -> (call, what is said).
_BY_TWO = {
    # models
    "chain": (_patching("llama", order="chain"), "ArgumentValueError: order: ... 'tree'"),
    "no mesh": (_patching("llama", "tp"), "ArgumentTypeError: mesh: ... str"),
    "leaves": (
        _patching("llama", intermediate_size=160),
        "ShapeError ... model.layers.0.mlp.gate_proj ... leaves of 32 ... 1 can cut",
    ),
    "left": (_patching("llama", linear=False), "PatchError ... q_proj ... linear=False"),
    "family": (
        _config("MiniMaxM2Config", **_TINY, num_local_experts=2),
        "ArgumentValueError: model: ... mixtral ... minimax_m2",
    ),
    "a hybrid": (
        _patching("olmo_hybrid", num_hidden_layers=2),
        "ArgumentValueError: model: ... without gated delta nets ... OlmoHybridGatedDeltaNet",
    ),
    "no plan": (_config("GPT2Config", **_GPT2), "ArgumentValueError: model: ... plan ... GPT2"),
    "no model": (
        lambda meshes: ck.patch(torch.nn.Linear(8, 8).bfloat16(), order="tree", mesh=meshes[2]),
        "ArgumentTypeError: model: ... transformers",
    ),
    **{
        f"a {held}": (_holding(held), f"ArgumentValueError: lm_head.weight: ... without {said}")
        for held, said in (("grad", "grad,"), ("main_grad", "main_grad,"), ("hook", "post accum"))
    },
    "experts' leaves": (
        _patching("mixtral", intermediate_size=160),
        f"ShapeError ... {_EXPERTS}.gate_up_proj ... leaves of 32 ... 1 can cut",
    ),
    "experts left": (
        _patching("mixtral", change=_set_experts(num_experts=2000)),
        f"PatchError ... {_EXPERTS} ... 2000 experts",
    ),
    "style": (
        _patching("mixtral", change=_set_style),
        f"ArgumentValueError ... tp_plan['{_STYLE}'] ... packed_colwise ... 'colwise'",
    ),
    "transposed": (
        _patching("mixtral", change=_set_experts(is_transposed=True)),
        f"ArgumentValueError ... {_EXPERTS} ... without biases",
    ),
    "a release of torch": (_another_torch, "PatchError: torch: ... DTensor.name"),
    # ranks that differ
    "values": (
        _by_rank(2, ("llama", {"seed": 0}), ("llama", {"seed": 1})),
        "RankError: model: ... values of the parameters",
    ),
    "their order": (
        _patching("llama", change=_swapped),
        "RankError: model: ... values of the parameters",
    ),
    "models": (
        _by_rank(2, ("llama", {}), ("qwen2", {})),
        "RankError: model: ... names, shapes and styles",
    ),
    "ids": (
        _running("llama", lambda net, m, _: net(cases.tokens(seed=m[2].get_local_rank()))),
        "RankError: input_ids:",
    ),
    # checkpoints
    "quantized": (_checkpoint(_FP8, {}), "ArgumentValueError: folder: ... quantization_config"),
    "codes": (
        _checkpoint(tensors={_UP: lambda tensors: tensors[_UP].to(torch.float8_e4m3fn)}),
        f"ArgumentValueError: folder: {_UP} ... expected weights ... F8_E4M3",
    ),
    "a bias": (
        _checkpoint(tensors={_BIAS: lambda tensors: torch.ones(256)}),
        f"ArgumentValueError: folder: {_BIAS} ... no such parameter",
    ),
    "no files": (_checkpoint(), "ArgumentValueError: folder: ... model.safetensors"),
    "layers": (
        _checkpoint({"num_hidden_layers": 2}, {}),
        "ArgumentValueError: folder: ... model.layers.1.",
    ),
    "shape": (
        _checkpoint({"intermediate_size": 128}, {}),
        "ArgumentValueError: folder: model.layers.0.mlp. ... [128, 128] ... [256, 128]",
    ),
    "experts' names": (_by_save_pretrained, "ArgumentValueError: folder: ... mlp.gate.weight"),
    # calls of a cut model
    "without the mesh": (
        _running("llama", lambda net, *_: ck.patch(net, order="tree")),
        "ArgumentValueError: mesh: ... ck.unpatch",
    ),
    "a partial gradient": (_partial_gradient, "ArgumentTypeError: parameters[0] ... Partial"),
    "a plain main_grad": (_plain_main_grad, "ArgumentTypeError: parameters[0] ... DTensor"),
    **{
        f"{name} changed": (_changed(*of), "ArgumentValueError: weight: ... changed in place")
        for name, of in {
            "a head": ("lm_head",),
            "columns": ("model.layers.0.self_attn.q_proj",),
            "rows": ("model.layers.0.mlp.down_proj",),
            "frozen rows": ("model.layers.0.mlp.down_proj", False),
        }.items()
    },
    "double backward": (
        _running("qwen3", _double_backward),
        "UnsupportedTransformError ... create_graph",
    ),
    "one expert": (
        _running("mixtral", _another_shape),
        f"ArgumentValueError ... {packed.GATE_UP} ... [4, 512, 128] ... [1, 512, 128]",
    ),
    "main_grad": (_running("mixtral", _main_grad), "ValueError: named True"),
}

#: What four ranks refuse: a degree that does not cut a model, pieces cut again.
_BY_FOUR = {
    "heads": (
        _patching("llama", 4, num_key_value_heads=2),
        "ShapeError ... config.num_key_value_heads ... 1 or 2 can cut",
    ),
    "size": (
        _by_rank(4, ("llama", {}), ("llama", {"intermediate_size": 160})),
        "RankError|ShapeError",
    ),
    **{
        f"pieces cut, {name}": (_pieces_cut(run), f"PatchError ... {named} ... dimension than 1")
        for name, named, run in (
            ("saved", packed.GATE_UP, lambda net, want: net.state_dict()),
            ("loaded", packed.GATE_UP, lambda net, want: net.load_state_dict(want)),
            ("clipped", "parameters[", lambda net, _: clip.clip_grad_norm_(net.parameters(), 1)),
            ("read", "DTensor:", lambda net, _: _experts(net).__create_chunk_list__()),
            ("written", "w:", lambda net, _: _experts(net).__create_write_items__("w", 0)),
        )
    },
}


def _experts(net: torch.nn.Module) -> torch.Tensor:
    return net.get_parameter(packed.GATE_UP)


def refused(meshes: dict) -> list[str]:
    """Cases whose error is another one than the one that is meant, or that raise none."""
    wrong = []
    for name, (call, said) in {2: _BY_TWO, 4: _BY_FOUR}[dist.get_world_size()].items():
        message = "nothing"
        try:
            call(meshes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        if not refusals.agrees(said, message):
            wrong.append(f"{name}: {message}")
    return wrong
