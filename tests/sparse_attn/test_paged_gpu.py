"""ck.paged_attention on a GPU: the bytes of dense calls, graphs with changing lengths.

Dense calls of one query are those of one kernel, as the op may take the kernels that are tested.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.sparse_attn.gpu_cases import NEEDS_GPU, captured, one_kernel, require_on_streams
from tests.sparse_attn.paged_cases import Batch, drawn, on_card

pytestmark = [pytest.mark.gpu, NEEDS_GPU]

LENGTHS = [(1, 1500), (7, 400), (300, 300), (3, 2100), (1, 97), (16, 4100)]


def attend(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the public op."""
    *operands, scale, window, softcap, sinks = batch.operands()
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "return_lse": True}
    return ck.paged_attention(*operands, causal=True, window_size=window, **options)


def require_dense(batch: Batch) -> None:
    """Every row is its row in one dense call of its sequence."""
    out, lse = attend(batch)
    for n, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.queries(n)
        if rows.start == rows.stop:
            continue
        q = batch.q[rows][None]
        options = {"scale": batch.scale, "softcap": batch.softcap, "sinks": batch.sinks}
        want, want_lse = one_kernel(q, keys[None], values[None], **options)
        assert same_bytes(out[rows], want[0]), n
        assert same_bytes(lse[:, rows].contiguous(), want_lse[0]), n


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_rows_have_the_bytes_of_a_dense_call(width, page):
    require_dense(on_card(drawn(LENGTHS, (8, 2, width), page, seed=width, padding=5)))


def test_a_long_context():
    require_dense(on_card(drawn([(1, 130000), (2, 20000), (1, 5)], (8, 2, 128), 16, seed=3)))


@pytest.mark.parametrize("seed", range(500))
def test_drawn_batches(seed):
    chooser = random.Random(seed)
    lengths = []
    for _ in range(chooser.randint(1, 12)):
        keys = chooser.choice((chooser.randint(1, 700), chooser.randint(1, 40)))
        lengths.append((chooser.choice((1, 1, min(keys, 4), min(keys, 50), keys)), keys))
    group = chooser.randint(1, 16)
    options = {"softcap": chooser.choice((0.0, 20.0)), "with_sinks": chooser.random() < 0.3}
    page = chooser.choice((16, 32, 64, 128, 256))
    require_dense(on_card(drawn(lengths, (2 * group, 2, 64), page, seed=seed, **options)))


def test_a_graph_reads_other_lengths():
    short = on_card(drawn([(1, 100), (1, 90)], (8, 2, 128), 16, seed=1))
    long = on_card(drawn([(1, 1000), (1, 900)], (8, 2, 128), 16, seed=2))
    want = [attend(long)[0].clone()]
    held = dataclasses.replace(long, seqlens_k=long.seqlens_k.clone(), q=long.q.clone())
    replay, (out, _) = captured(lambda: attend(held))
    replay()
    assert same_bytes(out, want[0])
    held.seqlens_k.copy_(torch.tensor([500, 333], dtype=torch.int32))
    replay()
    cut = dataclasses.replace(held, seqlens_k=held.seqlens_k.clone())
    assert same_bytes(out, attend(cut)[0]) and not same_bytes(out, want[0])
    require_dense(short)


def test_ten_thousand_calls_on_two_streams():
    batch = on_card(drawn(LENGTHS, (8, 2, 128), 16, seed=5))
    require_on_streams(lambda: attend(batch), attend(batch), calls=10_000)
