"""The torch ops of a whole site: mhc_mix and mhc_post_pre (see op.py).

    mhc_mix       (out, pre, post, res, H, ms, link)   of x
    mhc_post_pre  (y, out, pre, post, res, H, ms)      of f and x: y is expand_combine's, the others
                                                       are the next site's

A pass reads the streams once.  Forward of a site: project, coefficients, collapse.  Backward of
one: reduce (d_pre, d_res), coefficients, project_backward.

With ``shifted``, a pre of the site before, mhc_post_pre collapses y with that one, in the pass that
makes y; a second pass projects it.  Without it, y is projected where it is made, and collapsed in a
second pass.

phi, alpha and beta of mhc_mix may be those of a head, [n, K], [1] and [n]: rows of H_pre alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..runtime.dispatch import Launches
from ..runtime.torch_ops import refuse_double
from . import config, nodes, recompute
from .op import expand_gradients
from .tensors import Expand, Gates, Mapping, Projected, Sinkhorn, Streams, Upstream

_WEIGHTS = "Tensor phi, Tensor? norm_weight, Tensor alpha, Tensor beta"
#: Names of a site's weights, in the order of the ops' arguments.
_WEIGHT_NAMES = ("phi", "norm_weight", "alpha", "beta")
_NUMBERS = (
    "int n, str layout, str precision, float eps, float pre_eps, float post_scale, "
    "int iterations, str form, float form_eps"
)
#: Results of the next site, in the order of both ops.
_COEFFICIENTS = ("pre", "post", "res", "h", "ms")


class Site(NamedTuple):
    """Weights and options of a site of hyper-connections."""

    streams: Streams
    mapping: Mapping
    gates: Gates
    form: Sinkhorn


def _site(weights: Sequence[torch.Tensor | None], numbers: Sequence) -> Site:
    """`Site` of (phi, norm_weight, alpha, beta) and `_NUMBERS`."""
    phi, norm_weight, alpha, beta = weights
    n, layout, precision, eps, pre_eps, post_scale, *form = numbers
    return Site(
        Streams(n, layout),
        nodes.mapping(phi, norm_weight, precision, n),
        nodes.gates(alpha, beta, eps, pre_eps, post_scale, n),
        Sinkhorn(*form),
    )


# ---- passes --------------------------------------------------------------------------------------


def _project(
    launch: Launches, x: torch.Tensor, site: Site, expand: Expand | None = None
) -> tuple[Projected, tuple[torch.Tensor, ...]]:
    """Project x, or the streams that ``expand`` makes of it; also return `_COEFFICIENTS`."""
    streams, mapping, gates, form = site
    projected = launch("mhc_project", x, x, mapping, streams, expand)
    made = launch("mhc_coefficients", x, projected, x.shape[1], gates, streams.n, form)
    return projected, (made.pre, made.post, made.res, made.h, made.ms)


def _fake_coefficients(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    m = x.shape[0]
    shapes = (m, n), (m, n), (m, n * n), (m, config.WIDTH[n]), (m,)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _site_gradients(
    backward: nodes.Backward,
    x: torch.Tensor,
    site: Site,
    upstream: Upstream,
    coefficient_grads: Sequence[torch.Tensor | None],
    want_dx: bool,
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    """Return dx of a site, and the gradients of its weights and of ``shifted``.

    Args:
        x: Its streams.
        upstream: Further gradients of x.  With ``res``, the site's own, dy is that of the streams
            after the site.  ``pre`` is what x was collapsed with: the site's own, or ``shifted``.
        coefficient_grads: (d_pre, d_post, d_res) of the coefficients themselves, or None each.
    """
    streams, mapping, gates, form = site
    launch, needs = backward.launch, backward.needs
    pre, post, res, h, ms = backward.kept[-len(_COEFFICIENTS) :]
    d_pre, d_post, d_res = (g if g is None else nodes.rows(g) for g in coefficient_grads)
    shifted = {}
    reduced_by = upstream if upstream.res is not None else upstream._replace(dy=None)
    if reduced_by.dy is not None or reduced_by.d_out is not None:
        reduced = launch("mhc_reduce", x, x, streams, reduced_by, None, False)
        d_res = _add_optional(d_res, reduced.d_res)
        if upstream.pre is None or upstream.pre is pre:
            d_pre = _add_optional(d_pre, reduced.d_pre)
        else:
            shifted = {"shifted": reduced.d_pre}
    made = (d_pre, pre), (d_post, post), (d_res, res)
    d_made = [t.new_zeros(1, t.shape[1]).expand(len(t), -1) if g is None else g for g, t in made]
    operands = h, ms, gates, streams.n, form, *d_made
    d_h, d_ms, d_gates = launch("mhc_coefficients_backward", x, *operands)
    dx = d_psi = None
    want = want_dx, needs["phi"] or needs["norm_weight"]
    if any(want):
        operands = x, d_h, d_ms, mapping, streams, upstream, want
        dx, d_psi = launch("mhc_project_backward", x, *operands)
    of_weights = nodes.finish_weights(backward, d_psi, mapping)
    return dx, shifted | of_weights | nodes.finish_gates(backward, d_gates)


def _add_optional(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _upstream(dy, d_out, res, pre) -> Upstream:
    dy, d_out = (g if g is None else g.contiguous() for g in (dy, d_out))
    return Upstream(dy, d_out, None if dy is None else res, None if d_out is None else pre)


# ---- ops -----------------------------------------------------------------------------------------


class _Mix(nodes.Node):
    """One site up to its sublayer; linked, dy of its expand_combine comes through the link."""

    name, function = "mix", "mix_and_aggregate"
    tensors = f"Tensor x, {_WEIGHTS}"
    weights = _WEIGHT_NAMES
    options = _NUMBERS
    link = "bool linked"
    results = ("out", *_COEFFICIENTS, "link")
    kept = _COEFFICIENTS
    constant = ("h", "ms")

    def run(self, launch, x, *args):
        *numbers, linked = args[4:]
        site = _site(args[:4], numbers)
        _, coefficients = _project(launch, x, site)
        out = launch("mhc_combine", x, x, site.streams, coefficients[0], None).out
        return out, *coefficients, _link(x, linked)

    def fake(self, x, *args):
        n, linked = args[4], args[-1]
        out = x.new_empty(x.shape[0], x.shape[1] // n)
        return out, *_fake_coefficients(x, n), _link(x, linked)

    def setup(self, ctx, inputs, output):
        ctx.position = recompute.saved_position()
        super().setup(ctx, inputs, output, unsaved=() if ctx.position is None else ("x",))
        if not inputs[-1]:
            ctx.mark_non_differentiable(*output[-3:])

    def backward(self, ctx, *upstream):
        refuse_double(f"mhc.{self.function}")
        unsaved = {} if ctx.position is None else {"x": ctx.position.take()}
        return super().backward(ctx, *upstream, **unsaved)

    def gradients(self, backward, *numbers):
        d_out, *coefficient_grads, dy = backward.upstream
        x, *weights = backward.tensors.values()
        pre, _, res, *_ = backward.kept
        upstream, want_dx = _upstream(dy, d_out, res, pre), backward.needs["x"]
        args = x, _site(weights, numbers), upstream, coefficient_grads, want_dx
        dx, gradients = _site_gradients(backward, *args)
        return gradients | {"x": dx}


def _link(x: torch.Tensor, linked: bool) -> torch.Tensor:
    # Nothing reads its values, so that nothing has to fill them.
    return x.new_empty(1, 1).expand(x.shape) if linked else x.new_empty(0)


class _PostPre(nodes.Node):
    """expand_combine of a site that ends, and the next site up to its sublayer."""

    name = function = "post_pre"
    tensors = (
        "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? shifted, " + _WEIGHTS
    )
    weights = ("bias", *_WEIGHT_NAMES)
    options = _NUMBERS
    results = ("y", "out", *_COEFFICIENTS)
    kept = ("y", *_COEFFICIENTS)
    constant = ("h", "ms")

    def run(self, launch, f, bias, post, x, res, shifted, *args):
        site = _site(args[:4], args[4:])
        by = Expand(f, bias, nodes.rows(post), nodes.rows(res))
        if shifted is None:
            projected, coefficients = _project(launch, x, site, by)
            y = projected.y
            out = launch("mhc_combine", x, y, site.streams, coefficients[0], None).out
        else:
            y, out = launch("mhc_combine", x, x, site.streams, nodes.rows(shifted), by)
            _, coefficients = _project(launch, y, site)
        return y, out, *coefficients

    def fake(self, f, bias, post, x, *args):
        n = args[6]
        return x.new_empty(x.shape), f.new_empty(f.shape), *_fake_coefficients(x, n)

    def gradients(self, backward, *numbers):
        dy, d_out, *coefficient_grads = backward.upstream
        *_, shifted, phi, norm_weight, alpha, beta = backward.tensors.values()
        y, pre, *_ = backward.kept
        site = _site((phi, norm_weight, alpha, beta), numbers)
        upstream = _upstream(dy, d_out, None, pre if shifted is None else nodes.rows(shifted))
        want_dx = any(backward.needs[name] for name in ("f", "bias", "post", "x", "res"))
        dx, gradients = _site_gradients(backward, y, site, upstream, coefficient_grads, want_dx)
        # dx of the site that begins is dy of the one that ends.
        return gradients if dx is None else gradients | expand_gradients(backward, dx, site.streams)


mix, mix_backward = _Mix().define()
post_pre, post_pre_backward = _PostPre().define()
