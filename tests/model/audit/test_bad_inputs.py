"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
)
from tests.model.audit import planted

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def small(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), *more)


def frozen() -> nn.Module:
    return small().eval().requires_grad_(False)


def named(kind: str) -> nn.Module:
    """A module whose class has the name of a wrapper, as a subclass of it has."""
    return type("Mine", (type(kind, (nn.Sequential,), {}),), {})(nn.Embedding(50, 8))


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


class Config:
    def __init__(self) -> None:
        self.attention_dropout = 0.25


def configured() -> nn.Module:
    model = small()
    model.config = Config()
    return model


class Pooled(nn.Module):
    def forward(self, ids):
        return ids.sum()


class Numbers(nn.Module):
    """Rows, but no way back to its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50))

    def forward(self, ids):
        return self.weight.detach()[ids]


def without_cache() -> nn.Module:
    model = planted.clean()
    real = type(model).forward

    def forward(
        input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False
    ):
        return real(model, input_ids, attention_mask, position_ids)

    model.forward = forward
    return model


def audit(model=None, inputs=IDS, **options):
    return lambda: ck.audit(frozen() if model is None else model, inputs, **options)


def asks(*names: str, model=None, inputs=IDS, **options):
    return audit(model, inputs, transforms=names, **options)


CASES = [
    # model
    ("a function", audit(lambda ids: ids), ArgumentTypeError, ["model", "nn.Module", "function"]),
    ("None", lambda: ck.audit(None, IDS), ArgumentTypeError, ["model", "NoneType"]),
    ("DDP", audit(named("DistributedDataParallel")), ArgumentTypeError, ["model", "DistributedD"]),
    ("FSDP", audit(named("FullyShardedDataParallel")), ArgumentTypeError, ["FullyShardedData"]),
    ("FSDP2 inside", audit(small(named("FSDPModule"))), ArgumentTypeError, ["FSDPModule", "'1'"]),
    ("DeepSpeed", audit(named("DeepSpeedEngine")), ArgumentTypeError, ["DeepSpeedEngine"]),
    ("compiled", audit(torch.compile(small())), ArgumentTypeError, ["OptimizedModule", "compile="]),
    ("dropout", audit(small(nn.Dropout(0.3))), ArgumentValueError, ["Dropout '1'", "p = 0.3"]),
    ("config", audit(configured()), ArgumentValueError, ["config.attention_dropout = 0.25"]),
    ("batch norm", audit(small(nn.BatchNorm1d(8))), ArgumentValueError, ["BatchNorm1d '1'"]),
    ("meta", audit(small().to("meta")), DeviceError, ["model", "meta"]),
    ("two devices", audit(TwoDevices()), DeviceError, ["one device", "cpu, meta"]),
    ("no rows", audit(Pooled(), gradients=False), ArgumentValueError, ["a row for each", "Pooled"]),
    ("no way back", audit(Numbers()), ArgumentValueError, ["gradients=False", "none"]),
    # inputs
    ("text", audit(inputs="a text"), ArgumentTypeError, ["inputs", "[B, T]", "str"]),
    ("a number", audit(inputs=5), ArgumentTypeError, ["inputs", "int"]),
    ("1-D", audit(inputs=IDS[0]), ShapeError, ["inputs", "2 dimensions [B, T]", "[3]"]),
    ("3-D", audit(inputs=IDS[None]), ShapeError, ["inputs", "[1, 2, 3]"]),
    ("no tokens", audit(inputs=IDS[:, :0]), ShapeError, ["inputs", "at least one token"]),
    ("no sequences", audit(inputs=[]), ShapeError, ["inputs", "at least one sequence"]),
    ("empty one", audit(inputs=[IDS[0], []]), ShapeError, ["inputs[1]", "at least one token"]),
    ("2-D in a list", audit(inputs=[IDS]), ShapeError, ["inputs[0]", "1 dimension [T]", "[2, 3]"]),
    ("floating", audit(inputs=IDS.float()), DtypeError, ["inputs[0]", "int64", "float32"]),
    ("floats", audit(inputs=[[1.0]]), ArgumentTypeError, ["inputs[0]", "whole numbers"]),
    ("words", audit(inputs=["abc"]), ArgumentTypeError, ["inputs[0]", "str"]),
    ("too large", audit(inputs=[[1, 50]]), ArgumentValueError, ["inputs[0]", "0 to 49", "50"]),
    ("negative", audit(inputs=[[1], [-1]]), ArgumentValueError, ["inputs[1]", "-1"]),
    ("meta ids", audit(inputs=IDS.to("meta")), DeviceError, ["inputs[0]", "meta"]),
    # options
    ("unknown", asks("batches"), ArgumentValueError, ["transforms", "'batch'", "'batches'"]),
    ("one text", audit(transforms="batch"), ArgumentTypeError, ["transforms", "list", "'batch'"]),
    ("none of them", asks(), ArgumentValueError, ["transforms", "at least one"]),
    ("no cache", asks("decode"), ArgumentValueError, ["past_key_values", "'decode'"]),
    ("no mask", asks("left_padding"), ArgumentValueError, ["attention_mask", "'left_padding'"]),
    ("alone", asks("batch", inputs=IDS[:1]), ArgumentValueError, ["one sequence", "'batch'"]),
    ("frozen", asks("micro_batches"), ArgumentValueError, ["requires a gradient"]),
    (
        "cache promised",
        asks("chunks", model=without_cache()),
        ArgumentValueError,
        ["returns no past_key_values", "'chunks'"],
    ),
    (
        "gradients off",
        asks("gradient_repeat", gradients=False),
        ArgumentValueError,
        ["gradients", "True", "gradient_repeat"],
    ),
    ("gradients 1", audit(gradients=1), ArgumentTypeError, ["gradients", "int"]),
    ("compile yes", audit(compile="yes"), ArgumentTypeError, ["compile", "str"]),
    ("pad 50", audit(pad_token=50), ArgumentValueError, ["pad_token", "0 to 49", "50"]),
    ("pad -1", audit(pad_token=-1), ArgumentValueError, ["pad_token", "-1"]),
    ("pad True", audit(pad_token=True), ArgumentTypeError, ["pad_token", "bool"]),
]


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert all(fragment in message for fragment in fragments), message
