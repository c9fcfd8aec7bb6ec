"""Every public function and class has an example in its docstring, and the examples run."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator

import pytest
import torch

import cute_kernels as ck

#: What a call returns, or raises from the other process: nobody makes one.
RETURNED = {
    *("Contract", "BlockMask", "moe.Dispatch", "moe.Permutation", "moe.Routing"),
    *("schedulers.BlockMask", "schedulers.Machine", "schedulers.Safety", "schedulers.Schedule"),
    "moe.dispatch",  # needs processes: docs/moe.md
}


def public() -> Iterator[tuple[str, object]]:
    """(name below ``ck``, function or class) of all that is public."""
    for name in dir(ck):
        value = getattr(ck, name)
        if name.startswith("_"):
            continue
        if inspect.ismodule(value):
            names = getattr(value, "__all__", ())
            found = [(f"{name}.{below}", getattr(value, below)) for below in names]
        else:
            found = [(name, value)]
        yield from (
            pair for pair in found if inspect.isfunction(pair[1]) or inspect.isclass(pair[1])
        )


PUBLIC = dict(public())


def failures(docstring: str, name: str) -> int:
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(docstring, {"torch": torch, "ck": ck}, name, None, 0)
    assert test.examples, f"{name}: no example"
    return doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test).failed


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - RETURNED))
def test_an_example_runs(name):
    assert failures(inspect.getdoc(PUBLIC[name]), name) == 0


def test_what_has_no_example_is_public():
    assert set(PUBLIC) >= RETURNED and len(PUBLIC) > 80


def test_a_wrong_example_fails(capsys):
    assert failures(">>> ck.gelu(torch.tensor([1.0]))\ntensor([0.8])", "planted") == 1
    with pytest.raises(AssertionError, match="no example"):
        failures("Text alone.", "planted")
