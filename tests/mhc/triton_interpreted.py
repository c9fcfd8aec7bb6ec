"""The Triton mhc in Triton's interpreter: bugs planted in copies, and ops of several kernels.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  2^y is the CPU backend's, casts to bf16 round, and an fma is a product and a sum, as
the CPU backend's are: then most results are its bytes.
"""

from __future__ import annotations

import os

import pytest
import torch

from cute_kernels.mhc import api, op
from cute_kernels.mhc.triton import launch
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan

from ..interpreted import same_on_every_machine  # noqa: F401
from . import launcher_cases as cases
from . import triton_rows as rows
from .launcher_cases import BF16, FP32, Shape
from .triton_harness import copy_of, cpu_arithmetic, device_guard, made_small  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: Tails of tokens, of channels and of a product; three chunks of channels (`made_small`).
CN = Shape(9, 73, 4, "cn", FP32)
NC = CN._replace(layout="nc", n=2)
ROUNDED = Shape(5, 40, 2, "cn", BF16)
SHAPES = (CN, NC, ROUNDED, Shape(70, 9, 2, "nc", FP32, "bf16x3", norm_weight=False, bias=False))


CHECKS = cases.TRITON | cases.EXACT


def of(check: str, shape: Shape = CN):
    return lambda launch: CHECKS[check](launch, cases.given(shape))


def by_rows(launch):
    rows.few_rows(launch, CN._replace(c=40, n=2))


def by_cuts(launch):
    rows.no_cut_shows(launch, cases.given(Shape(2 * 64 + 9, 3, 2, "nc", FP32)), 64)


SIZE = "chunk_channels(streams.n, mapping.precision)"
BEHIND = "behind = tl.cast(chunk, tl.int64) * M"
STREAM_TAIL = "mask=in_m & (k < C * N), other=0.0).to(tl.float32)"
Y = "_column(res_ptr, rows, res_m, i * N + j, in_m), total)\n            made"
PASSED = "total = tl.fma(dy[j], _column(res_ptr, rows, res_m, i * N + j, in_m), total)"
ROUNDS = "total.to(y_ptr.dtype.element_ty).to(tl.float32)"
PART = "total += tl.load(ptrs + tl.cast(part, tl.int64) * L, mask=inside, other=0.0)"
INTO = "total = tl.load(into_phi_ptr + place, mask=inside, other=0.0)"
WEIGHTED = "psi = psi * tl.load(weight_ptr + k, mask=in_k, other=0.0)[:, None]"
KEPT = "tl.store(into_phi_ptr + place, total, mask=inside)"
ROW_SUMS = "rows = tl.div_rn(y, _line_sum(y, 2, ROWS, N) + eps)"
COLUMN_SUMS = "return rows, tl.div_rn(rows, _line_sum(rows, 1, ROWS, N) + eps)"
EXPANDED_BIAS = "f += _load_bias(bias_ptr, first, C, BLOCK)\n                program"
BACKWARD_TILES = "    rows, block = TRITON.reduce\n    reduced"

