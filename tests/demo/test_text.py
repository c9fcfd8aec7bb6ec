"""Tests of the text: without padding bytes, prompts from what training does not see."""

from __future__ import annotations

import torch

from cute_kernels.demo import training
from cute_kernels.demo.model import PAD


def test_the_text_is_the_package_and_repeats():
    out = training.corpus()
    assert out == training.corpus()
    assert PAD not in out
    assert b"Every Python file of the package in name order" in out
    assert len(out) > 100_000


def test_split_keeps_every_byte_once():
    whole = bytes(range(1, 256)) * 100
    kept, heldout = training.split(whole)
    assert len(kept) + len(heldout) == len(whole)
    assert len(heldout) == 1024  # one block in sixteen
    assert training.encode(whole[15 * 1024 : 16 * 1024]).equal(heldout)


def test_windows_are_pieces_of_the_text():
    tokens = torch.arange(100)
    cut = training.windows(tokens, 5, 30, torch.Generator().manual_seed(1))
    assert cut.shape == (5, 30)
    assert bool((cut.diff(dim=1) == 1).all()) and len(set(cut[:, 0].tolist())) > 1
