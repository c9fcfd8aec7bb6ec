"""Attention sinks on every backend: values and gradients against float64, bits, mutants."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, config, launch
from tests import certified
from tests.contract import same_bytes
from tests.sparse_attn import against_float64, cases, mutated, pack_cases
from tests.sparse_attn.gpu_cases import GPU
from tests.sparse_attn.sink_cases import CASES, MASKS, WIDE, S, drawn_sinks, excess

#: While the kernels are proved all but the first of `test_values` run by night.
SIM = certified.marks("sparse_attn", "test_values")
NIGHT = [*SIM, pytest.mark.nightly]


@contextlib.contextmanager
def on_triton():
    from cute_kernels.sparse_attn.triton import launch as triton_launch
    from tests.sparse_attn.triton_engine import DENSE

    launchers = pack_cases.launched(triton_launch.forward, triton_launch.backward)
    with DENSE.simulated(wgmma_math=2), launchers:
        yield


ENGINES = {
    "cpu": contextlib.nullcontext,
    "sm90": functools.partial(pack_cases.on_sm90, wgmma_math="hopper"),
    "triton": on_triton,
    "gpu": contextlib.nullcontext,
}


def attended(engine: str, x: cases.Inputs, mask, sinks, with_lse: bool = True, **options):
    """Return out, lse, dq, dk, dv, dsinks."""
    with ENGINES[engine]():
        device = "cuda" if engine == "gpu" else "cpu"
        return against_float64.attended(x, mask, sinks, with_lse, device, **options)


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(pytest.param("cpu", case, id=f"cpu {case}") for case in (*CASES, *WIDE)),
        *(pytest.param("triton", case, id=f"triton {case}", marks=NIGHT) for case in WIDE),
        *(
            pytest.param(engine, case, id=f"{engine} {case}", marks=NIGHT if at else SIM)
            for engine in ("sm90", "triton")
            for at, case in enumerate(CASES)
        ),
        *(pytest.param("gpu", case, id=f"gpu {case}", marks=GPU) for case in CASES),
    ],
)
def test_values(engine, case):
    dim, dtype, form, softcap = case
    x, mask = cases.inputs(2, 4, 2, S, S, dim, dtype, seed=dim), MASKS[form]()
    sinks = drawn_sinks(4, torch.float32 if dim == 64 else dtype)
    for with_lse in (True, False):
        out = attended(engine, x, mask, sinks, with_lse, softcap=softcap)
        above = excess(out, x, mask, sinks, with_lse, softcap)
        assert all(ratio <= 1 for ratio in above.values()), above
        for _ in range(20 if engine == "gpu" else 0):
            again = attended(engine, x, mask, sinks, with_lse, softcap=softcap)
            assert all(map(same_bytes, again, out))
    if form == "bits":
        # All of the weight of a row without keys is its sink's.
        assert not out[0][:, 40:50].any() and not out[0][:, 128:].any()
        assert (out[1][:, :, 128:] - sinks.detach().float()[:, None]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "engine", ["cpu", pytest.param("sm90", marks=SIM), pytest.param("triton", marks=NIGHT)]
)
def test_sinks_of_minus_infinity_are_none(engine):
    x, mask = cases.inputs(1, 2, 1, S, S, 64), MASKS["band"]()
    none = torch.full((2,), -math.inf).requires_grad_()
    out = attended(engine, x, mask, none)
    with ENGINES[engine]():
        want = ck.block_sparse_attention(*x.leaves(), mask, return_lse=True)
        grads = torch.autograd.grad(want, x.leaves(), (x.dout, x.dlse))
    assert all(map(same_bytes, out[:5], (*want, *grads)))
    assert not out[5].any()


@pytest.mark.parametrize(
    ("engine", "dim"),
    [
        ("cpu", 64),
        pytest.param("sm90", 64, marks=SIM),
        pytest.param("triton", 64, marks=NIGHT),
        *(pytest.param("gpu", dim, marks=GPU) for dim in config.VALUE_DIMS),
    ],
)
def test_rows_without_keys_may_have_any_gradient(engine, dim):
    """A padded row: NaN and Inf in its dout reach no sink, on a CPU nothing at all."""
    x, dense = cases.inputs(1, 2, 1, 40, 70, dim), torch.ones(40, 70, dtype=torch.bool)
    dense[3:9] = dense[38] = False
    mask, sinks = BlockMask.from_dense(dense), drawn_sinks(2)
    dirty = dataclasses.replace(x, dout=x.dout.clone())
    dirty.dout[:, 3:6], dirty.dout[:, 7, :, 5], dirty.dout[:, 38] = math.nan, math.inf, -math.inf
    for with_lse in (True, False):
        want, out = (attended(engine, t, mask, sinks, with_lse) for t in (x, dirty))
        assert out[5].isfinite().all() and same_bytes(out[5], want[5])
        assert engine != "cpu" or all(map(same_bytes, out, want))


@pytest.mark.parametrize(
    "engine", ["cpu", *(pytest.param(e, marks=NIGHT) for e in ("sm90", "triton"))]
)
def test_a_gradient_that_is_nan_is_not_hidden(engine):
    """NaN in dout of a row with keys, in a column where out is 0."""
    x, sinks = cases.inputs(1, 2, 1, 40, 70, 64), drawn_sinks(2)
    with torch.no_grad():
        x.v[..., :63] = 0.0
    x.dout[:, 5, :, 2] = math.nan
    assert attended(engine, x, BlockMask.full(40, 70), sinks)[5].isnan().all()


@pytest.mark.parametrize(
    "engine", ["cpu", pytest.param("sm90", marks=SIM), pytest.param("triton", marks=NIGHT)]
)
def test_packs(engine):
    """A sequence's bytes, with its sinks', are those that it has alone."""
    lengths = [130, 1, 61]
    inputs = pack_cases.drawn(sum(lengths), heads=(4, 2))
    options = {"sinks": drawn_sinks(4).detach()}
    with ENGINES[engine]():
        packed_results = pack_cases.packed(inputs, lengths, **options)
        assert (
            pack_cases.differing(packed_results, pack_cases.alone(inputs, lengths, **options)) == []
        )
        without = pack_cases.packed(inputs, lengths)
    assert pack_cases.differing(packed_results, without) == list(pack_cases.NAMES)


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=SIM) for rows in (1, 5)])
def test_spans(rows):
    """Decoding: for one row a tile has a group's query heads, each with its own sink."""
    g = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(2, n, h, 64, generator=g).bfloat16() for n, h in ((rows, 4), (90, 2), (90, 2))
    )
    padding = torch.arange(90) >= torch.tensor([[0], [11]])
    spans = api.kv_ranges(None, padding, 90 - rows, 0, (2, rows, 90))
    sinks = drawn_sinks(4).detach()
    want = api.sequence_attention(q, k, v, spans, sinks=sinks)
    with pack_cases.on_sm90():
        runs = api.sequence_attention(q, k, v, spans, sinks=sinks)
        one, _ = launch.forward(q, k, v, spans, 0.125, 0.0, sinks)
    assert same_bytes(one, runs)
    assert (runs.float() - want.float()).abs().max() < 0.02