MUTANTS = {
    "chunk_follows_m": ([(SIZE, f"{SIZE} // (1 + (len(x) > 8))")], by_rows),
    "lanes_follow_m": (
        [(BACKWARD_TILES, BACKWARD_TILES.replace("reduce\n",
          "reduce\n    block = 64 if m > 8 else 16\n"))],
        by_rows,
    ),
    "chunks_descending": ([(BEHIND, "behind = tl.cast(chunks - chunk, tl.int64) * M")],
        of("exact_coefficients")),
    "last_chunk_dropped": ([("for chunk in tl.range(1, chunks):",
        "for chunk in tl.range(1, chunks - 1):")],
        of("exact_coefficients")),
    "layout_swapped": ([('streams.layout == "cn"', 'streams.layout == "nc"')], of("combine")),
    "layout_swapped_in_the_projection": ([("    if CN:\n        begin,",
        "    if not CN:\n        begin,")],
        of("projection")),
    "streams_split_in_another_order": ([("made = (x0, x1, x2, x3)", "made = (x0, x2, x1, x3)")],
        of("combine")),
    "channel_tail_unmasked": ([(STREAM_TAIL, STREAM_TAIL.replace("C * N", "C * N + 1"))],
        of("reduce")),
    "product_tail_unmasked": ([("in_k = inside < length", "in_k = inside < length + 1")],
        of("projection")),
    "product_tail_dropped": ([("steps = (length - 1) // BLOCK_K + 1", "steps = length // BLOCK_K")],
        of("projection", NC)),
    "token_tail_dropped": ([("(count - 1) // BLOCK_M + 1", "count // BLOCK_M")],
        of("projection_backward")),
    "squares_of_one_step": ([("squares = tl.fma(x, x, squares)", "squares = x * x")],
        of("projection")),
    "norm_weight_forgotten": ([(WEIGHTED, "pass")],
        of("projection")),
    "norm_weight_forgotten_in_dx": ([("made = made + (psi[i] * weight[i],)",
        "made = made + (psi[i],)")],
        of("projection_backward")),
    "res_transposed": ([(Y, Y.replace("i * N + j", "j * N + i"))], of("combine")),
    "res_transposed_in_dx": ([(PASSED, PASSED.replace("i * N + j", "j * N + i"))],
        of("projection_backward")),
    "dres_transposed": ([("tl.fma(x[i], dy[j], of_res[i * N + j])",
        "tl.fma(x[j], dy[i], of_res[i * N + j])")],
        of("reduce")),
    "collapsed_before_the_rounding": ([(ROUNDS, "total")], of("exact_streams", ROUNDED)),
    "bias_forgotten_in_dpost": ([(EXPANDED_BIAS, "program")], of("reduce")),
    "room_between_rows_forgotten": ([("0 if rows is None else rows.stride(0)",
        "0 if rows is None else rows.shape[1]")],
        of("combine")),
    "parts_behind_the_tokens_kept": ([("values[_tiles(m, tokens) :] = 0.0",
        "values[_tiles(m, tokens) :] = 1e-3")],
        of("reduce")),
    "parts_descending": ([(PART, PART.replace("cast(part,", "cast(count - part,"))],
        cases.parts_are_added),
    "parts_of_chunks_in_one_chain": ([("if parts.group > 1:", "if False:")], cases.parts_are_added),
    "weights_added_at_the_end": (
        [(INTO, "total = tl.zeros([WIDTH, BLOCK], tl.float32)"),
         (KEPT, KEPT.replace("total,", "total + tl.load(into_phi_ptr + place, mask=inside),"))],
        of("exact_gradients"),
    ),
    "chunk_of_tokens_begins_elsewhere": ([("start = tl.cast(chunk, tl.int64) * TOKENS",
        "start = tl.cast(chunk, tl.int64) * (TOKENS - 1)")],
        by_cuts),
    "one_chunk_of_all_tokens": (
        [("chunks, (block_m, block_c) = _tiles(m, TOKENS), TRITON.back",
          "chunks, (block_m, block_c) = 1, TRITON.back"),
         ("count = tl.minimum(M - start, TOKENS)", "count = M - start")],
        by_cuts,
    ),
    "epsilon_outside_the_root": (
        [("tl.sqrt_rn(square)", "(tl.sqrt_rn(square - eps) + eps)")],
        of("exact_coefficients"),
    ),
    "pre_eps_forgotten": ([("sigmoid + pre_eps, mask", "sigmoid, mask")], of("exact_coefficients")),
    "post_scale_forgotten_in_its_slope": ([("d_post * (post_scale * slope)", "d_post * slope")],
        of("exact_gradients")),
    "dms_doubled": ([("2.0 / k)", "1.0 / k)")], of("projection_backward")),
    "one_iteration_more": ([("for _ in tl.range(1, iterations):",
        "for _ in tl.range(0, iterations):")],
        of("exact_coefficients")),
    "columns_before_rows": (
        [(ROW_SUMS, ROW_SUMS.replace("y, 2",
          "y, 1")), (COLUMN_SUMS, COLUMN_SUMS.replace("rows, 1", "rows, 2"))],
        of("exact_coefficients"),
    ),
    "last_segment_only": ([("for back in tl.range(0, segments):", "for back in tl.range(0, 1):")],
        of("exact_gradients")),
    "epsilon_forgotten_in_the_gradient": ([("gradient = gradient * factor", "pass")],
        of("exact_gradients")),
    "rows_of_zeros_not_shared": ([("d_pre.stride(0),", "n,")], of("exact_gradients")),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, monkeypatch, name):
    edits, check = MUTANTS[name]
    mutant = copy_of(tmp_path, *edits)
    made_small(mutant, monkeypatch)
    follow_small(monkeypatch)
    with pytest.raises(AssertionError):
        check(mutant)


LIVING = {
    **{f"{name}-{i}": of(name, shape) for name in CHECKS for i, shape in enumerate(SHAPES)},
    "rows": by_rows,
    "cuts": by_cuts,
    "parts": cases.parts_are_added,
    "far logits": cases.far_logits,
}


