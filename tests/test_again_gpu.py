"""Calls that are remembered, on a GPU: the bytes of the whole way."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import again
from tests.again import CASES, counted, drawn
from tests.contract import same_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", CASES)
def test_a_known_call_has_the_bytes_of_the_first(name, monkeypatch):
    run, shape = CASES[name]
    again.forget()
    counts = counted(monkeypatch)
    with torch.device("cuda"):
        x = drawn(*shape, seed=5).requires_grad_()
        cotangent = drawn(*run(x).shape, seed=9)

        def results() -> list[torch.Tensor]:
            y = run(x)
            return [y.detach(), torch.autograd.grad(y, x, cotangent.to(y.dtype))[0]]

        again.forget()
        before = sum(counts.values())
        first, later = results(), results()
        assert sum(counts.values()) == before + 1
        again.forget()
        whole = results()
        with torch.no_grad():
            alone = [run(x), run(x)]
    assert all(map(same_bytes, first, later)) and all(map(same_bytes, first, whole))
    assert all(same_bytes(y, first[0]) for y in alone)
