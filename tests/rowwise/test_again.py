"""Functions of elements whose calls are remembered: the bytes of the whole way, and who is not."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import again, dispatch
from cute_kernels.compile import extension
from cute_kernels.errors import DtypeError, ShapeError
from cute_kernels.rowwise import cpu, op
from tests.again import counted
from tests.contract import same_bytes

from .again_cases import CALLS
from .cases import BF16, FP16, drawn


class Way:
    """How often calls went the whole way and were launched as prepared, and which were prepared."""

    def __init__(self, counts: dict[str, int]):
        self.counts, self.prepared, self.launched = counts, [], 0

    @property
    def whole(self) -> int:
        return self.counts["elements"]


@pytest.fixture
def way(monkeypatch):
    """CPU tensors are remembered, with the CPU's functions for what launches them."""
    made = Way(counted(monkeypatch))

    def prepared(entry, device, dtype, *call):
        made.prepared.append((entry, call[-1]))
        run = cpu.activation if len(call) == 2 else cpu.gated

        def launch(*tensors):
            made.launched += 1
            return run(*tensors, call[-1])

        return launch if call[0].is_contiguous() else None

    monkeypatch.setattr(again, "remembers", lambda t: True)
    monkeypatch.setattr(dispatch, "prepared", prepared)
    again.forget()
    yield made
    again.forget()


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_has_the_bytes_of_the_first(way, name):
    run, x, other = CALLS[name], drawn(5, 77).to(BF16), drawn(5, 77, seed=3).to(BF16)
    first, later, third = run(x), run(x), run(other)
    assert (way.whole, way.launched) == (1, 2)
    assert same_bytes(first, later) and not same_bytes(first, third)
    again.forget()
    assert same_bytes(third, run(other)) and way.whole == 2


@pytest.mark.parametrize("name", CALLS)
def test_so_has_its_gradient(way, name):
    def results():
        x = drawn(5, 77).to(BF16).requires_grad_()
        y = CALLS[name](x)
        return y.detach(), torch.autograd.grad(y, x, drawn(5, 77, seed=9).to(BF16))[0]

    first, later = results(), results()
    assert all(map(same_bytes, first, later)) and way.launched == 1


def test_a_call_that_is_known_in_eager_is_traced(way):
    x = drawn(5, 77).to(BF16)
    first, _ = ck.silu(x), ck.silu(x)
    graph = torch.compile(lambda: ck.silu(x), fullgraph=True, backend="eager")
    assert same_bytes(graph(), first)


def test_another_kind_shape_or_dtype_is_another_call(way):
    x = drawn(5, 77).to(BF16)
    for run in CALLS.values():
        for one in (x, x[:4], x.to(FP16), x.view(77, 5)):
            run(one)
    assert way.launched == 0 and way.whole == 4 * len(CALLS)
    names = [entry for entry, _ in way.prepared[::4]]
    assert names == ["silu", "gelu", "gelu", "sigmoid", "tanh", "silu_mul", "gelu_mul"]
    assert len(set(way.prepared)) == len(CALLS)


def test_what_is_not_prepared_goes_the_whole_way(way):
    x = drawn(77, 5).to(BF16)
    for one in (x.mT, x[:0]):
        assert same_bytes(ck.silu(one), ck.silu(one))
    assert way.launched == 0 and way.whole == 4


def test_bad_calls_are_refused_behind_known_ones(way):
    x = drawn(5, 77).to(BF16)
    ck.silu_mul(x, x), ck.silu_mul(x, x)
    with pytest.raises(ShapeError, match="up"):
        ck.silu_mul(x, x[:4])
    with pytest.raises(DtypeError, match="up"):
        ck.silu_mul(x, x.to(FP16))
    with pytest.raises(DtypeError, match="x"):
        ck.silu(x.double())


@pytest.mark.parametrize("forgotten", ["kind", "dtype"])
def test_a_key_without_it_is_seen(way, monkeypatch, forgotten):
    """The mutant: a call is known by too little."""
    true = again._key
    monkeypatch.setattr(extension, "calls", lambda: None)

    def key(options, tensors):
        if forgotten == "kind":
            return true((), tensors)
        return options, tuple(t.shape for t in tensors)

    monkeypatch.setattr(again, "_key", key)
    x = drawn(5, 77).to(BF16)
    first = ck.silu(x)
    if forgotten == "kind":
        assert same_bytes(ck.tanh(x), first)
    else:
        ck.silu(x.to(FP16))
    assert way.launched == 1


def test_the_op_registers_what_prepares():
    for name in ("silu", "gelu", "sigmoid", "tanh", "silu_mul", "gelu_mul"):
        assert dispatch._TABLE[name]["triton"].prepare.endswith(
            ":prepare_gated" if "mul" in name else ":prepare_activation"
        )
    assert not dispatch._TABLE["silu_backward"]["triton"].prepare
    assert op.calls in again._all
