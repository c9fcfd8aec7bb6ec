"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from tests.model.audit import planted
from tests.model.refusals import raises

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
    (audit(lambda ids: ids), "ArgumentTypeError ... model ... nn.Module ... function"),
    (audit(named("DistributedDataParallel")), "ArgumentTypeError ... model ... DistributedD"),
    (audit(small(named("FSDPModule"))), "ArgumentTypeError ... FSDPModule ... '1'"),
    (audit(named("DeepSpeedEngine")), "ArgumentTypeError ... DeepSpeedEngine"),
    (audit(torch.compile(small())), "ArgumentTypeError ... OptimizedModule ... compile="),
    (audit(small(nn.Dropout(0.3))), "ArgumentValueError ... Dropout '1' ... p = 0.3"),
    (audit(configured()), "ArgumentValueError ... config.attention_dropout = 0.25"),
    (audit(small(nn.BatchNorm1d(8))), "ArgumentValueError ... BatchNorm1d '1'"),
    (audit(small().to("meta")), "DeviceError ... model ... meta"),
    (audit(TwoDevices()), "DeviceError ... one device ... cpu, meta"),
    (audit(Pooled(), gradients=False), "ArgumentValueError ... a row for each ... Pooled"),
    (audit(Numbers()), "ArgumentValueError ... gradients=False ... none"),
    # inputs
    (audit(inputs="a text"), "ArgumentTypeError ... inputs ... [B, T] ... str"),
    (audit(inputs=IDS[0]), "ShapeError ... inputs ... 2 dimensions [B, T] ... [3]"),
    (audit(inputs=IDS[:, :0]), "ShapeError ... inputs ... at least one token"),
    (audit(inputs=[]), "ShapeError ... inputs ... at least one sequence"),
    (audit(inputs=[IDS[0], []]), "ShapeError ... inputs[1] ... at least one token"),
    (audit(inputs=[IDS]), "ShapeError ... inputs[0] ... 1 dimension [T] ... [2, 3]"),
    (audit(inputs=IDS.float()), "DtypeError ... inputs[0] ... int64 ... float32"),
    (audit(inputs=["abc"]), "ArgumentTypeError ... inputs[0] ... str"),
    (audit(inputs=[[1, 50]]), "ArgumentValueError ... inputs[0] ... 0 to 49 ... 50"),
    (audit(inputs=IDS.to("meta")), "DeviceError ... inputs[0] ... meta"),
    # options
    (asks("batches"), "ArgumentValueError ... transforms ... 'batch' ... 'batches'"),
    (audit(transforms="batch"), "ArgumentTypeError ... transforms ... list ... 'batch'"),
    (asks(), "ArgumentValueError ... transforms ... at least one"),
    (asks("decode"), "ArgumentValueError ... past_key_values ... 'decode'"),
    (asks("left_padding"), "ArgumentValueError ... attention_mask ... 'left_padding'"),
    (asks("batch", inputs=IDS[:1]), "ArgumentValueError ... one sequence ... 'batch'"),
    (asks("micro_batches"), "ArgumentValueError ... requires a gradient"),
    (
        asks("chunks", model=without_cache()),
        "ArgumentValueError ... returns no past_key_values ... 'chunks'",
    ),
    (
        asks("gradient_repeat", gradients=False),
        "ArgumentValueError ... gradients ... True ... gradient_repeat",
    ),
    (audit(gradients=1), "ArgumentTypeError ... gradients ... int"),
    (audit(compile="yes"), "ArgumentTypeError ... compile ... str"),
    (audit(pad_token=-1), "ArgumentValueError ... pad_token ... -1"),
    (audit(pad_token=True), "ArgumentTypeError ... pad_token ... bool"),
]


@pytest.mark.parametrize(("call", "said"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input(call, said):
    with raises(said):
        call()
