"""The Triton norm on a GPU: the bytes of its written orders, as the simulator has them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cute_kernels.norm.triton import launch
from tests import on_gpu

from . import triton_checks as checks
from .cases import Case
from .triton_orders import rounds_once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARD = on_gpu.launcher(launch)
LARGE = (Case(3, 4104, checks.LAYERS, bias=True), Case(2, 9000, residual=True))


@pytest.mark.parametrize("case", [*checks.all_values(), *LARGE, *checks.PARTS], ids=str)
def test_values(case):
    checks.values(CARD, case, rounds_once)


@pytest.mark.parametrize("case", checks.WIDE, ids=str)
def test_values_of_blocks(monkeypatch, case):
    checks.blocks_of(monkeypatch, 64)
    checks.values(CARD, case, rounds_once)


def test_parts_are_added():
    checks.parts_are_added(CARD)


@pytest.mark.parametrize("case", [checks.PARTS[1], Case(9, 4104)], ids=str)
def test_few_rows_show_in_none(case):
    checks.few_rows(CARD, case)
