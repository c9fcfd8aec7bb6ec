"""The torch ops of a whole site: mhc_mix and mhc_post_pre (see op.py).

    mhc_mix       (out, pre, post, res, H, ms, link)   of x
    mhc_post_pre  (y, out, pre, post, res, H, ms)      of f and x: y is expand_combine's, the others
                                                       are the next site's

With ``shifted``, a pre of the site before, mhc_post_pre collapses y with that one, in the pass that
makes y; a second pass projects it.  Without it, y is projected where it is made, and collapsed in a
second pass.

phi, alpha and beta of mhc_mix may be those of a head, [n, K], [1] and [n]: rows of H_pre alone.
"""

from __future__ import annotations

import torch

from ..runtime.dispatch import Launches
from . import config, nodes, passes, recompute
from .passes import Site
from .tensors import Coefficients, Expand, Sinkhorn, Streams, Upstream

_NUMBERS = (
    "int n, str layout, str precision, float eps, float pre_eps, float post_scale, "
    "int iterations, str form, float form_eps"
)
_WEIGHTS = "Tensor phi, Tensor? norm_weight, Tensor alpha, Tensor beta"
_MAINS = "Tensor? main_phi, Tensor? main_weight, Tensor? main_alpha, Tensor? main_beta"
_WRITTEN = (
    "Tensor(a!)? main_phi, Tensor(b!)? main_weight, Tensor(c!)? main_alpha, Tensor(d!)? main_beta"
)


def _site(weights: tuple, numbers: tuple) -> Site:
    """`Site` of (phi, norm_weight, alpha, beta) and `_NUMBERS`."""
    phi, norm_weight, alpha, beta = weights
    n, layout, precision, eps, pre_eps, post_scale, *form = numbers
    return Site(
        Streams(n, layout),
        nodes.mapping(phi, norm_weight, precision, n),
        nodes.gates(alpha, beta, eps, pre_eps, post_scale, n),
        Sinkhorn(*form),
    )


def _fake_coefficients(x: torch.Tensor, n: int) -> Coefficients:
    m = x.shape[0]
    shapes = ((m, config.WIDTH[n]), (m,), (m, n), (m, n), (m, n * n))
    return Coefficients(*(x.new_empty(shape, dtype=torch.float32) for shape in shapes))


def _in_order(coefficients: Coefficients) -> tuple[torch.Tensor, ...]:
    """Return the coefficients in the order of the ops' results."""
    return coefficients.pre, coefficients.post, coefficients.res, coefficients.h, coefficients.ms


def _weight_gradients(
    launch: Launches, site_grads, site: Site, weights: tuple, into: tuple, needs
) -> tuple:
    """Return (dphi, dnorm_weight, dalpha, dbeta); ``site_grads``: None without tokens."""
    d_psi, d_gates = (None, None) if site_grads is None else (site_grads.d_psi, site_grads.d_gates)
    of_weights = nodes.finish_weights(
        launch, d_psi, site.mapping, weights[:2], into[:2], (needs[0], needs[1])
    )
    of_gates = nodes.finish_gates(launch, d_gates, weights[2:], into[2:], (needs[2], needs[3]))
    return *of_weights, *of_gates


def _upstream(dy, d_out, res, pre) -> Upstream:
    dy, d_out = (g if g is None else g.contiguous() for g in (dy, d_out))
    return Upstream(dy, d_out, res, None if d_out is None else pre)


#: Names of a site's weights, in the order of the ops' arguments.
_WEIGHT_NAMES = ("phi", "norm_weight", "alpha", "beta")


def _all_rows(coefficient_grads) -> tuple[torch.Tensor | None, ...]:
    return tuple(g if g is None else nodes.rows(g) for g in coefficient_grads)


# ---- mhc_mix -------------------------------------------------------------------------------------


def _run_mix(launch, x, phi, norm_weight, alpha, beta, *options):
    mains, numbers, linked = options[:4], options[4:-1], options[-1]
    weights = (phi, norm_weight, alpha, beta)
    weights_by_name = dict(zip(_WEIGHT_NAMES, weights, strict=True))
    nodes.check_no_alias(dict(zip(_WEIGHT_NAMES, mains, strict=True)), x=x, **weights_by_name)
    if 0 in x.shape:
        return _fake_mix(x, *weights, *options)
    site = _site(weights, numbers)
    _, coefficients = passes.project(launch, x, site)
    out = launch("mhc_combine", x, x, site.streams, coefficients.pre, None).out
    return out, *_in_order(coefficients), _link(x, linked)


def _link(x: torch.Tensor, linked: bool) -> torch.Tensor:
    # Nothing reads its values, so that nothing has to fill them.
    return x.new_empty(1, 1).expand(x.shape) if linked else x.new_empty(0)


