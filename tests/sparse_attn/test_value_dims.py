"""Heads of 192 whose v has 128, and of 256, through every op: shapes, graphs, bits, mutants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.library import opcheck

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, config, cpu, lowering, op, pack_gqa
from cute_kernels.sparse_attn.config import VALUE_DIMS
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests.contract import same_bytes
from tests.sparse_attn import cases, pack_cases, sequence_cases
from tests.sparse_attn.against_float64 import checked

WIDE = (192, 256)
SIZES = (1, 4, 2, 40, 70)
LENGTHS = [30, 0, 41]


def tensors(dim: int) -> cases.Inputs:
    return cases.inputs(*SIZES, dim, seed=dim)


def spans() -> torch.Tensor:
    """Of a batch of two, of which the first has three columns of padding."""
    padding = torch.arange(40)[None] >= torch.tensor([[3], [0]])
    return api.kv_ranges(None, padding, 0, 0, (2, 40, 40))


def rows(x: cases.Inputs, **options):
    return ck.block_sparse_attention(*x.leaves(), causal=True, return_lse=True, **options)


def pack(x: cases.Inputs, **options):
    inputs = (t[0] for t in x.leaves())
    offsets = pack_cases.offsets(LENGTHS)
    return ck.block_sparse_attention_varlen(*inputs, offsets, return_lse=True, **options)


def buffer(x: cases.Inputs, **options):
    return (api.sequence_attention(*x.leaves(), spans(), **options),)


#: How it is called, and (batch, query heads, KV heads, Sq, Sk).
CALLS = {
    "rows": (rows, SIZES),
    "pack": (pack, (1, 4, 2, 71, 71)),
    "buffer": (buffer, (2, 4, 2, 40, 40)),
}


def results(name: str, dim: int, run=None, **options) -> list[torch.Tensor]:
    """out, perhaps lse, and dq, dk, dv."""
    call, sizes = CALLS[name]
    x = cases.inputs(*sizes, dim, seed=dim)
    out = (run or call)(x, **options)
    dout = x.dout[0] if name == "pack" else x.dout
    return [t.detach() for t in (*out, *torch.autograd.grad(out[0], x.leaves(), dout))]


@pytest.mark.parametrize("dim", WIDE)
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_has_the_bytes_of_eager(name, dim):
    torch.compiler.reset()
    run = torch.compile(CALLS[name][0], fullgraph=True, backend="aot_eager")
    want, got = results(name, dim), results(name, dim, run)
    assert all(map(same_bytes, got, want)) and want[0].shape[-1] == VALUE_DIMS[dim]
    assert [t.shape[-1] for t in want[-3:]] == [dim, dim, VALUE_DIMS[dim]]


def every_op(dim: int) -> Iterator[tuple[str, tuple]]:
    """(op, arguments) of three forwards and three backwards."""
    batch, heads, kv_heads, q_len, kv_len = SIZES
    sizes = (batch, q_len, kv_len, heads, kv_heads, dim)
    numbers = dim**-0.5, 0.0, None
    lists = lowering.build_lists("", True, "spt", True, sizes, "cpu")
    of_pack = op.varlen_offsets(pack_cases.offsets(LENGTHS), 71), None, 0
    rest = {
        "rows": (op.block_sparse_attention, (*lists, True, *numbers)),
        "pack": (op.varlen_attention, (*of_pack, *numbers)),
        "buffer": (op.sequence_attention, (spans(), *numbers)),
    }
    public_names = "block_sparse_attention", "varlen_attention", "sequence_attention"
    for public, (name, (run, more)) in zip(public_names, rest.items(), strict=True):
        x = cases.inputs(*CALLS[name][1], dim, seed=dim)
        plain = [t.detach() for t in x.leaves()]
        yield public, (*x.leaves(), *more)
        yield f"{public}_backward", (x.dout, x.dlse, *plain, *run(*plain, *more), *more)


@pytest.mark.parametrize("dim", WIDE)
def test_opcheck(dim):
    for name, inputs in every_op(dim):
        verdicts = opcheck(getattr(torch.ops.cute_kernels, name).default, inputs)
        assert set(verdicts.values()) == {"SUCCESS"}, name


@pytest.mark.parametrize("name", ["block_sparse_attention", "varlen_attention"])
def test_a_fake_of_the_width_of_q_is_killed(monkeypatch, name):
    inputs = dict(every_op(192))[name]
    monkeypatch.setattr(op, "shape_of_out", lambda q, v: q.shape)
    with pytest.raises(Exception, match=r"192.*128|128.*192"):
        opcheck(getattr(torch.ops.cute_kernels, name).default, inputs)


@pytest.mark.parametrize("dim", WIDE)
def test_meta(dim):
    x = tensors(dim)
    q, k, v = (t.detach().to("meta") for t in x.leaves())
    out, lse = ck.block_sparse_attention(q, k, v, return_lse=True)
    assert out.shape == x.dout.shape and lse.shape == x.dlse.shape and out.is_meta


@pytest.mark.parametrize("dim", WIDE)
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 40, 70), (2, 0, 70), (2, 40, 0)])
def test_sizes_of_zero(dim, batch, q_len, kv_len):
    x = cases.inputs(batch, 4, 2, q_len, kv_len, dim)
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    for inputs in (None, sinks):
        out, lse = rows(x, sinks=inputs)
        assert out.shape == x.dout.shape and not out.any() and lse.shape == x.dlse.shape
        grads = torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))
        assert [g.shape for g in grads] == [t.shape for t in x.leaves()]
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("name", CALLS)
def test_the_scale_is_of_q_and_k(name):
    want = results(name, 192)
    assert all(map(same_bytes, results(name, 192, scale=192**-0.5), want))
    assert not same_bytes(results(name, 192, scale=128**-0.5)[0], want[0])


@pytest.mark.parametrize("dim", WIDE)
@pytest.mark.parametrize("rule", pack_cases.RULES, ids=str)
def test_a_pack(dim, rule):
    lengths = [130, 0, 1, 61]
    inputs = pack_cases.drawn(sum(lengths), dim=dim)
    packed_results = pack_cases.packed(inputs, lengths, *rule)
    assert pack_cases.differing(packed_results, pack_cases.alone(inputs, lengths, *rule)) == []


@pytest.mark.parametrize("dim", WIDE)
def test_a_buffer(monkeypatch, dim):
    """Behind padding, in a pack of documents, in a cache that dropped keys."""
    monkeypatch.setattr(sequence_cases, "D", dim)
    short, pad, long = 137, 20, sequence_cases.S
    out = sequence_cases.behind((pad, pad + long - short), (long, short), pad + long)
    assert sequence_cases.differing(out[0], sequence_cases.alone(long)) == []
    assert sequence_cases.differing(out[1], sequence_cases.alone(short, seed=2)) == []
    assert sequence_cases.differing(*sequence_cases.packed(60, 40)) == []
    rows = sequence_cases.cached(200, 1, sequence_cases.CHUNKS)
    assert same_bytes(rows, sequence_cases.alone(sequence_cases.CACHED, window=200)[0])


def test_v_beside_k_in_one_buffer():
    """As DeepSeek's models make them: what stands behind v's columns, NaN here, is not read."""
    x = tensors(192)
    want = [t.detach() for t in rows(x)]
    both = torch.full((*x.k.shape[:3], 320), torch.nan).bfloat16()
    both[..., :192], both[..., 192:] = x.k.detach(), x.v.detach()
    around = torch.full((*x.v.shape[:3], 256), torch.nan).bfloat16()
    around[..., 64:192] = x.v.detach()
    for k, v in ((both[..., :192], both[..., 192:]), (x.k.detach(), around[..., 64:192])):
        out = ck.block_sparse_attention(x.q.detach(), k, v, causal=True, return_lse=True)
        assert all(map(same_bytes, out, want))


def test_stacked_heads_keep_their_widths():
    """What a backward of SM90 makes of masks by query head: rows of dout have v's columns."""
    x, of = tensors(192), pack_gqa.PackedGqa.of_blocks(40, 4, 2)
    q, k, v = (t.detach() for t in x.leaves())
    out, lse = rows(x)
    inputs = Saved(q, k, v, out.detach(), lse.detach())
    grads, saved = of.operands(Grads(x.dout, x.dlse), inputs)
    assert saved.k is k and saved.v is v and saved.q.shape == (1, 256, 2, 192)
    assert saved.out.shape == grads.dout.shape == (1, 256, 2, 128)
    for made, t in ((saved.q, q), (saved.out, inputs.out), (grads.dout, x.dout)):
        assert same_bytes(of.unpack(made), t)


