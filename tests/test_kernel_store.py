"""Stored kernels: found by what they were made from, and by nothing else."""

from __future__ import annotations

import os
import time

import pytest
import torch

from cute_kernels.gemm.config import ColumnSumConfig
from ptxsim.skips import requires_sim
from tests import import_graph, kernel_store
from tests.contract import same_bytes

MODULE = "cute_kernels.gemm.kernel_column_sum_sm90"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_store, "_folder", tmp_path)
    return tmp_path


def number(folder):
    return lambda path: (path / "number").write_text(str(len(list(folder.iterdir()))))


def test_an_entry_is_made_once_from_the_same(folder):
    first = kernel_store.entry(("a", "b"), number(folder))
    assert kernel_store.entry(("a", "b"), lambda path: pytest.fail("made again")) == first
    assert kernel_store.entry(("ab", ""), number(folder)) != first
    assert kernel_store.pickled(("a",), lambda: [1.5]) == [1.5]
    assert kernel_store.pickled(("a",), lambda: pytest.fail("made again")) == [1.5]


def test_what_fails_is_not_stored(folder):
    def fail(path):
        (path / "part").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kernel_store.entry(("a",), fail)
    assert list(folder.iterdir()) == []


def test_of_two_workers_the_first_stores(folder):
    def slower(path):
        (path / "number").write_text("2")
        kernel_store.entry(("a",), lambda other: (other / "number").write_text("1"))

    path = kernel_store.entry(("a",), slower)
    assert (path / "number").read_text() == "1" and list(folder.iterdir()) == [path]


def test_entries_of_last_week_go(folder):
    old, used = (kernel_store.entry((name,), number(folder)) for name in "ab")
    (folder / "triton").mkdir()
    for path in (old, used, folder / "triton"):
        os.utime(path, (0, time.time() - kernel_store.UNUSED - 1))
    kernel_store.entry(("b",), lambda path: pytest.fail("made again"))
    kernel_store.keep_in(folder)
    assert {path.name for path in folder.iterdir()} == {used.name, "triton"}


@pytest.mark.parametrize("changed", ["gemm.kernel_column_sum_sm90", "gemm.config", "dsl.reduce"])
def test_a_kernel_follows_all_code_that_it_imports(changed, tmp_path):
    paths = dict(import_graph.modules())
    true = kernel_store.source_digest(MODULE)
    text = paths[changed].read_text()
    paths[changed] = tmp_path / "changed.py"
    paths[changed].write_text(text + "\n# a comment\n")
    assert kernel_store.source_digest(MODULE, paths) == true
    paths[changed].write_text(text + "\nADDED = 1\n")
    assert kernel_store.source_digest(MODULE, paths) != true


@requires_sim
@pytest.mark.sim
def test_a_stored_kernel_computes_the_bytes_of_a_new_one(folder, monkeypatch):
    rows = torch.randn(70, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    outs = []
    for _ in range(2):
        kernel = kernel_store.simulated(MODULE, ColumnSumConfig(dtype="bf16"))
        outs.append(torch.full((128,), float("nan"), dtype=torch.bfloat16))
        kernel(rows, outs[-1])
        monkeypatch.setattr("ptxsim.compile", lambda *a, **k: pytest.fail("compiled again"))
    assert same_bytes(*outs) and not outs[0].isnan().any()