def _fake_mix(x, phi, norm_weight, alpha, beta, *options):
    n = options[4]
    out = x.new_empty(x.shape[0], x.shape[1] // n)
    return out, *_in_order(_fake_coefficients(x, n)), _link(x, options[-1])


def _run_mix_backward(launch, *args):
    upstream_grads, tensors, (pre, post, res, h, ms), options = (
        args[:5],
        args[5:10],
        args[10:15],
        args[15:],
    )
    d_out, *of_coefficients, dy = upstream_grads
    x, *weights = tensors
    into, numbers, needs = options[:4], options[4:-1], options[-1]
    site, site_grads = _site(weights, numbers), None
    if 0 not in x.shape and any(needs):
        coefficients = Coefficients(h, ms, pre, post, res)
        upstream = _upstream(dy, d_out, None if dy is None else res, pre)
        want = (needs[0], needs[1] or needs[2])
        site_grads, _ = passes.site_backward(
            launch, x, site, coefficients, upstream, _all_rows(of_coefficients), want
        )
    dx = nodes.gradient(None if site_grads is None else site_grads.dx, x, needs[0])
    return dx, *_weight_gradients(launch, site_grads, site, weights, into, needs[1:])


def _fake_mix_backward(*args):
    x, weights = args[5], args[6:10]
    return nodes.fake_gradients((x, *weights), args[-1], (None, *args[15:19]))


def _setup_mix(ctx, inputs, output):
    *tensors, ctx.linked = inputs
    ctx.numbers = tensors[9:]
    _, *results, link = output
    x, *weights = tensors[:5]
    ctx.position = recompute.saved_position()
    ctx.save_for_backward(x if ctx.position is None else None, *weights, *results)
    ctx.mark_non_differentiable(results[3], results[4], *(() if ctx.linked else (link,)))
    nodes.save_context(ctx, inputs, range(5, 9))


def _backward_mix(ctx, d_out, d_pre, d_post, d_res, d_h, d_ms, d_link):
    nodes.refuse_double("mix_and_aggregate")
    upstream = d_out, d_pre, d_post, d_res, d_h, d_ms, d_link
    targets = dict(zip(range(1, 5), nodes.targets(ctx, (1, 2, 3, 4), *upstream), strict=True))
    needs = [ctx.needs_input_grad[0], *(target.wanted for target in targets.values())]
    into = [target.into for target in targets.values()]
    x, *saved = ctx.saved_tensors
    x = x if ctx.position is None else ctx.position.take()
    gradients = mix_backward(
        d_out, d_pre, d_post, d_res, d_link, x, *saved, *into, *ctx.numbers, needs
    )
    return *nodes.input_gradients(gradients, needs, targets), *(None,) * 14


mix = nodes.define(
    f"mhc_mix(Tensor x, {_WEIGHTS}, {_MAINS}, {_NUMBERS}, bool linked) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_mix,
    fake=_fake_mix,
    setup=_setup_mix,
    backward=_backward_mix,
)
mix_backward = nodes.define(
    "mhc_mix_backward(Tensor? d_out, Tensor? d_pre, Tensor? d_post, Tensor? d_res, Tensor? dy, "
    f"Tensor x, {_WEIGHTS}, Tensor pre, Tensor post, Tensor res, Tensor h, Tensor ms, {_WRITTEN}, "
    f"{_NUMBERS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_mix_backward,
    fake=_fake_mix_backward,
)


# ---- mhc_post_pre --------------------------------------------------------------------------------


def _run_post_pre(launch, *args):
    (f, bias, post, x, res, shifted), weights, options = args[:6], args[6:10], args[10:]
    mains, numbers = options[:5], options[5:]
    operands = {"f": f, "bias": bias, "H_post": post, "x": x, "H_res": res, "H_pre": shifted}
    weights_by_name = dict(zip(_WEIGHT_NAMES, weights, strict=True))
    nodes.check_no_alias(
        dict(zip(("bias", *_WEIGHT_NAMES), mains, strict=True)), **operands, **weights_by_name
    )
    if 0 in x.shape:
        return _fake_post_pre(*args)
    site = _site(weights, numbers)
    by = Expand(f, bias, nodes.rows(post), nodes.rows(res))
    if shifted is None:
        projected, coefficients = passes.project(launch, x, site, by)
        y = projected.y
        out = launch("mhc_combine", x, y, site.streams, coefficients.pre, None).out
    else:
        y, out = launch("mhc_combine", x, x, site.streams, nodes.rows(shifted), by)
        _, coefficients = passes.project(launch, y, site)
    return y, out, *_in_order(coefficients)


def _fake_post_pre(*args):
    f, x, n = args[0], args[3], args[15]
    return x.new_empty(x.shape), f.new_empty(f.shape), *_in_order(_fake_coefficients(x, n))


def _run_post_pre_backward(launch, *args):
    (dy, d_out, *coefficient_grads), tensors, weights = args[:5], args[5:11], args[11:15]
    (y, pre, post, res, h, ms), options = args[15:21], args[21:]
    into, numbers, needs = options[:5], options[5:-1], options[-1]
    *of_end, shifted = tensors
    site, site_grads, d_shifted = _site(weights, numbers), None, None
    if 0 not in y.shape and any(needs):
        used = pre if shifted is None else nodes.rows(shifted)
        upstream = _upstream(dy, d_out, None, used)
        want = (any(needs[:5]), needs[7] or needs[6])
        coefficients = Coefficients(h, ms, pre, post, res)
        site_grads, d_shifted = passes.site_backward(
            launch, y, site, coefficients, upstream, _all_rows(coefficient_grads), want
        )
    of_site = _weight_gradients(launch, site_grads, site, weights, into[1:], needs[6:])
    end_grads = _end_gradients(launch, site_grads, site.streams, of_end, into[0], needs[:5])
    if not needs[5]:
        d_shifted = nodes.empty_result(y)
    elif d_shifted is None:
        d_shifted = shifted.new_zeros(shifted.shape)
    return *end_grads, d_shifted, *of_site


def _end_gradients(
    launch: Launches, site_grads, streams: Streams, tensors: list, main_bias, needs
) -> tuple:
    """Return (df, dbias, dpost, dx, dres) of the site that ends; ``site_grads.dx``: dy of it."""
    f, bias, post, x, res = tensors
    bias_like = f if bias is None else bias
    if site_grads is None or site_grads.dx is None:
        gradients = nodes.zeros(tensors, needs)
        gradients[1] = nodes.finish_parts(launch, None, bias_like, main_bias, needs[1])
        return tuple(gradients)
    upstream = Upstream(site_grads.dx, res=nodes.rows(res))
    by = Expand(f, bias, nodes.rows(post))
    back = launch("mhc_reduce", x, x, streams, upstream, by, True)
    d_bias = nodes.finish_parts(launch, back.d_bias, bias_like, main_bias, needs[1])
    return nodes.requested((back.df, d_bias, back.d_post, back.dx, back.d_res), needs, f)


def _fake_post_pre_backward(*args):
    tensors, into, needs = args[5:15], args[21:26], args[-1]
    mains = (None, into[0], None, None, None, None, *into[1:])
    return nodes.fake_gradients(tensors, needs, mains)


def _setup_post_pre(ctx, inputs, output):
    ctx.numbers = inputs[15:]
    y, _, *results = output
    ctx.save_for_backward(*inputs[:10], y, *results)
    ctx.mark_non_differentiable(results[3], results[4])
    nodes.save_context(ctx, inputs, range(10, 15))


def _backward_post_pre(ctx, dy, d_out, d_pre, d_post, d_res, d_h, d_ms):
    nodes.refuse_double("post_pre")
    upstream = dy, d_out, d_pre, d_post, d_res, d_h, d_ms
    positions = (1, 6, 7, 8, 9)
    targets = dict(zip(positions, nodes.targets(ctx, positions, *upstream), strict=True))
    needs = list(ctx.needs_input_grad[:10])
    for position, target in targets.items():
        needs[position] = target.wanted
    into = [target.into for target in targets.values()]
    gradients = post_pre_backward(
        dy, d_out, d_pre, d_post, d_res, *ctx.saved_tensors, *into, *ctx.numbers, needs
    )
    return *nodes.input_gradients(gradients, needs, targets), *(None,) * 14


_SITE = "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? shifted, " + _WEIGHTS

post_pre = nodes.define(
    f"mhc_post_pre({_SITE}, Tensor? main_bias, {_MAINS}, {_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_post_pre,
    fake=_fake_post_pre,
    setup=_setup_post_pre,
    backward=_backward_post_pre,
)
post_pre_backward = nodes.define(
    "mhc_post_pre_backward(Tensor? dy, Tensor? d_out, Tensor? d_pre, Tensor? d_post, "
    f"Tensor? d_res, {_SITE}, Tensor y, Tensor pre, Tensor next_post, Tensor next_res, Tensor h, "
    f"Tensor ms, Tensor(e!)? main_bias, {_WRITTEN}, {_NUMBERS}, bool[] needs) "
    f"-> ({', '.join(['Tensor'] * 10)})",
    _run_post_pre_backward,
    fake=_fake_post_pre_backward,
)
