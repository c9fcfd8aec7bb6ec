"""The Triton mhc: its sm_90 code in ptxsim, its source in the interpreter, and mutants.

What an engine is, and what a row of a table: tests/triton_runner.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl

from cute_kernels import arch
from cute_kernels.mhc import api, op
from cute_kernels.mhc.triton import launch
from cute_kernels.mhc.triton.plan import Sizes
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan
from ptxsim.skips import requires_core
from tests.triton_runner import INTERPRETER, SM90, case, mutants

from ..contract import same_bytes
from . import launcher_cases as cases
from . import triton_rows as rows
from .launcher_cases import BF16, FP32, Shape
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("mhc.triton")

DESCRIBE = arch.describe


def checked(launch: ModuleType, name: str, shape: Shape) -> None:
    (cases.TRITON | cases.EXACT)[name](launch, cases.given(shape))


def small(launch: ModuleType, check: Callable, *args: object) -> None:
    """A check with chunks of 32 channels and of 64 tokens: interpreters are slow."""
    with small_chunks(launch):
        check(launch, *args)


@contextlib.contextmanager
def small_chunks(launch: ModuleType):
    """While it lasts, chunks are small, and products of expected bytes are the CPU backend's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arch, "describe", DESCRIBE)
        patch.setattr(launch.kernels, "TOKENS", tl.constexpr(64))
        for module in (launch, cases):
            patch.setattr(module, "TOKENS", 64)
        for module in (launch, cases, cases.cpu):
            patch.setattr(module, "chunk_channels", lambda n, precision: 32)
        yield


def cut(launch: ModuleType) -> None:
    rows.no_cut_shows(launch, cases.given(Shape(2 * 64 + 9, 3, 2, "nc", FP32)), 64)


def cut_between_chunks(launch: ModuleType, n: int, layout: str) -> None:
    rows.no_cut_shows(launch, cases.given(Shape(2 * 1024 + 77, 5, n, layout, BF16)), 1024)


def no_size_shows(launch: ModuleType, shape: Shape) -> None:
    """Warps among them: what a thread holds decides no order."""
    want = cases.results(launch, cases.given(shape))
    assert len(want) > 15
    with mock.patch.object(launch, "SIZES", Sizes((8, 32), 8, 2, 16, 2, 4)):
        cases.equal(cases.results(launch, cases.given(shape)), want)


#: Tails of tokens, of channels and of a product; three chunks of 32 channels.
CN = Shape(9, 73, 4, "cn", FP32)
NC = CN._replace(layout="nc", n=2)
ROUNDED = Shape(5, 40, 2, "cn", BF16)
INTERPRETED = (
    CN,
    NC,
    ROUNDED,
    Shape(70, 9, 2, "nc", FP32, "bf16x3", norm_weight=False, bias=False),
)
FEW = CN._replace(c=40, n=2)
SMALL = INTERPRETER, small

