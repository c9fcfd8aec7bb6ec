"""``ck.mhc``: manifold-constrained hyper-connections (arXiv 2512.24880), the public functions.

n residual streams x of C channels; M tokens, whatever the leading dimensions are; K = n C and
N = 2 n + n².  A site computes

    H = x (phi ⊙ norm_weight)ᵀ,  ms = Σ x² / K,  r = √(ms + eps)             (14, 15)
    z = alpha H / r + beta                                                    (16)
    H_pre = σ(z) + pre_eps,  H_post = post_scale σ(z),  H_res = Sinkhorn(z)   (17 to 19)
    out = Σ_i x_i H_pre_i;  f = F(out);  y_j = (f + bias) H_post_j + Σ_i x_i H_res[i, j]

H_res contracts its first index, and rows are normalised before columns: every output stream is a
convex mix of the input streams.  docs/mhc.md has the layouts and what the bits depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from . import checks, nodes, op, recompute, site_op
from .checks import Options
from .config import mappings

_EPS = torch.finfo(torch.float32).eps


def projection(
    x: torch.Tensor,
    phi: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    layout: str = "cn",
    precision: str = "bf16x2",
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """H = x (phi ⊙ norm_weight)ᵀ and ms = Σ x² / K (14, 15).

    Args:
        x: [..., K], or [..., C, n] or [..., n, C] as ``layout`` says; bf16 or fp32.
        phi: [N, K], 24 rows for n = 4 or 8 for n = 2; bf16 or fp32; columns in the layout's order.
        norm_weight: [K], bf16 or fp32, or None.
        layout: ``"cn"`` or ``"nc"``: which elements are neighbours of a chunk of the sum.
        precision: ``"bf16x2"`` or ``"bf16x3"``, the bf16 terms of phi (and of an fp32 x).
        main_grads: fp32 tensors that backward adds gradients into, by name: phi, norm_weight.

    Returns:
        (H fp32 [M, 32] for n = 4 or [M, 8] for n = 2, zeros behind N; ms fp32 [M]).

    Differentiable in x, phi and norm_weight.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` (H, ms, dx), ``split_invariant`` (with ``main_grads``,
        cut at multiples of 1024 tokens), ``schedule_invariant`` on GPUs.  They are those of every
        function here.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        AliasError: a main_grad shares memory with an input.
        UnsupportedTransformError: a double backward, or a transform of ``torch.func``.
        BackendUnavailable: the device has no backend.

    Example:
        >>> x, phi = torch.randn(5, 64, 4), torch.randn(24, 4 * 64)
        >>> H, ms = ck.mhc.projection(x, phi)
        >>> H.shape[0], ms.shape[0]
        (5, 5)
    """
    checks.layout(layout)
    checks.precision(precision)
    n = checks.count_streams(phi)
    rows = checks.stream_rows(x, n, layout, phi.shape[1], flat=True)
    weights = checks.mapping(phi, norm_weight, rows.x)
    mains = checks.main_grads(main_grads, weights, rows.x)
    return op.projection(rows.x, phi, norm_weight, *mains, n, layout, precision)


def scale(
    H: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    ms: torch.Tensor,
    n: int,
    *,
    eps: float = _EPS,
    pre_eps: float = 0.0,
    post_scale: float = 2.0,
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """H_pre = σ(z) + pre_eps, H_post = post_scale σ(z), H_res = z (16 to 18).

    z = alpha H / √(ms + eps) + beta.

    Args:
        H: fp32 [M, N or more]; columns behind N are not read.
        alpha: [3]: of pre, post and res.  beta: [N] or [1, N].  bf16 or fp32.
        ms: fp32 [M].
        n: 2 or 4.
        main_grads: As in `projection`, by name: alpha, beta.

    Returns:
        fp32 ([M, n], [M, n], [M, n, n]), the last one without Sinkhorn.

    Example:
        >>> H, ms = ck.mhc.projection(torch.randn(5, 64, 4), torch.randn(24, 4 * 64))
        >>> pre, post, res = ck.mhc.scale(H, torch.ones(3), torch.zeros(24), ms, 4)
        >>> pre.shape
        torch.Size([5, 4])
    """
    checks.streams(n)
    checks.fp32("H", H, H)
    h = checks.token_rows("H", H, mappings(n))
    checks.fp32("ms", ms, H, "H")
    checks.gates(alpha, beta, H, n)
    for name, value, least in (("eps", eps, 0.0), ("pre_eps", pre_eps, 0.0)):
        checks.number(name, value, least)
    checks.number("post_scale", post_scale, None)
    flat = checks.flat_ms(ms, len(h))
    mains = checks.main_grads(main_grads, {"alpha": alpha, "beta": beta}, H)
    pre, post, res = op.scale(h, alpha, beta, flat, *mains, n, eps, pre_eps, post_scale)
    return pre, post, nodes.shaped(res, -1, n, n)


def sinkhorn(
    H_res: torch.Tensor, n: int = 4, *, iterations: int = 20, form: str = "log", eps: float = 1e-6
) -> torch.Tensor:
    """Sinkhorn-Knopp (19): rows, then columns are divided by their sums, ``iterations`` times.

    Args:
        H_res: fp32 [..., n, n], logits; or [M, n²].
        iterations: 1 to 26, or to 64 with ``form="epsilon"``; never "to convergence".  More of the
            form "log" are refused: logits far apart would lose elements that still matter.
        form: ``"log"``, without an epsilon, or ``"epsilon"``: softmax over rows + eps, then every
            divisor + eps (DeepSeek).  They differ by about 6e-6 at 1e-6.

    Returns:
        fp32, shaped like ``H_res``; columns sum to 1.

    Example:
        >>> P = ck.mhc.sinkhorn(torch.randn(5, 4, 4))
        >>> (P.sum(1) - 1).abs().max() < 1e-5  # columns sum to 1
        tensor(True)
    """
    checks.streams(n)
    checks.sinkhorn(iterations, form, eps, "eps")
    z = checks.matrices("H_res", H_res, n)
    return nodes.shaped(op.sinkhorn(z, n, iterations, form, eps), *H_res.shape)


def aggregate(x: torch.Tensor, H_pre: torch.Tensor, n: int, *, layout: str = "cn") -> torch.Tensor:
    """out = Σ_i x_i H_pre_i: [..., C] in x's dtype.

    Args:
        x: [..., C, n] or [..., n, C], as ``layout`` says; bf16 or fp32.
        H_pre: fp32 [..., n] of as many tokens; any stride between tokens.

    Example:
        >>> x, H_pre = torch.randn(5, 64, 4), torch.rand(5, 4)
        >>> ck.mhc.aggregate(x, H_pre, 4).shape
        torch.Size([5, 64])
    """
    checks.layout(layout)
    checks.streams(n)
    rows = checks.stream_rows(x, n, layout)
    pre = checks.tokens("H_pre", H_pre, (n,), rows)
    return _collapsed(op.aggregate(rows.x, pre, n, layout), rows)


def expand_combine(
    f: torch.Tensor,
    bias: torch.Tensor | None,
    H_post: torch.Tensor,
    x: torch.Tensor,
    H_res: torch.Tensor,
    n: int,
    *,
    layout: str = "cn",
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """y_j = (f + bias) H_post_j + Σ_i x_i H_res[i, j]: shaped like x.

    Args:
        f: [..., C], the sublayer's output, in x's dtype.  bias: [C] in x's dtype, or None.
        H_post: fp32 [..., n].  H_res: fp32 [..., n, n].  Any stride between tokens.
        x: [..., C, n] or [..., n, C], as ``layout`` says.
        main_grads: As in `projection`, by name: bias.

    Example:
        >>> f, x, H_post = torch.randn(5, 64), torch.randn(5, 64, 4), torch.rand(5, 4)
        >>> H_res = ck.mhc.sinkhorn(torch.randn(5, 4, 4))
        >>> ck.mhc.expand_combine(f, None, H_post, x, H_res, 4).shape
        torch.Size([5, 64, 4])
    """
    checks.layout(layout)
    checks.streams(n)
    rows, tensors = _expanded(f, bias, H_post, x, H_res, n, layout)
    mains = checks.main_grads(main_grads, {"bias": bias}, rows.x)
    return nodes.shaped(op.expand_combine(*tensors, *mains, n, layout, None), *x.shape)


def mix_and_aggregate(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    options: Options = Options(),
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`projection`, `scale`, `sinkhorn` and `aggregate`: their bytes, in fewer passes.

    Args:
        As in those; ``main_grads`` by name: phi, norm_weight, alpha, beta.

    Returns:
        (out [..., C], H_post fp32 [..., n], H_res fp32 [..., n, n]).

    Example:
        >>> x, phi = torch.randn(5, 64, 4), torch.randn(24, 4 * 64)
        >>> alpha, beta = torch.ones(3), torch.zeros(24)
        >>> out, H_post, H_res = ck.mhc.mix_and_aggregate(x, phi, alpha, beta)
        >>> out.shape, H_post.shape
        (torch.Size([5, 64]), torch.Size([5, 4]))
    """
    rows, n, weights = _site_weights(x, phi, alpha, beta, norm_weight, options)
    mains = checks.main_grads(main_grads, weights, rows.x)
    results = site_op.mix(rows.x, phi, norm_weight, alpha, beta, *mains, *options.numbers(n), False)
    out, _, post, res, *_ = results
    return (
        _collapsed(out, rows),
        nodes.shaped(post, *rows.leading, n),
        nodes.shaped(res, *rows.leading, n, n),
    )


def connect(
    x: torch.Tensor,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    options: Options = Options(),
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One whole site: y of x, where f = ``sublayer(out)``.

    Forward has the bytes of `mix_and_aggregate` and `expand_combine`.  Backward makes dx of all
    that x goes into in one pass and rounds it once: (6 n + 4) C elements a token move, where the
    functions by themselves move (9 n + 4) C.  `recompute_streams` keeps fewer x for it.

    Args:
        sublayer: From [..., C] to [..., C], in x's dtype.
        Others: As in those; ``main_grads`` by name: phi, norm_weight, alpha, beta, bias.

    Example:
        >>> x, phi = torch.randn(5, 64, 4), torch.randn(24, 4 * 64)
        >>> alpha, beta = torch.ones(3), torch.zeros(24)
        >>> ck.mhc.connect(x, torch.tanh, phi, alpha, beta).shape
        torch.Size([5, 64, 4])
    """
    checks.sublayer(sublayer)
    rows, n, weights = _site_weights(x, phi, alpha, beta, norm_weight, options)
    checks.bias(bias, rows, n)
    *mains, main_bias = checks.main_grads(main_grads, {**weights, "bias": bias}, rows.x)
    args = (rows.x, phi, norm_weight, alpha, beta, *mains, *options.numbers(n), True)
    position, groups = None, recompute.current()
    if groups is None:
        results = site_op.mix(*args)
    else:
        position, results = groups.run_mix(site_op.mix, n, options.layout, *args)
    out, _, post, res, _, _, link = results
    f = checks.channels("sublayer(out)", sublayer(_collapsed(out, rows)), rows, n)
    streams = (rows.x.detach(), res.detach())
    args = (f, bias, post, *streams, main_bias, n, options.layout, link)
    y = op.expand_combine(*args) if groups is None else groups.run_expand(position, *args)
    return nodes.shaped(y, *x.shape)


def post_pre(
    f: torch.Tensor,
    bias: torch.Tensor | None,
    H_post: torch.Tensor,
    x: torch.Tensor,
    H_res: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    H_pre: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    options: Options = Options(),
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """`expand_combine` of one site and `mix_and_aggregate` of the next: their bytes.

    Streams are projected, or with ``H_pre`` collapsed, where they are made: (3 n + 2) C elements a
    token move.

    Args:
        f, bias, H_post, x, H_res: Of the site that ends, as in `expand_combine`.
        phi, alpha, beta, norm_weight: Of the site that begins.
        H_pre: fp32 [..., n]: y is collapsed with it, in the pass that makes y; the H_pre that the
            next site makes is returned, for the site behind it (the shifted form of DeepSeek V4.1;
            begin with one-hot rows).
        main_grads: By name: bias, phi, norm_weight, alpha, beta.

    Returns:
        (y, out, H_post, H_res); with ``H_pre`` a fifth: the next one.

    Example:
        >>> x, phi = torch.randn(5, 64, 4), torch.randn(24, 4 * 64)
        >>> alpha, beta = torch.ones(3), torch.zeros(24)
        >>> f, H_post, H_res = torch.randn(5, 64), torch.rand(5, 4), torch.rand(5, 4, 4)
        >>> len(ck.mhc.post_pre(f, None, H_post, x, H_res, phi, alpha, beta))
        4
    """
    checks.options(options)
    n = checks.count_streams(phi)
    rows, tensors = _expanded(f, bias, H_post, x, H_res, n, options.layout, phi.shape[1])
    weights = checks.mapping(phi, norm_weight, rows.x) | checks.gates(alpha, beta, rows.x, n)
    shifted = None if H_pre is None else checks.tokens("H_pre", H_pre, (n,), rows)
    mains = checks.main_grads(main_grads, {"bias": bias, **weights}, rows.x)
    results = site_op.post_pre(
        *tensors, shifted, phi, norm_weight, alpha, beta, *mains, *options.numbers(n)
    )
    y, out, pre, post, res, *_ = results
    outputs = (
        nodes.shaped(y, *x.shape),
        _collapsed(out, rows),
        nodes.shaped(post, *rows.leading, n),
        nodes.shaped(res, *rows.leading, n, n),
    )
    return outputs if H_pre is None else (*outputs, nodes.shaped(pre, *rows.leading, n))


def head(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    options: Options = Options(),
    main_grads: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The collapse behind the last site: Σ_i x_i H_pre_i, [..., C].

    Args:
        phi: [n, K], of H_pre alone.  alpha: [1].  beta: [n].
        Others: As in `mix_and_aggregate`; main_grads are shaped like these weights.

    Example:
        >>> x, phi = torch.randn(5, 64, 4), torch.randn(4, 4 * 64)
        >>> ck.mhc.head(x, phi, torch.ones(1), torch.zeros(4)).shape
        torch.Size([5, 64])
    """
    rows, n, weights = _site_weights(x, phi, alpha, beta, norm_weight, options, head=True)
    mains = checks.main_grads(main_grads, weights, rows.x)
    results = site_op.mix(rows.x, phi, norm_weight, alpha, beta, *mains, *options.numbers(n), False)
    return _collapsed(results[0], rows)


def expand_from_embedding(embedding: torch.Tensor, n: int, *, layout: str = "cn") -> torch.Tensor:
    """n streams, each a copy of ``embedding`` [..., C]: [..., C, n] or [..., n, C].

    Its gradient is the sum over the streams, ascending, in fp32, rounded once.

    Example:
        >>> ck.mhc.expand_from_embedding(torch.randn(5, 64), 4).shape
        torch.Size([5, 64, 4])
    """
    checks.layout(layout)
    checks.streams(n)
    checks.embedding(embedding)
    leading = embedding.shape[:-1]
    repeated = op.repeat(embedding.reshape(leading.numel(), embedding.shape[-1]), n, layout)
    c = embedding.shape[-1]
    return nodes.shaped(repeated, *leading, *((c, n) if layout == "cn" else (n, c)))


def multilayer_recompute(
    x: torch.Tensor,
    sublayers: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]],
    n: int,
    *,
    layout: str = "cn",
) -> list[torch.Tensor]:
    """The streams behind each of several sites, again: x_l of x_(l-1) (20).

    For a backward that kept x once and, of each site, only what is small beside it.  On SM90, up to
    4 sites are one pass: x is read once, (n + L (n + 1)) C elements a token move for L sites.

    Args:
        x: The streams before the first site.
        sublayers: (f, bias, H_post, H_res) of each site, as `expand_combine` takes them.

    Returns:
        x behind each site, with the bytes that `expand_combine` gave; no gradient flows.

    Example:
        >>> x, H_res = torch.randn(5, 64, 4), ck.mhc.sinkhorn(torch.randn(5, 4, 4))
        >>> site = torch.randn(5, 64), None, torch.rand(5, 4), H_res
        >>> [t.shape[1] for t in ck.mhc.multilayer_recompute(x, [site, site], 4)]
        [64, 64]
    """
    checks.layout(layout)
    checks.streams(n)
    rows = checks.stream_rows(x, n, layout)
    four = checks.sublayers(sublayers)
    sites = [_expanded(f, b, post, x, res, n, layout)[1] for f, b, post, res in four]
    if not sites:
        return []
    fs, biases, posts, _, ress = (list(tensors) for tensors in zip(*sites, strict=True))
    with torch.no_grad():
        streams_by_site = op.recompute(rows.x, fs, biases, posts, ress, n, layout)
    return [nodes.shaped(y, *x.shape) for y in streams_by_site]


def _collapsed(out: torch.Tensor, rows: checks.Rows) -> torch.Tensor:
    """View [M, C] as [..., C]; C is explicit, for inputs without tokens."""
    return nodes.shaped(out, *rows.leading, out.shape[1])


def _site_weights(x, phi, alpha, beta, norm_weight, options: Options, head: bool = False):
    """Check a site that begins, or a head; return (rows, n, its weights by name)."""
    checks.options(options)
    n = checks.count_streams(phi, head)
    rows = checks.stream_rows(x, n, options.layout, phi.shape[1])
    weights = checks.mapping(phi, norm_weight, rows.x)
    return rows, n, weights | checks.gates(alpha, beta, rows.x, n, head)


def _expanded(f, bias, post, x, res, n: int, layout: str, k: int | None = None):
    """Check a site that ends; return (rows, (f, bias, post, x, res)).  ``k``: K of x."""
    rows = checks.stream_rows(x, n, layout, k)
    flat = checks.channels("f", f, rows, n)
    checks.bias(bias, rows, n)
    post = checks.tokens("H_post", post, (n,), rows)
    res = checks.tokens("H_res", res, (n, n), rows)
    return rows, (flat, bias, post, rows.x, res)
