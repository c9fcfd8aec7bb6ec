"""Each wrong argument is one exception of ours, which names it, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import state
from cute_kernels.runtime import checking
from tests.model.patch import families
from tests.model.refusals import raises


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))


def several() -> nn.Module:
    parts = nn.GRU(4, 4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Mish(), nn.Conv1d(4, 4, 1)
    return nn.Sequential(*parts)


GLOB = "skip: expected the full name of a module inside, or a glob of such names, got 'visual'"
#: (model or how it is made, options, what is said).
PATCH = [
    ([], {}, "ArgumentTypeError ... model: expected a torch.nn.Module ... list"),
    (nn.Linear, {}, "ArgumentTypeError ... model: expected ... type"),
    (torch.ones(2), {}, "ArgumentTypeError ... model: expected ... Tensor"),
    (torch.jit.script(small()), {}, "ArgumentTypeError ... model: expected ... TorchScript"),
    (small, {"linear": 1}, "ArgumentTypeError ... linear: expected True ... 1"),
    (
        small,
        {"attention": None},
        "ArgumentTypeError ... attention: expected True or False ... None",
    ),
    (small, {"main_grad": torch.zeros(1)}, "ArgumentTypeError ... main_grad: expected ... tensor"),
    (small, {"strict": 0}, "ArgumentTypeError ... strict: expected True ... 0"),
    (small, {"logits": None}, "ArgumentTypeError ... logits: expected a string"),
    (small, {"logits": "logp"}, "ArgumentValueError ... logits: expected one of 'linear_logp', "),
    (small, {"order": 1}, "ArgumentTypeError ... order: expected a string ... 1"),
    (small, {"order": "atomic"}, "ArgumentValueError ... order: expected one of 'chain', 'tree'"),
    (small, {"skip": 3}, "ArgumentTypeError ... skip: expected names ... 3"),
    (small, {"skip": [None]}, "ArgumentTypeError ... skip: expected names"),
    (small, {"skip": ["0", "visual"]}, f"ArgumentValueError ... {GLOB}"),
    (
        lambda: families.model("llama", num_hidden_layers=1),
        {"skip": "norm"},
        "ArgumentValueError ... or a glob of such names (such as 'model.norm'), got 'norm'",
    ),
    (small, {"skip": ""}, "ArgumentValueError ... skip ... ''"),
    (
        small,
        {"skip": "0", "mesh": object()},
        "ArgumentValueError ... skip: expected none with a mesh",
    ),
    (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(4, 4)),
        {"strict": True},
        "PatchError ... strict: expected no part left ... got 1 ... 0 (Conv1d) ... cuDNN",
    ),
    (small, {"strict": True, "norm": False}, "PatchError ... 1 (LayerNorm): norm=False"),
    (
        lambda: nn.Sequential(*(nn.GRU(4, 4) for _ in range(25))),
        {"strict": True},
        "PatchError ... got 25 ... 0 (GRU): products and gates ... also in 24 more, 1",
    ),
    (
        several,
        {"strict": True},
        "PatchError ... got 5 ... 1 (Conv1d) ... also in 1 more, 4 ... 1 more reasons ... "
        "docs/model_families.md",
    ),
    (
        lambda: families.model("llama", head_dim=32),
        {"strict": True},
        "PatchError ... the model (attention (sdpa)): head sizes [32]",
    ),
]


@pytest.mark.parametrize(("model", "options", "said"), PATCH)
def test_patch(model, options, said):
    net = model() if callable(model) and not isinstance(model, nn.Module | type) else model
    with raises(said):
        ck.patch(net, **options)
    if isinstance(net, nn.Module):
        assert {state.kind_of(m) for m in net.modules()} == {None}


def test_others(monkeypatch):
    """An option that there is not; unpatch of no module; a device without a backend."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'lineer'"):
        ck.patch(small(), lineer=True)
    with raises("ArgumentTypeError: model: expected a torch.nn.Module"):
        ck.unpatch(None)
    monkeypatch.setattr(checking, "DEVICE_TYPES", ("cuda", "meta"))
    with raises("BackendUnavailable: linear: no backend for cpu"):
        ck.patch(small())


def test_a_refused_patch_leaves_an_earlier_one():
    net = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    ck.patch(net)
    with pytest.raises(PatchError):
        ck.patch(net, strict=True)
    assert state.kind_of(net[0]) == "linear"


# ---- calls of a patched model -------------------------------------------------------------------

IDS = families.ids(1, 5)
EMBEDS = {"inputs_embeds": torch.zeros(1, 5, 128, dtype=torch.bfloat16)}
#: (shape and dtype of a norm's main_grad, inputs, what is said).
CALLS = [
    ((128, torch.bfloat16), {"input_ids": IDS}, "DtypeError ... main_grad: expected torch.float32"),
    ((64, torch.float32), {"input_ids": IDS}, "ShapeError ... main_grad: expected shape"),
    (None, {"input_ids": IDS.float()}, "DtypeError ... ids: expected"),
    (None, {"input_ids": IDS + 100}, "ArgumentValueError ... ids: expected"),
    (
        None,
        {"inputs_embeds": EMBEDS["inputs_embeds"].double()},
        "DtypeError ... expected one of torch.bfloat16",
    ),
    (
        None,
        {"inputs_embeds": EMBEDS["inputs_embeds"][..., :64]},
        "ShapeError ... weight: expected shape",
    ),
    (None, {"input_ids": IDS, "labels": IDS + 100}, "ArgumentValueError ... target"),
    (
        None,
        {"input_ids": IDS, "labels": IDS[:, :3]},
        "ShapeError ... labels: expected one for each hidden state, [1, 5]",
    ),
]


@pytest.mark.parametrize(("main_grad", "inputs", "said"), CALLS)
def test_calls(main_grad, inputs, said):
    net = families.model("llama", num_hidden_layers=1).train()
    ck.patch(net, main_grad=main_grad is not None)
    if main_grad:
        net.model.norm.weight.main_grad = torch.zeros(main_grad[0], dtype=main_grad[1])
    with raises(said):
        net(**inputs)


def test_a_main_grad_that_is_the_weight():
    net = nn.Linear(8, 8).float()
    ck.patch(net, main_grad=True)
    net.weight.main_grad = net.weight.detach()
    with raises("AliasError: main_grad: expected memory of its own"):
        net(torch.zeros(1, 8, dtype=torch.float32)).sum().backward()
