"""Tests of run.main: exit codes, the last line, the pictures."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cute_kernels.demo import run
from cute_kernels.errors import ArgumentValueError, BackendUnavailable, MissingPackageError
from cute_kernels.gemm import api as gemm
from tests.demo.tiny import SETUP


@pytest.mark.parametrize("order", ["chain", pytest.param("tree", marks=pytest.mark.nightly)])
def test_the_demo_ends_with_zero_bytes_and_pictures(tmp_path, capsys, order):
    threads = torch.get_num_threads()
    assert run.main(tmp_path / "new", "cpu", None, 3, steps=2, setup=SETUP, order=order) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ours: 0 differing bytes of ")
    assert any("trained 2 steps" in line for line in lines)
    assert (tmp_path / "new" / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / "new" / "drift.svg").read_bytes()
    assert torch.get_num_threads() == threads


def test_a_differing_byte_is_exit_code_one(tmp_path, capsys, monkeypatch):
    right = gemm.linear

    def linear(x, *others, **options):
        return right(x, *others, **options) * (1.0 if x.shape[0] > 1 else 1.0078125)

    monkeypatch.setattr(gemm, "linear", linear)
    assert run.main(tmp_path, "cpu", 60, 3, steps=1, setup=SETUP) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ours: ") and not last.startswith("ours: 0 ")


@pytest.mark.parametrize("device", ["cuda:63", "mps", "no such device"])
def test_a_device_without_a_backend_is_refused(tmp_path, device):
    with pytest.raises(BackendUnavailable):
        run.main(tmp_path, device, 60, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "seconds,seed,steps,named",
    [
        (0, 0, None, "seconds"),
        (float("nan"), 0, None, "seconds"),
        (1, 0, 0, "steps"),
        (1, -1, 1, "seed"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, seconds, seed, steps, named):
    with pytest.raises(ArgumentValueError, match=f"{named}: expected"):
        run.main(tmp_path, "cpu", seconds, seed, steps)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(MissingPackageError, match=r"needs matplotlib: pip install .*\[demo\]"):
        run.main(tmp_path, "cpu", 60, 0)