@pytest.mark.parametrize("name", LIVING)
def test_an_unedited_copy_lives(tmp_path, monkeypatch, name):
    copy = copy_of(tmp_path)
    made_small(copy, monkeypatch)
    follow_small(monkeypatch)
    LIVING[name](copy)


def follow_small(monkeypatch) -> None:
    """The cases expect chunks of `made_small`."""
    monkeypatch.setattr(cases, "TOKENS", 64)
    monkeypatch.setattr(cases, "chunk_channels", lambda n, precision: 32)
    monkeypatch.setattr(cases.cpu, "chunk_channels", lambda n, precision: 32)


# ---- through the ops -----------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 32 channels and of 64 tokens."""
    made_small(launch, monkeypatch)


@pytest.fixture
def through_the_ops(monkeypatch):
    """The ops run on these launchers."""

    def plan(entry, device, dtype, *operands):
        return Plan(getattr(launch, op._LAUNCHERS[entry]), fresh=False)

    monkeypatch.setattr(dispatch, "plan", plan)


@pytest.mark.parametrize("shape", [Shape(9, 40, 4, "cn", BF16), Shape(5, 33, 2, "nc", FP32)])
def test_fused_is_composed(through_the_ops, shape):
    """A site, and two, in one call and in their parts: the same bytes."""
    g, n = cases.given(shape), shape.n
    options = api.Options(layout=shape.layout, iterations=4)
    weights = (g.mapping.phi, g.gates.alpha, g.gates.beta)
    normed = {"norm_weight": g.mapping.norm_weight}
    x = g.x.view(-1, *((shape.c, n) if shape.layout == "cn" else (n, shape.c)))
    h, ms = api.projection(x, weights[0], layout=shape.layout, **normed)
    pre, post, z = api.scale(h, *weights[1:], ms, n)
    res = api.sinkhorn(z, n, iterations=4)
    out = api.aggregate(x, pre, n, layout=shape.layout)
    fused = api.mix_and_aggregate(x, *weights, options=options, **normed)
    cases.equal(fused, (out, post, res))
    y = api.expand_combine(g.f, g.bias, post, x, res, n, layout=shape.layout)
    behind = api.mix_and_aggregate(y, *weights, options=options, **normed)
    both = api.post_pre(g.f, g.bias, post, x, res, *weights, options=options, **normed)
    cases.equal(both, (y, *behind))
    shifted = api.post_pre(
        g.f, g.bias, post, x, res, *weights, H_pre=pre, options=options, **normed
    )
    collapsed = api.aggregate(y, pre, n, layout=shape.layout)
    cases.equal(shifted[:2], (y, collapsed))


def gradients(g, tokens: slice, main_grads: dict) -> list[torch.Tensor]:
    """Of a site with a sublayer, of some tokens: y and dx; weights go into ``main_grads``."""
    n, options = g.shape.n, api.Options(layout=g.shape.layout, iterations=3)
    own = {"phi": g.mapping.phi, "alpha": g.gates.alpha, "beta": g.gates.beta}
    own |= {"norm_weight": g.mapping.norm_weight, "bias": g.bias}
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    place = (g.shape.c, n) if g.shape.layout == "cn" else (n, g.shape.c)
    x = g.x[tokens].view(-1, *place).clone().requires_grad_()
    y = api.connect(
        x,
        lambda out: out * out.abs(),
        *(leaves[name] for name in ("phi", "alpha", "beta")),
        norm_weight=leaves["norm_weight"],
        bias=leaves["bias"],
        options=options,
        main_grads=main_grads,
    )
    y.backward(g.dy[tokens].view(y.shape))
    return [y.detach(), x.grad]


def test_micro_batches_of_a_site(through_the_ops, small_chunks):
    """Two of them have the gradients of one call, bit for bit."""
    g = cases.given(Shape(64 + 30, 9, 2, "cn", BF16))
    sizes = {"phi": g.mapping.phi, "alpha": g.gates.alpha, "beta": g.gates.beta}
    sizes |= {"norm_weight": g.mapping.norm_weight, "bias": g.bias}
    whole, cut = ({name: torch.full(t.shape, 0.1) for name, t in sizes.items()} for _ in range(2))
    want = gradients(g, slice(None), whole)
    pieces = [gradients(g, tokens, cut) for tokens in (slice(64), slice(64, None))]
    cases.equal([torch.cat(pair) for pair in zip(*pieces, strict=True)], want)
    cases.equal(cut.values(), whole.values())
    assert all((t != 0.1).all() for t in whole.values())
