"""Tests of run.main: exit codes, the last line, the pictures."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.demo import run
from cute_kernels.gemm import api as gemm
from tests.demo.tiny import LEAST


@pytest.mark.parametrize("order", ["chain", pytest.param("tree", marks=pytest.mark.nightly)])
def test_the_demo_ends_with_zero_bytes_and_pictures(tmp_path, capsys, order):
    threads = torch.get_num_threads()
    assert run.main(tmp_path / "new", "cpu", None, 3, steps=2, setup=LEAST, order=order) == 0
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
    assert run.main(tmp_path, "cpu", 60, 3, steps=1, setup=LEAST) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ours: ") and not last.startswith("ours: 0 ")