def test_gradients_sum_over_runs():
    """Sequences that are passes of their own share their sinks."""
    lengths, sinks = [60, 90], drawn_sinks(2)
    q, k, v, dout, dlse = pack_cases.drawn(150)
    run = functools.partial(ck.block_sparse_attention_varlen, causal=True, return_lse=True)
    results = run(q, k, v, pack_cases.offsets(lengths), sinks=sinks)
    out = torch.autograd.grad(results, sinks, (dout, dlse))[0]
    parts = []
    for rows in (slice(0, 60), slice(60, 150)):
        own = run(q[rows], k[rows], v[rows], torch.tensor([0, rows.stop - rows.start]), sinks=sinks)
        parts.append(torch.autograd.grad(own, sinks, (dout[rows], dlse[:, rows]))[0])
    assert same_bytes(out, parts[0] + parts[1])


# ---- mutants -------------------------------------------------------------------------------------

_IN_LANE_0 = "cutlass.Float32(1.0) if lane % 4 == 0 else cutlass.Float32(0.0)"
_SCALED = "sink * cutlass.Float32(math.log2(math.e)) / c"
SM90_MUTANTS = {
    "in every lane": ("dsl.softmax", _IN_LANE_0, "cutlass.Float32(1.0)"),
    "of the first row": (
        "dsl.softmax",
        "half, sinks[index], lane",
        "half, sinks[0], lane",
    ),
    "base e": ("dsl.softmax", _SCALED, "sink / c"),
    "of the first head": (
        "sparse_attn.kernel_fwd_sm90",
        "tensors.mSinks[head, None]",
        "tensors.mSinks[0, None]",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SIM) for name in SM90_MUTANTS])
def test_mutants_of_the_kernel_are_killed(tmp_path, name):
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, n, h, 64, generator=g).bfloat16() for n, h in ((1, 4), (90, 2), (90, 2))
    )
    spans, sinks = api.kv_ranges(None, None, 89, 0, (1, 1, 90)), drawn_sinks(4).detach()
    inputs = q, k, v, spans, 0.125, 0.0, sinks
    with pack_cases.on_sm90():
        want, _ = launch.forward(*inputs)
    with pack_cases.on_sm90(forward=mutated.kernels(tmp_path, *SM90_MUTANTS[name])):
        assert not same_bytes(launch.forward(*inputs)[0], want)