CASE = cases.Case(
    9,
    "by hand",
    *(2, 4, 2, 100, 200, 192),
    torch.bfloat16,
    0.0,
    "lpt",
    True,
    BlockMask.sliding_window(100, 200, left=90, right=40),
)


def test_the_case_of_the_mutants_is_right():
    assert max(checked(CASE).values()) <= 1


def scale_of_v(scale, head_dim):
    return scale or VALUE_DIMS[head_dim] ** -0.5


def half_a_delta(dos, outs, dlse):
    return true_delta(dos[..., :64], outs[..., :64], dlse)


def scores_of_the_width_of_v(queries, keys, scale, softcap):
    return true_scores(queries[:, :128], keys[:, :128], scale, softcap)


def half_of_another_row(t):
    """The second half of v's columns from the row behind."""
    if t.shape[3] == 128:
        t = torch.cat((t[..., :64], t.roll(-1, 1)[..., 64:]), 3)
    return true_blocked(t)


true_delta, true_scores, true_blocked = cpu._delta, cpu._scores, cpu._blocked
MUTANTS = {
    "a scale of v's head size": (config, "score_scale", scale_of_v, "out"),
    "delta over half of v": (cpu, "_delta", half_a_delta, "dq"),
    "scores over v's head size": (cpu, "_scores", scores_of_the_width_of_v, "out"),
    "half of v from another row": (cpu, "_blocked", half_of_another_row, "out"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, monkeypatch):
    module, target, mutant, seen = MUTANTS[name]
    monkeypatch.setattr(module, target, mutant)
    assert checked(CASE)[seen] > 2
