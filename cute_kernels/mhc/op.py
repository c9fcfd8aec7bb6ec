"""The torch ops of mhc, one for each function: schemas, fakes, autograd.

    mhc_projection      (H [M, W], ms [M])                    of x [..., K], phi [N, K]
    mhc_scale           (pre [M, n], post [M, n], res [M, n²])  of H, ms
    mhc_sinkhorn        P [M, n²]                             of logits
    mhc_aggregate       out [M, C]                            of x, pre
    mhc_expand_combine  y [M, K]                              of f, post, x, res
    mhc_mix             all of them but the last, of one site
    mhc_post_pre        expand_combine of one site, and mhc_mix of the next
    mhc_recompute       y [M, K] of each of several sites, without a gradient

All take rows: x [M, K], f [M, C]; api flattens.  Each that is differentiable is a `nodes.Node`,
with an op ``..._backward``.

``link``: an output of mhc_mix of x's shape; it takes no memory, and its values are undefined, as
nothing reads them.  An expand_combine that is given it leaves the gradients of x and res to
mhc_mix: what flows back through the link is dy, so that one pass makes dx of all that x goes into
(docs/mhc.md, 'One site').
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from ..arch import BACKENDS, CUTE_SM90
from ..runtime import dispatch
from . import config, nodes
from .tensors import Expand, Sinkhorn, Streams, Upstream

_DTYPES = dict.fromkeys(BACKENDS, frozenset({torch.bfloat16, torch.float32}))
#: Entry of `dispatch` -> the name of its launcher; plan_... on SM90.
_LAUNCHERS = {
    "mhc_project": "project",
    "mhc_add_chunks": "add_chunks",
    "mhc_gate": "gate",
    "mhc_sinkhorn": "sinkhorn",
    "mhc_coefficients": "coefficients",
    "mhc_combine": "combine",
    "mhc_recompute": "recompute",
    "mhc_reduce": "reduce_channels",
    "mhc_gate_backward": "gate_backward",
    "mhc_sinkhorn_backward": "sinkhorn_backward",
    "mhc_coefficients_backward": "coefficients_backward",
    "mhc_project_backward": "project_backward",
    "mhc_weights": "weights",
    "mhc_add_parts": "add_parts",
}
for _entry, _function in _LAUNCHERS.items():
    _implementations = dispatch.named_alike(__package__, _function, _DTYPES)
    # SM90 has planners alone, whose plans are run.
    _implementations[CUTE_SM90] = replace(_implementations[CUTE_SM90], launcher="")
    dispatch.register(_entry, _implementations, contract="mhc")
dispatch.register_contracts(("mhc",), config.KEPT, config.contract_facts, "mhc_project")


class _Projection(nodes.Node):
    """H = x psiᵀ and ms = Σ x² / K."""

    name = function = "projection"
    tensors = "Tensor x, Tensor phi, Tensor? norm_weight"
    weights = ("phi", "norm_weight")
    options = "int n, str layout, str precision"
    results = ("h", "ms")

    def run(self, launch, x, phi, norm_weight, n, layout, precision):
        mapping = nodes.mapping(phi, norm_weight, precision, n)
        projected = launch("mhc_project", x, x, mapping, Streams(n, layout), None)
        return launch("mhc_add_chunks", x, projected, x.shape[1], n)

    def fake(self, x, phi, norm_weight, n, *options):
        h = x.new_empty(x.shape[0], config.WIDTH[n], dtype=torch.float32)
        return h, x.new_empty(x.shape[0], dtype=torch.float32)

    def gradients(self, backward, n, layout, precision):
        (d_h, d_ms), (x, phi, norm_weight) = backward.upstream, backward.tensors.values()
        needs = backward.needs
        mapping = nodes.mapping(phi, norm_weight, precision, n)
        if d_h is None:
            d_h = x.new_zeros(1, dtype=torch.float32).expand(len(x), config.WIDTH[n])
        if d_ms is None:
            d_ms = x.new_zeros(1, dtype=torch.float32).expand(len(x))
        want = needs["x"], needs["phi"] or needs["norm_weight"]
        of_rows = nodes.rows(d_h), d_ms.contiguous(), mapping, Streams(n, layout)
        operands = x, *of_rows, Upstream(), want
        dx, d_psi = backward.launch("mhc_project_backward", x, *operands)
        return {"x": dx, **nodes.finish_weights(backward, d_psi, mapping)}


class _Scale(nodes.Node):
    """pre, post and res of z = alpha H / √(ms + eps) + beta."""

    name = function = "scale"
    tensors = "Tensor h, Tensor alpha, Tensor beta, Tensor ms"
    weights = ("alpha", "beta")
    options = "int n, float eps, float pre_eps, float post_scale"
    results = ("pre", "post", "res")

    def run(self, launch, h, alpha, beta, ms, n, *numbers):
        gates = nodes.gates(alpha, beta, *numbers, n)
        return launch("mhc_gate", h, nodes.rows(h), ms.contiguous(), gates, n)

    def fake(self, h, alpha, beta, ms, n, *numbers):
        return tuple(h.new_empty(h.shape[0], size) for size in (n, n, n * n))

    def gradients(self, backward, n, *numbers):
        h, alpha, beta, ms = backward.tensors.values()
        gates = nodes.gates(alpha, beta, *numbers, n)
        upstream = [
            h.new_zeros(1, size).expand(len(h), size) if g is None else nodes.rows(g)
            for g, size in zip(backward.upstream, (n, n, n * n), strict=True)
        ]
        operands = nodes.rows(h), ms.contiguous(), gates, n, *upstream
        d_h, d_ms, parts = backward.launch("mhc_gate_backward", h, *operands)
        if d_h.shape != h.shape:
            # H has further columns of zeros after N.
            d_h = torch.nn.functional.pad(d_h, (0, h.shape[1] - d_h.shape[1]))
        return {"h": d_h, "ms": d_ms, **nodes.finish_gates(backward, parts)}


class _Sinkhorn(nodes.Node):
    """P of logits z."""

    name = function = "sinkhorn"
    tensors = "Tensor z"
    options = "int n, int iterations, str form, float eps"
    results = ("p",)

    def run(self, launch, z, n, *form):
        return launch("mhc_sinkhorn", z, nodes.rows(z), n, Sinkhorn(*form))

    def fake(self, z, *options):
        return z.new_empty(z.shape)

    def gradients(self, backward, n, *form):
        z, (d_p,) = backward.tensors["z"], backward.upstream
        operands = nodes.rows(z), nodes.rows(d_p), n, Sinkhorn(*form)
        return {"z": backward.launch("mhc_sinkhorn_backward", z, *operands)}


class _Aggregate(nodes.Node):
    """out = Σ_i x_i pre_i."""

    name = function = "aggregate"
    tensors = "Tensor x, Tensor pre"
    options = "int n, str layout"
    results = ("out",)

    def run(self, launch, x, pre, *streams):
        return launch("mhc_combine", x, x, Streams(*streams), nodes.rows(pre), None).out

    def fake(self, x, pre, n, layout):
        return x.new_empty(x.shape[0], x.shape[1] // n)

    def gradients(self, backward, *streams):
        (x, pre), (d_out,) = backward.tensors.values(), backward.upstream
        upstream = Upstream(d_out=d_out.contiguous(), pre=nodes.rows(pre))
        operands = x, Streams(*streams), upstream, None, backward.needs["x"]
        reduced = backward.launch("mhc_reduce", x, *operands)
        return {"x": reduced.dx, "pre": reduced.d_pre}


class _ExpandCombine(nodes.Node):
    """y_j = (f + bias) post_j + Σ_i x_i res[i, j]; linked, it leaves dx and dres to mhc_mix."""

    name = function = "expand_combine"
    tensors = "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res"
    weights = ("bias",)
    options = "int n, str layout"
    link, backward_link = "Tensor? link", "bool linked"
    results = ("y",)

    def run(self, launch, f, bias, post, x, res, n, layout, link):
        by = Expand(f, bias, nodes.rows(post), nodes.rows(res))
        return launch("mhc_combine", x, x, Streams(n, layout), None, by).y

    def fake(self, f, bias, post, x, *others):
        return x.new_empty(x.shape)

    def setup(self, ctx, inputs, output):
        ctx.linked = inputs[-1] is not None
        # A linked backward does not read x: mhc_mix keeps it, or can make it again.
        super().setup(ctx, inputs, output, unsaved=("x",) if ctx.linked else ())
        ctx.options = *ctx.options, ctx.linked

    def backward(self, ctx, dy):
        unsaved = {"x": dy} if ctx.linked else {}  # of its shape, unread
        *gradients, _ = super().backward(ctx, dy, **unsaved)
        return *gradients, dy if ctx.linked and ctx.needs_input_grad[len(gradients)] else None

    def gradients(self, backward, n, layout, linked):
        return expand_gradients(backward, *backward.upstream, Streams(n, layout), linked)


def expand_gradients(
    backward: nodes.Backward, dy: torch.Tensor, streams: Streams, linked: bool = False
) -> dict[str, torch.Tensor | None]:
    """Gradients of an expand_combine's tensors; those of x and res if it is not ``linked``."""
    f, bias, post, x, res = itertools.islice(backward.tensors.values(), 5)
    upstream = Upstream(dy.contiguous(), res=None if linked else nodes.rows(res))
    by = Expand(f, bias, nodes.rows(post))
    operands = None if linked else x, streams, upstream, by, not linked
    reduced = backward.launch("mhc_reduce", dy, *operands)
    gradients = {"f": reduced.df, "post": reduced.d_post, "x": reduced.dx, "res": reduced.d_res}
    return gradients | nodes.finish_bias(backward, reduced.d_bias)


