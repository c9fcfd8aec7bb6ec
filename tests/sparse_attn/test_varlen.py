"""Sequences in a pack have the bytes that each has alone: forward, lse and gradients."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.sparse_attn.kv_ranges import ranges
from tests.contract import same_bytes
from tests.sparse_attn.pack_cases import (
    RULES,
    alone,
    differing,
    drawn,
    lengths_of,
    offsets,
    packed,
)

H, HKV, D = 2, 1, 64


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_pack(rule):
    lengths = [130, 0, 1, 61, 128, 300]
    tensors = drawn(sum(lengths))
    assert differing(packed(tensors, lengths, *rule), alone(tensors, lengths, *rule)) == []


NIGHT = [pytest.param(32 * i, 32, marks=pytest.mark.nightly) for i in range(16)]


@pytest.mark.parametrize(("first", "count"), [(0, 8), *NIGHT])
def test_drawn_packs(first, count):
    """512 of them by night."""
    for seed in range(first, first + count):
        lengths, rule = lengths_of(seed), RULES[seed % len(RULES)]
        tensors = drawn(sum(lengths), seed)
        differences = differing(packed(tensors, lengths, *rule), alone(tensors, lengths, *rule))
        assert differences == [], (lengths, rule)


def test_options():
    lengths = [40, 170]
    tensors = drawn(210, dtype=torch.float16)
    options = {"scale": 0.2, "softcap": 7.0}
    assert not differing(packed(tensors, lengths, **options), alone(tensors, lengths, **options))


def test_neighbours_do_not_show():
    """NaN in the others, and another order of the pack."""
    tensors = drawn(200)
    want = packed([t[:, :70] if t.dim() == 2 else t[:70] for t in tensors], [70])
    for t in tensors[:3]:
        t[70:] = torch.nan
    behind = packed(tensors, [70, 130])
    turned = [
        torch.cat([t[:, 70:], t[:, :70]], 1) if t.dim() == 2 else t.roll(-70, 0) for t in tensors
    ]
    before = packed(turned, [130, 70])
    sequence_tensors = [t[:, :70] if i == 1 else t[:70] for i, t in enumerate(behind)]
    last = [t[:, 130:] if i == 1 else t[130:] for i, t in enumerate(before)]
    assert differing(sequence_tensors, want) == [] and differing(last, want) == []


def test_results_and_gradients_of_nothing():
    for lengths in ([], [0, 0]):
        out = packed(drawn(0), lengths)
        assert [tuple(t.shape) for t in out] == [
            (0, H, D), (H, 0), (0, H, D), (0, HKV, D), (0, HKV, D),
        ]  # fmt: skip


def test_int64_and_no_lse():
    q, k, v, _, _ = drawn(90)
    with torch.no_grad():
        one = ck.block_sparse_attention_varlen(q, k, v, offsets([30, 60], torch.int64))
        two, _ = ck.block_sparse_attention_varlen(q, k, v, offsets([30, 60]), return_lse=True)
    assert same_bytes(one, two)


def test_one_graph_for_every_pack():
    """fullgraph, lengths that change, the bytes of eager."""
    torch._dynamo.reset()
    count = 0

    def counting(graph, _):
        nonlocal count
        count += 1
        return graph.forward

    def attend(q, k, v, cu_seqlens):
        return ck.block_sparse_attention_varlen(q, k, v, cu_seqlens, causal=True)

    run = torch.compile(attend, fullgraph=True, dynamic=True, backend=counting)
    for seed, lengths in enumerate(([30, 60], [100, 20, 7], [128, 129])):
        q, k, v, _, _ = drawn(sum(lengths), seed)
        assert same_bytes(run(q, k, v, offsets(lengths)), attend(q, k, v, offsets(lengths)))
    assert count <= 2


# ---- mutants -------------------------------------------------------------------------------------


def _one_more_key(offsets, left, right):
    """A sequence sees the first key of the next one."""
    spans = true_spans(offsets, left, right)
    spans[..., 3] = (spans[..., 3] + 1).clamp(max=int(offsets[-1]))
    return spans


def _positions_in_the_pack(offsets, left, right):
    """Keys are in the blocks of the pack."""
    spans = true_spans(offsets, left, right)
    spans[..., 0] = 0
    return spans


def _window_of_one_less(offsets, left, right):
    return true_spans(offsets, None if left is None else left - 1, right)


true_spans = ranges.of_varlen


@pytest.mark.parametrize("mutant", [_one_more_key, _positions_in_the_pack, _window_of_one_less])
def test_mutants_are_killed(monkeypatch, mutant):
    lengths, rule = [130, 61, 300], (False, (40, 9))
    tensors = drawn(sum(lengths))
    want = alone(tensors, lengths, *rule)
    assert differing(packed(tensors, lengths, *rule), want) == []
    monkeypatch.setattr(ranges, "of_varlen", mutant)
    assert differing(packed(tensors, lengths, *rule), want)


# ---- bad inputs ----------------------------------------------------------------------------------


def call(change: dict):
    q, k, v, _, _ = drawn(60)
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens": offsets([20, 40])} | change
    return ck.block_sparse_attention_varlen(**inputs)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cu_seqlens": torch.tensor([0, 30, 20, 60])}, errors.ArgumentValueError, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([1, 60])}, errors.ArgumentValueError, "from 0 to 60"),
        ({"cu_seqlens": torch.tensor([0, 59])}, errors.ArgumentValueError, "tokens of q"),
        ({"cu_seqlens": torch.tensor([0, 61])}, errors.ArgumentValueError, "0, 61"),
        ({"cu_seqlens": torch.tensor([0.0, 60.0])}, errors.DtypeError, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([[0, 60]])}, errors.ShapeError, r"\[N \+ 1\]"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, errors.ShapeError, "at least 1"),
        ({"cu_seqlens": [0, 60]}, errors.ArgumentTypeError, "cu_seqlens"),
        ({"q": drawn(60)[0][None]}, errors.ShapeError, r"\[T, Hq, D\]"),
        ({"k": drawn(59)[1]}, errors.ShapeError, "60 tokens"),
        ({"v": drawn(60)[2].half()}, errors.DtypeError, "v"),
        ({"q": drawn(60)[0].float()}, errors.DtypeError, "q"),
        ({"k": "k"}, errors.ArgumentTypeError, "k"),
        ({"causal": 1}, errors.ArgumentTypeError, "causal"),
        ({"window_size": 5}, errors.ArgumentTypeError, "window_size"),
        ({"window_size": (5,)}, errors.ArgumentTypeError, "window_size"),
        ({"window_size": (-1, None)}, errors.ArgumentValueError, "from 0"),
        ({"window_size": (True, None)}, errors.ArgumentTypeError, "whole numbers"),
        ({"window_size": (1.5, None)}, errors.ArgumentTypeError, "whole numbers"),
        ({"scale": 0.0}, errors.ArgumentValueError, "scale"),
        ({"softcap": -1.0}, errors.ArgumentValueError, "softcap"),
    ],
)
def test_bad_inputs(change, error, words):
    with pytest.raises(error, match=words):
        call(change)