SHAPES = (
    Shape(37, 530, 4, "cn", BF16),
    Shape(9, 33, 2, "nc", FP32),
    Shape(70, 600, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(66, 1040, 2, "cn", BF16, bias=False),
)
#: The checks of tiles with tails; two chunks of channels for the projection alone.
BY_DAY = [(name, SHAPES[1]) for name in cases.TRITON if "gates" not in name]
BY_DAY += [("projection", SHAPES[0]), ("combine", SHAPES[0])]
#: Of the battery, by night.
ROWS = (
    Shape(0, 40, 2, "cn", BF16),
    Shape(0, 300, 4, "nc", FP32, "bf16x3", norm_weight=False),
    Shape(0, 530, 4, "cn", BF16),
    Shape(0, 520, 2, "nc", BF16, "bf16x3"),
)
SIZED = (Shape(9, 33, 2, "nc", BF16), Shape(37, 70, 4, "cn", FP32))
CHECKS = [
    *(
        case(SM90, checked, *pair, night=pair not in BY_DAY)
        for pair in sorted(itertools.product(cases.TRITON, SHAPES), key=lambda p: p not in BY_DAY)
    ),
    case(SM90, rows.few_rows, ROWS[0]),
    *(case(SM90, rows.no_row_shows, shape, 33, night=True) for shape in ROWS),
    case(SM90, cut_between_chunks, 2, "cn"),
    *(case(SM90, cut_between_chunks, *of, night=True) for of in ((4, "nc"), (2, "nc"), (4, "cn"))),
    *(case(SM90, no_size_shows, shape, night=shape != SIZED[0]) for shape in SIZED),
    *(
        case(*SMALL, checked, *pair, night=True)
        for pair in itertools.product(cases.TRITON | cases.EXACT, INTERPRETED)
    ),
    *(
        case(*SMALL, *check, night=True)
        for check in ((rows.few_rows, FEW), (cut,), (cases.parts_are_added,), (cases.far_logits,))
    ),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_values(engine, check, options):
    with RUNNER.running(engine, **options) as module:
        check(module)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(
    ("n", "layout", "dtype"),
    [
        (2, "nc", BF16),
        *(
            pytest.param(4, *of, marks=pytest.mark.nightly)
            for of in itertools.product(("cn", "nc"), (BF16, FP32))
        ),
    ],
)
def test_no_address_shows(n, layout, dtype):
    """Other loads are compiled for what is not aligned; the bytes are the same."""
    g = cases.given(Shape(19, 128, n, layout, dtype))
    with RUNNER.simulated() as kernels:
        want = cases.results(launch, g)
        count = len(kernels)
        got = cases.results(launch, cases.moved(g))
    assert all(a.hash != b.hash for a, b in zip(kernels[:2], kernels[count:], strict=False))
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


# ---- through the ops -----------------------------------------------------------------------------


@pytest.fixture
def through_the_ops():
    """The ops run on the interpreted launchers, which it yields."""
    with RUNNER.running(INTERPRETER) as launch:

        def plan(entry, device, dtype, *operands):
            return Plan(getattr(launch, op._LAUNCHERS[entry]), fresh=False)

        with mock.patch.object(dispatch, "plan", plan):
            yield launch


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


def test_micro_batches_of_a_site(through_the_ops):
    """Two of them have the gradients of one call, bit for bit."""
    g = cases.given(Shape(64 + 30, 9, 2, "cn", BF16))
    sizes = {"phi": g.mapping.phi, "alpha": g.gates.alpha, "beta": g.gates.beta}
    sizes |= {"norm_weight": g.mapping.norm_weight, "bias": g.bias}
    whole, cut = ({name: torch.full(t.shape, 0.1) for name, t in sizes.items()} for _ in range(2))
    with small_chunks(through_the_ops):
        want = gradients(g, slice(None), whole)
        pieces = [gradients(g, tokens, cut) for tokens in (slice(64), slice(64, None))]
    cases.equal([torch.cat(pair) for pair in zip(*pieces, strict=True)], want)
    cases.equal(cut.values(), whole.values())
    assert all((t != 0.1).all() for t in whole.values())


# ---- mutants -------------------------------------------------------------------------------------

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


def of(name: str, shape: Shape = CN) -> tuple:
    return *SMALL, checked, name, shape


MUTANTS = {
    "chunk_follows_m": (*SMALL, rows.few_rows, FEW, (SIZE, f"{SIZE} // (1 + (len(x) > 8))")),
    "lanes_follow_m": (*SMALL, rows.few_rows, FEW, (BACKWARD_TILES,
        BACKWARD_TILES.replace("reduce\n", "reduce\n    block = 64 if m > 8 else 16\n"))),
    "chunks_descending": (*of("exact_coefficients"),
        (BEHIND, "behind = tl.cast(chunks - chunk, tl.int64) * M")),
    "last_chunk_dropped": (*of("exact_coefficients"),
        ("for chunk in tl.range(1, chunks):", "for chunk in tl.range(1, chunks - 1):")),
    "layout_swapped": (*of("combine"), ('streams.layout == "cn"', 'streams.layout == "nc"')),
    "layout_swapped_in_the_projection": (*of("projection"),
        ("    if CN:\n        begin,", "    if not CN:\n        begin,")),
    "streams_split_in_another_order": (*of("combine"),
        ("made = (x0, x1, x2, x3)", "made = (x0, x2, x1, x3)")),
    "channel_tail_unmasked": (*of("reduce"),
        (STREAM_TAIL, STREAM_TAIL.replace("C * N", "C * N + 1"))),
    "product_tail_unmasked": (*of("projection"),
        ("in_k = inside < length", "in_k = inside < length + 1")),
    "product_tail_dropped": (*of("projection", NC),
        ("steps = (length - 1) // BLOCK_K + 1", "steps = length // BLOCK_K")),
    "token_tail_dropped": (*of("projection_backward"),
        ("(count - 1) // BLOCK_M + 1", "count // BLOCK_M")),
    "squares_of_one_step": (*of("projection"),
        ("squares = tl.fma(x, x, squares)", "squares = x * x")),
    "norm_weight_forgotten": (*of("projection"), (WEIGHTED, "pass")),
    "norm_weight_forgotten_in_dx": (*of("projection_backward"),
        ("made = made + (psi[i] * weight[i],)", "made = made + (psi[i],)")),
    "res_transposed": (*of("combine"), (Y, Y.replace("i * N + j", "j * N + i"))),
    "res_transposed_in_dx": (*of("projection_backward"),
        (PASSED, PASSED.replace("i * N + j", "j * N + i"))),
    "dres_transposed": (*of("reduce"),
        ("tl.fma(x[i], dy[j], of_res[i * N + j])", "tl.fma(x[j], dy[i], of_res[i * N + j])")),
    "collapsed_before_the_rounding": (*of("exact_streams", ROUNDED), (ROUNDS, "total")),
    "bias_forgotten_in_dpost": (*of("reduce"), (EXPANDED_BIAS, "program")),
    "room_between_rows_forgotten": (*of("combine"),
        ("0 if rows is None else rows.stride(0)", "0 if rows is None else rows.shape[1]")),
    "parts_behind_the_tokens_kept": (*of("reduce"),
        ("values[_tiles(m, tokens) :] = 0.0", "values[_tiles(m, tokens) :] = 1e-3")),
    "parts_descending": (*SMALL, cases.parts_are_added,
        (PART, PART.replace("cast(part,", "cast(count - part,"))),
    "parts_of_chunks_in_one_chain": (*SMALL, cases.parts_are_added,
        ("if parts.group > 1:", "if False:")),
    "weights_added_at_the_end": (*of("exact_gradients"),
        (INTO, "total = tl.zeros([WIDTH, BLOCK], tl.float32)"),
        (KEPT, KEPT.replace("total,", "total + tl.load(into_phi_ptr + place, mask=inside),"))),
    "chunk_of_tokens_begins_elsewhere": (*SMALL, cut, ("start = tl.cast(chunk, tl.int64) * TOKENS",
        "start = tl.cast(chunk, tl.int64) * (TOKENS - 1)")),
    "one_chunk_of_all_tokens": (*SMALL, cut,
        ("chunks, (block_m, block_c) = _tiles(m, TOKENS), TRITON.back",
        "chunks, (block_m, block_c) = 1, TRITON.back"),
        ("count = tl.minimum(M - start, TOKENS)", "count = M - start")),
    "epsilon_outside_the_root": (*of("exact_coefficients"),
        ("tl.sqrt_rn(square)", "(tl.sqrt_rn(square - eps) + eps)")),
    "pre_eps_forgotten": (*of("exact_coefficients"), ("sigmoid + pre_eps, mask", "sigmoid, mask")),
    "post_scale_forgotten_in_its_slope": (*of("exact_gradients"),
        ("d_post * (post_scale * slope)", "d_post * slope")),
    "dms_doubled": (*of("projection_backward"), ("2.0 / k)", "1.0 / k)")),
    "one_iteration_more": (*of("exact_coefficients"),
        ("for _ in tl.range(1, iterations):", "for _ in tl.range(0, iterations):")),
    "columns_before_rows": (*of("exact_coefficients"), (ROW_SUMS, ROW_SUMS.replace("y, 2", "y, 1")),
        (COLUMN_SUMS, COLUMN_SUMS.replace("rows, 1", "rows, 2"))),
    "last_segment_only": (*of("exact_gradients"),
        ("for back in tl.range(0, segments):", "for back in tl.range(0, 1):")),
    "epsilon_forgotten_in_the_gradient": (*of("exact_gradients"),
        ("gradient = gradient * factor", "pass")),
    "rows_of_zeros_not_shared": (*of("exact_gradients"), ("d_pre.stride(0),", "n,")),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "check", "edits"), mutants(MUTANTS))
def test_killed(engine, check, edits):
    RUNNER.kill(engine, check, *edits)
