"""SM90 kernels on packs, in the simulator: one launch a pass, the bytes of each sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import DeviceError
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, config, launch, lowering
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.kv_ranges import ranges
from cute_kernels.sparse_attn.varlen import layout
from ptxsim.skips import requires_sim
from tests.contract import same_bytes
from tests.sparse_attn import pack_cases as known

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_a_pack test_nothing_is_read_from_the_host_but_offsets "
    "test_offsets_on_the_cpu_are_refused_in_a_graph "
    "test_offsets_on_a_gpu_are_left_there_where_kernels_read_them test_neighbours_do_not_show "
    "test_padded_batches_take_one_launch test_one_mask_for_the_pack_is_killed "
    "test_mutants_are_killed test_another_schedule_is_killed"
)
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

LENGTHS = [130, 0, 1, 61, 128]
#: Of tests that are not of a head size: the kernels of `test_a_pack`, compiled once a process.
DIM = 64
NIGHT = pytest.mark.nightly
#: (head size, number of a rule): each of both at every commit.
DAY = ((64, 1), (96, 2), (128, 0), (128, 3), (192, 2), (256, 1))


def compared(lengths, rule, drawn=None, ctas=7, **options) -> list[str]:
    """The names of what differs."""
    tensors = drawn or known.drawn(sum(lengths), dim=DIM)
    with known.on_sm90(ctas=ctas):
        out = known.packed(tensors, lengths, *rule, **options)
        return known.differing(out, known.alone(tensors, lengths, *rule, **options))


@pytest.mark.parametrize(
    ("dim", "rule"),
    [
        pytest.param(dim, rule, marks=[] if (dim, i) in DAY else NIGHT)
        for dim in config.HEAD_DIMS
        for i, rule in enumerate(known.RULES)
    ],
    ids=str,
)
def test_a_pack(dim, rule):
    assert compared(LENGTHS, rule, known.drawn(sum(LENGTHS), dim=dim)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_drawn_packs(seed):
    lengths, rule = known.lengths_of(seed), known.RULES[seed % 4]
    dim = config.HEAD_DIMS[seed % len(config.HEAD_DIMS)]
    drawn = known.drawn(sum(lengths), seed, heads=(4, 2), dim=dim)
    assert compared(lengths, rule, drawn, ctas=(1, 2, 7, 132)[seed % 4]) == []


@NIGHT
def test_options():
    """fp16, groups of query heads, a scale and a softcap."""
    drawn = known.drawn(200, 3, torch.float16, heads=(4, 2), dim=DIM)
    assert compared([40, 160], (True, (None, None)), drawn, scale=0.2, softcap=7.0) == []


def test_one_launch_a_pass(monkeypatch):
    """And one before it, and no copies."""
    calls = []
    monkeypatch.setattr(layout.Layout, "pad", lambda of, t, fill=0.0: pytest.fail("a copy"))
    true = launch.bind

    def bind(device, kernel, flatten=()):
        run = true(device, kernel, flatten)
        return lambda *args: (calls.append(kernel), run(*args))

    monkeypatch.setattr(launch, "bind", bind)
    tensors = known.drawn(sum(LENGTHS), dim=DIM)
    with known.on_sm90():
        known.packed(tensors, LENGTHS)
    # A backward is three kernels, and before each pass one says where sequences lie.
    assert len(calls) == (1 + 1) + (1 + 3)


def test_nothing_is_read_from_the_host_but_offsets(monkeypatch):
    """No list, no order and no mask is made for a pack, nor kept."""
    for owner, name in ((layout, "layout"), (layout, "_on_host"), (lowering, "admitted")):
        monkeypatch.setattr(owner, name, lambda *a, name=name: pytest.fail(name))
    monkeypatch.setattr(lowering.cache, "get", lambda key, make: pytest.fail(str(key)))
    lengths = [256, 128, 77]
    tensors = known.drawn(sum(lengths), dim=DIM)
    with known.on_sm90():
        out = known.packed(tensors, lengths)
        assert known.differing(out, known.trusted(tensors, known.offsets(lengths))) == []


def test_offsets_on_the_cpu_are_refused_in_a_graph(monkeypatch):
    """Whose replays would read what was in that memory."""
    monkeypatch.setattr(attention_op, "capturing", lambda: True)
    tensors = known.drawn(100)
    with known.on_sm90(), pytest.raises(DeviceError, match=r"cu_seqlens: .* CUDA graph"):
        known.packed(tensors, [60, 40])


def test_offsets_on_a_gpu_are_left_there_where_kernels_read_them(monkeypatch):
    """Else they come to the CPU, which waits; those on the CPU are looked at."""
    on_gpu, on_cpu = (SimpleNamespace(is_cuda=flag) for flag in (True, False))
    monkeypatch.setattr(
        attention_op, "varlen_offsets", lambda given, rows: ("looked at", given, rows)
    )
    q = torch.empty(1, 90, 2, 64)
    for reads in (True, False):
        monkeypatch.setattr(attention_op, "reads_keys_on_device", lambda device, reads=reads: reads)
        looked_at = "looked at", on_gpu, 90
        assert attention_op.offsets_of(on_gpu, q) == (on_gpu if reads else looked_at)
        assert attention_op.offsets_of(on_cpu, q) == ("looked at", on_cpu, 90)
    monkeypatch.undo()
    assert not attention_op.reads_keys_on_device("cpu")


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_neighbours_do_not_show(dim):
    """NaN in the others."""
    lengths, rule = [70, 100, 60], (True, (None, None))
    tensors = known.drawn(230, dim=dim)
    with known.on_sm90():
        want = known.packed([at(t, slice(70, 170)) for t in tensors], [100], *rule)
        for t in tensors[:4]:
            t[:70] = t[170:] = torch.nan
        out = known.packed(tensors, lengths, *rule)
    assert known.differing([at(t, slice(70, 170)) for t in out], want) == []


def at(t: torch.Tensor, tokens: slice) -> torch.Tensor:
    return t[:, tokens] if t.dim() == 2 else t[tokens]


#: (row, first, end) of sequences in columns.
PADDED = ((0, 0, 130), (1, 61, 200), (2, 199, 200))


def attended(rows, left: int | None = None) -> list[torch.Tensor]:
    """(out, dq, dk, dv) of a batch of 200 columns; ``rows``: (row, first, end) of its sequences."""
    real = torch.zeros(max(row for row, _, _ in rows) + 1, 200, dtype=torch.bool)
    for row, first, end in rows:
        real[row, first:end] = True
    position = torch.arange(200)
    recorded = None
    if left is not None:
        dense = (position <= position[:, None]) & (position >= position[:, None] - left)
        recorded = api.seen_columns(dense & real[:, None, None] & real[:, None, :, None])
    spans = api.kv_ranges(recorded, real, 0, 0, (len(real), 200, 200))
    g = torch.Generator().manual_seed(4)
    sizes = [(len(real), 200, n, DIM) for n in (2, 1, 1, 2)]
    *leaves, dout = (torch.randn(size, generator=g).bfloat16() for size in sizes)
    leaves = [t.requires_grad_() for t in leaves]
    with known.on_sm90():
        out = api.sequence_attention(*leaves, spans)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("left", [None, 30])
def test_padded_batches_take_one_launch(monkeypatch, left):
    """With the bytes of a launch for each sequence."""
    rows = PADDED
    calls = []
    true = attention_op._attend_run
    monkeypatch.setattr(attention_op, "_attend_run", lambda *a: (calls.append(1), true(*a))[1])
    out = attended(rows, left)
    assert not calls
    monkeypatch.setattr(ranges, "documents_of", lambda kv_ranges: None)
    want = attended(rows, left)
    assert len(calls) == len(rows)
    assert all(map(same_bytes, out, want))
    assert not out[0][0, 130:].any() and out[0][0, :130].any()


# ---- mutants -------------------------------------------------------------------------------------


def test_one_mask_for_the_pack_is_killed():
    """Blocks counted from the start of the pack: other bits."""
    lengths = [61, 130]
    tensors = known.drawn(191, dim=DIM)
    mask = BlockMask.from_cu_seqlens(known.offsets(lengths), causal=True)

    def at_once(q, k, v):
        inputs = (t[None] for t in (q, k, v))
        out, lse = ck.block_sparse_attention(*inputs, mask, return_lse=True)
        return out[0], lse[0]

    with known.on_sm90():
        want = known.alone(tensors, lengths)
        assert known.differing(known.differentiated(at_once, tensors), want)
        assert known.differing(known.packed(tensors, lengths), want) == []


def _gaps_of_nan(monkeypatch):
    pad = layout.Layout.pad
    monkeypatch.setattr(layout.Layout, "pad", lambda of, t, fill=0.0: pad(of, t, fill or torch.nan))


def _window_of_one_less(monkeypatch):
    mask = layout._mask
    monkeypatch.setattr(layout, "_mask", lambda of, left, right: mask(of, left - 1, right))


def _gaps_are_seen(monkeypatch):
    """As if a sequence ended where the next one begins."""
    mask = layout._mask

    def seen(of, left, right):
        ends = np.append(of.begins[1:], of.length)
        return mask(of._replace(lengths=ends - of.begins), left, right)

    monkeypatch.setattr(layout, "_mask", seen)


@pytest.mark.parametrize(
    ("mutant", "rule", "names"),
    [
        (_gaps_of_nan, (False, (40, 9)), {"out", "dq", "dk"}),
        (_window_of_one_less, (True, (70, None)), {"out", "lse"}),
        (_gaps_are_seen, (False, (None, 9)), {"out", "lse"}),
    ],
)
def test_mutants_are_killed(monkeypatch, mutant, rule, names):
    """In what each names, at least; of copies, as kernels of other GPUs read them."""
    monkeypatch.setattr(known, "IN_PLACE", False)
    lengths = [300, 90]
    tensors = known.drawn(390, dim=DIM)
    with known.on_sm90():
        want = known.alone(tensors, lengths, *rule)
        mutant(monkeypatch)
        monkeypatch.setattr(lowering.cache, "get", lambda key, make: make())
        assert names <= set(known.differing(known.packed(tensors, lengths, *rule), want))


def test_another_schedule_is_killed(monkeypatch):
    """Of copies; that of packs in place is not made here."""
    monkeypatch.setattr(known, "IN_PLACE", False)
    lengths = [512, 90]
    tensors = known.drawn(602, dim=DIM)
    with known.on_sm90():
        want = known.alone(tensors, lengths)
        assert known.differing(known.packed(tensors, lengths), want) == []
        admitted = lowering.admitted
        monkeypatch.setattr(
            lowering, "admitted", lambda mask, name, *rest: admitted(mask, "lpt", *rest)
        )
        monkeypatch.setattr(lowering.cache, "get", lambda key, make: make())
        assert known.differing(known.packed(tensors, lengths), want) == ["dq"]
