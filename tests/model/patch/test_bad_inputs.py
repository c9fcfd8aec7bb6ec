"""Each wrong argument is one exception of ours, which names it, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    CuteKernelsError,
    DtypeError,
    PatchError,
    ShapeError,
)
from cute_kernels.model.patch import state
from cute_kernels.runtime import checking
from tests.model.patch import families


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))


#: name -> (model, options, exception, fragments of its message)
PATCH = {
    "a list": ([], {}, ArgumentTypeError, ["model: expected a torch.nn.Module", "list"]),
    "nothing": (None, {}, ArgumentTypeError, ["model: expected", "NoneType"]),
    "a function": (len, {}, ArgumentTypeError, ["model: expected", "builtin_function"]),
    "a class": (nn.Linear, {}, ArgumentTypeError, ["model: expected", "type"]),
    "a tensor": (torch.ones(2), {}, ArgumentTypeError, ["model: expected", "Tensor"]),
    "a state dict": (small().state_dict(), {}, ArgumentTypeError, ["model", "OrderedDict"]),
    "linear": (small(), {"linear": 1}, ArgumentTypeError, ["linear: expected True", "1"]),
    "norm": (small(), {"norm": "yes"}, ArgumentTypeError, ["norm: expected True", "'yes'"]),
    "attention": (small(), {"attention": None}, ArgumentTypeError, ["attention", "None"]),
    "attention's name": (
        small(),
        {"attention": "cute_kernels"},
        ArgumentTypeError,
        ["attention: expected True or False", "'cute_kernels'"],
    ),
    "embedding": (small(), {"embedding": []}, ArgumentTypeError, ["embedding: expected", "[]"]),
    "main_grad": (
        small(),
        {"main_grad": torch.zeros(1)},
        ArgumentTypeError,
        ["main_grad: expected True or False", "tensor"],
    ),
    "strict": (small(), {"strict": 0}, ArgumentTypeError, ["strict: expected True", "0"]),
    "logits's type": (small(), {"logits": True}, ArgumentTypeError, ["logits", "True"]),
    "no logits": (small(), {"logits": None}, ArgumentTypeError, ["logits: expected a string"]),
    "logits": (
        small(),
        {"logits": "logp"},
        ArgumentValueError,
        ["logits: expected one of 'linear_logp', 'linear'", "'logp'"],
    ),
    "order's type": (small(), {"order": 1}, ArgumentTypeError, ["order: expected a string", "1"]),
    "order": (
        small(),
        {"order": "atomic"},
        ArgumentValueError,
        ["order: expected one of 'chain', 'tree'", "'atomic'"],
    ),
    "no logits by name": (small(), {"logits": ""}, ArgumentValueError, ["logits", "''"]),
    "TorchScript": (
        torch.jit.script(small()),
        {},
        ArgumentTypeError,
        ["model: expected", "TorchScript"],
    ),
    "strict and torch's parts": (
        nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(4, 4)),
        {"strict": True},
        PatchError,
        ["strict: expected no part left", "got 1", "0 (Conv1d)", "cuDNN"],
    ),
    "strict and a flag": (
        small(),
        {"strict": True, "norm": False},
        PatchError,
        ["1 (LayerNorm): norm=False"],
    ),
    "strict and many": (
        nn.Sequential(*(nn.GRU(4, 4) for _ in range(25))),
        {"strict": True},
        PatchError,
        ["got 25", "0 (GRU): products and gates", "also in 24 more, 1"],
    ),
    "strict and many reasons": (
        nn.Sequential(
            nn.GRU(4, 4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Mish(), nn.Conv1d(4, 4, 1)
        ),
        {"strict": True},
        PatchError,
        ["got 5", "1 (Conv1d)", "also in 1 more, 4", "1 more reasons", "docs/model_families.md"],
    ),
    "skip's type": (small(), {"skip": 3}, ArgumentTypeError, ["skip: expected names", "3"]),
    "skip's names": (small(), {"skip": [None]}, ArgumentTypeError, ["skip: expected names"]),
    "skip and no module": (
        small(),
        {"skip": ["0", "visual"]},
        ArgumentValueError,
        ["skip: expected the full name of a module inside, or a glob of such names, got 'visual'"],
    ),
    "skip and the end of a name": (
        families.model("llama", num_hidden_layers=1),
        {"skip": "norm"},
        ArgumentValueError,
        ["or a glob of such names (such as 'model.norm'), got 'norm'"],
    ),
    "skip of all": (small(), {"skip": ""}, ArgumentValueError, ["skip", "''"]),
    "skip and a mesh": (
        small(),
        {"skip": "0", "mesh": object()},
        ArgumentValueError,
        ["skip: expected none with a mesh"],
    ),
    "strict and a model": (
        families.model("llama", head_dim=32),
        {"strict": True},
        PatchError,
        ["the model (attention (sdpa)): head sizes [32]"],
    ),
}


@pytest.mark.parametrize("case", PATCH)
def test_patch(case):
    model, options, exception, fragments = PATCH[case]
    with pytest.raises(exception) as caught:
        ck.patch(model, **options)
    assert isinstance(caught.value, CuteKernelsError)
    for fragment in fragments:
        assert fragment in str(caught.value)
    if isinstance(model, nn.Module):
        assert {state.kind_of(m) for m in model.modules()} == {None}


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match="unexpected keyword argument 'lineer'"):
        ck.patch(small(), lineer=True)


@pytest.mark.parametrize("value", [None, [], nn.Linear, "model"])
def test_unpatch(value):
    with pytest.raises(ArgumentTypeError, match=r"model: expected a torch\.nn\.Module"):
        ck.unpatch(value)


def test_a_device_without_a_backend(monkeypatch):
    monkeypatch.setattr(checking, "DEVICE_TYPES", ("cuda", "meta"))
    with pytest.raises(BackendUnavailable, match="linear: no backend for cpu"):
        ck.patch(small())


def test_a_refused_patch_leaves_an_earlier_one():
    net = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    ck.patch(net)
    with pytest.raises(PatchError):
        ck.patch(net, strict=True)
    assert state.kind_of(net[0]) == "linear"


# ---- calls of a patched model -------------------------------------------------------------------

IDS = families.ids(1, 5)


def patched(**options) -> nn.Module:
    net = families.model("llama").train()
    ck.patch(net, **options)
    return net


def wrong_main_grad(change):
    net = patched(main_grad=True)
    net.model.norm.weight.main_grad = change(net.model.norm.weight)
    return net


CALLS = {
    "main_grad in bf16": (
        lambda: wrong_main_grad(lambda w: torch.zeros(128, dtype=torch.bfloat16)),
        {"input_ids": IDS},
        DtypeError,
        "main_grad: expected torch.float32",
    ),
    "main_grad of another shape": (
        lambda: wrong_main_grad(lambda w: torch.zeros(64, dtype=torch.float32)),
        {"input_ids": IDS},
        ShapeError,
        "main_grad: expected shape",
    ),
    "main_grad in float64": (
        lambda: wrong_main_grad(lambda w: torch.zeros(128, dtype=torch.float64)),
        {"input_ids": IDS},
        DtypeError,
        "main_grad: expected torch.float32",
    ),
    "ids in float": (patched, {"input_ids": IDS.float()}, DtypeError, "ids: expected"),
    "an id beyond the vocabulary": (
        patched,
        {"input_ids": IDS + 100},
        ArgumentValueError,
        "ids: expected",
    ),
    "embeddings in float64": (
        patched,
        {"inputs_embeds": torch.zeros(1, 5, 128, dtype=torch.float64)},
        DtypeError,
        "expected one of torch.bfloat16",
    ),
    "embeddings of another width": (
        patched,
        {"inputs_embeds": torch.zeros(1, 5, 64, dtype=torch.bfloat16)},
        ShapeError,
        "weight: expected shape",
    ),
    "a label beyond the vocabulary": (
        patched,
        {"input_ids": IDS, "labels": IDS + 100},
        CuteKernelsError,
        "target",
    ),
    "labels of another length": (
        patched,
        {"input_ids": IDS, "labels": IDS[:, :3]},
        ShapeError,
        "labels: expected one for each hidden state, [1, 5]",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    make, inputs, exception, fragment = CALLS[case]
    with pytest.raises(exception) as caught:
        make()(**inputs)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, CuteKernelsError)


def test_a_main_grad_that_is_the_weight():
    net = nn.Linear(8, 8).float()
    ck.patch(net, main_grad=True)
    net.weight.main_grad = net.weight.detach()
    with pytest.raises(AliasError, match="main_grad: expected memory of its own"):
        net(torch.zeros(1, 8, dtype=torch.float32)).sum().backward()