class _Repeat(nodes.Node):
    """n copies of an embedding e [M, C]."""

    name, function = "repeat", "expand_from_embedding"
    tensors = "Tensor e"
    options = "int n, str layout"
    results = ("x",)

    def run(self, launch, e, n, layout):
        m, c = e.shape
        e = e[:, :, None].expand(m, c, n) if layout == "cn" else e[:, None].expand(m, n, c)
        # Not reshape: of one channel that is a view, all streams of which are one memory, the
        # caller's.
        return e.clone(memory_format=torch.contiguous_format).view(m, n * c)

    def fake(self, e, n, layout):
        return e.new_empty(e.shape[0], e.shape[1] * n)

    def gradients(self, backward, n, layout):
        (dx,) = backward.upstream
        ones = dx.new_ones(1, n, dtype=torch.float32).expand(len(dx), n)
        operands = dx.contiguous(), Streams(n, layout), ones, None
        return {"e": backward.launch("mhc_combine", dx, *operands).out}


projection, projection_backward = _Projection().define()
scale, scale_backward = _Scale().define()
sinkhorn, sinkhorn_backward = _Sinkhorn().define()
aggregate, aggregate_backward = _Aggregate().define()
expand_combine, expand_combine_backward = _ExpandCombine().define()
repeat, repeat_backward = _Repeat().define()


def _run_recompute(launch, x, fs, biases, posts, ress, n, layout):
    """Make the streams after each site, several sites a pass: those all have a bias, or none."""
    if 0 in x.shape:
        return _fake_recompute(x, fs)
    operands = zip(fs, biases, posts, ress, strict=True)
    sites = [Expand(f, b, nodes.rows(post), nodes.rows(res)) for f, b, post, res in operands]
    streams, ys = Streams(n, layout), []
    for _, group in itertools.groupby(sites, lambda site: site.bias is not None):
        alike = tuple(group)
        for first in range(0, len(alike), config.MOST_SITES):
            batch = alike[first : first + config.MOST_SITES]
            if len(batch) == 1:
                ys.append(launch("mhc_combine", x, x, streams, None, batch[0]).y)
            else:
                ys += launch("mhc_recompute", x, x, streams, batch)
            x = ys[-1]
    return ys


def _fake_recompute(x, fs, *others):
    return [x.new_empty(x.shape) for _ in fs]


recompute = nodes.define(
    "mhc_recompute(Tensor x, Tensor[] f, Tensor?[] bias, Tensor[] post, Tensor[] res, int n, "
    "str layout) -> Tensor[]",
    _run_recompute,
    fake=_fake_recompute,
)
