"""Arguments of mhc to rows, or one exception that names the argument.  Works on meta tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    expected,
    one_of,
)
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import DTYPE_NAMES, FORMS, LAYOUTS, PRECISIONS, STREAMS, mappings

DTYPES = tuple(DTYPE_NAMES)
#: Iterations whose sums fit the memory of a backward.
MAX_ITERATIONS = 64
#: Iterations of the form "log" that are exact for any finite logits.  The matrix that is left after
#: the first iteration is fp32: elements below 2^-126 are lost from it.  A normalisation multiplies
#: an element by at most n = 4, as no line's sum is below 1/n, so after 25 more iterations a lost
#: element is at most 2^(4 * 25 - 126) = 2^-26, below the rounding of 1.
MAX_LOG_ITERATIONS = 26
#: The least epsilon of the form "epsilon": above the underflow of fp32, for any logits.
MIN_FORM_EPS = 1e-30
_MAX_SIZE = 2**31 - 1
_ROWS_OF = {mappings(n): n for n in STREAMS}
#: Rows of a head's phi, which are those of H_pre alone.
_HEAD_ROWS = {n: n for n in STREAMS}


@dataclass(frozen=True)
class Options:
    """Options of a site, besides its weights.

    layout: ``"cn"``, streams [..., C, n] (TransformerEngine's), or ``"nc"``, [..., n, C].
    precision: of phi's bf16 terms, ``"bf16x2"`` (relative error 2^-17) or ``"bf16x3"`` (2^-25).
    eps: under the root of the norm.  pre_eps: added to H_pre.  post_scale: of H_post.
    iterations: of Sinkhorn-Knopp.  form: ``"log"``, or ``"epsilon"`` with ``form_eps`` in every
    divisor (DeepSeek's).

    Example:
        >>> ck.mhc.Options(iterations=10).layout
        'cn'
    """

    layout: str = "cn"
    precision: str = "bf16x2"
    eps: float = torch.finfo(torch.float32).eps
    pre_eps: float = 0.0
    post_scale: float = 2.0
    iterations: int = 20
    form: str = "log"
    form_eps: float = 1e-6

    def numbers(self, n: int) -> tuple:
        """Return the numbers in the order in which the ops of a site take them."""
        return (
            n, self.layout, self.precision, self.eps, self.pre_eps, self.post_scale,
            self.iterations, self.form, self.form_eps,
        )  # fmt: skip


class Rows(NamedTuple):
    """Streams as rows [M, K], and the leading dimensions that they had."""

    x: torch.Tensor
    leading: torch.Size


def options(site_options: object) -> Options:
    """Check the options of a site."""
    if not isinstance(site_options, Options):
        raise ArgumentTypeError(expected("options", "a mhc.Options", type(site_options).__name__))
    layout(site_options.layout)
    precision(site_options.precision)
    for name in ("eps", "pre_eps"):
        number(name, getattr(site_options, name), 0.0)
    number("post_scale", site_options.post_scale, None)
    sinkhorn(site_options.iterations, site_options.form, site_options.form_eps)
    return site_options


def layout(value: object, name: str = "layout") -> None:
    """Check that the layout is one of `LAYOUTS`."""
    if value not in LAYOUTS:
        raise ArgumentValueError(one_of(name, LAYOUTS, value))


def precision(value: object) -> None:
    """Check that the precision is one of `PRECISIONS`."""
    if value not in PRECISIONS:
        raise ArgumentValueError(one_of("precision", PRECISIONS, value))


def sinkhorn(
    iterations: object,
    form: object,
    eps: object,
    name: str = "form_eps",
    *,
    iterations_name: str = "iterations",
) -> None:
    """Check the arguments of Sinkhorn-Knopp; names: those of the arguments."""
    checking.integer(iterations_name, iterations)
    if not 1 <= iterations <= MAX_ITERATIONS:
        raise ArgumentValueError(expected(iterations_name, f"1 to {MAX_ITERATIONS}", iterations))
    if form not in FORMS:
        raise ArgumentValueError(one_of("form", FORMS, form))
    if form == "log" and iterations > MAX_LOG_ITERATIONS:
        want = f"1 to {MAX_LOG_ITERATIONS} with form 'log'"
        raise ArgumentValueError(expected(iterations_name, want, iterations))
    number(name, eps, MIN_FORM_EPS if form == "epsilon" else 0.0)


def number(name: str, value: object, least: float | None) -> None:
    """Check that a value is a finite number, of ``least`` or more."""
    finite = abs(checking.number(name, value)) < float("inf")
    if not finite or (least is not None and value < least):
        want = "a finite number" if least is None else f"a finite number of {least:g} or more"
        raise ArgumentValueError(expected(name, want, value))


def streams(n: object) -> int:
    """Check that there are kernels for n streams."""
    checking.integer("n", n)
    if n not in STREAMS:
        raise ArgumentValueError(one_of("n", STREAMS, n))
    return n


def mixed_dtype(name: str, t: object) -> None:
    """Check for a tensor of bf16 or fp32."""
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, DTYPES)


def fp32(name: str, t: object, like: torch.Tensor, of: str = "x") -> None:
    """Check for a tensor of fp32 on the device of ``like``, the argument ``of``."""
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, (torch.float32,))
    checking.same_device(name, t, of, like)


def stream_rows(x: object, n: int, layout: str, k: int | None = None, flat: bool = False) -> Rows:
    """Convert streams [..., C, n] or [..., n, C] to rows, of ``k`` = n C elements if that is given.

    ``flat``: [..., k] may come instead.
    """
    mixed_dtype("x", x)
    checking.supported("mhc", x.device)
    if flat and x.dim() >= 1 and x.shape[-1] == k:
        return _rows("x", x, x.shape[:-1], k)
    shape = "[..., C, n]" if layout == "cn" else "[..., n, C]"
    place = -1 if layout == "cn" else -2
    if x.dim() < 2 or x.shape[place] != n:
        want = f"shape {shape} with n = {n} (layout {layout!r})"
        raise ShapeError(expected("x", want, list(x.shape)))
    if min(x.shape[-2:]) < 1:
        raise ShapeError(expected("x", f"shape {shape} with C of 1 or more", list(x.shape)))
    size = x.shape[-1] * x.shape[-2]
    if k is not None and size != k:
        also = f", or [..., {k}]" if flat else ""
        want = f"shape {shape} with n C = {k}, the columns of phi{also}"
        raise ShapeError(expected("x", want, list(x.shape)))
    return _rows("x", x, x.shape[:-2], size)


def _rows(name: str, t: torch.Tensor, leading: torch.Size, columns: int) -> Rows:
    if max(columns, *leading, 1) > _MAX_SIZE:
        raise ShapeError(expected(name, f"sizes of at most {_MAX_SIZE}", list(t.shape)))
    rows = t.reshape(leading.numel(), columns)
    return Rows(rows if rows.is_contiguous() else rows.contiguous(), leading)


def tokens(name: str, t: object, trailing: tuple[int, ...], rows: Rows) -> torch.Tensor:
    """Convert fp32 [..., *trailing] of every token to [M, size]; any strides but the last's."""
    fp32(name, t, rows.x)
    m, leading = rows.x.shape[0], max(t.dim() - len(trailing), 0)
    if tuple(t.shape[leading:]) != trailing or t.shape[:leading].numel() != m:
        want = f"shape [..., {', '.join(map(str, trailing))}] of {m} tokens"
        raise ShapeError(expected(name, want, list(t.shape)))
    return t.reshape(m, math.prod(trailing))


def channels(name: str, t: object, rows: Rows, n: int) -> torch.Tensor:
    """Convert [..., C] of every token, in x's dtype, to [M, C]."""
    x = rows.x
    c = x.shape[1] // n
    _like_x(name, t, x)
    if t.dim() < 1 or t.shape[-1] != c or t.shape[:-1].numel() != len(x):
        want = f"shape [..., {c}] of {len(x)} tokens"
        raise ShapeError(expected(name, want, list(t.shape)))
    return _rows(name, t, t.shape[:-1], c).x


def bias(t: object, rows: Rows, n: int) -> None:
    """Check a bias: [C] in x's dtype, or None."""
    if t is not None:
        _like_x("bias", t, rows.x)
        _shape("bias", t, [rows.x.shape[1] // n])


def _like_x(name: str, t: object, x: torch.Tensor) -> None:
    """Check for a tensor of the dtype and device of the argument x."""
    checking.tensor(name, t)
    if t.dtype is not x.dtype:
        raise DtypeError(expected(name, f"{x.dtype}, the dtype of x", t.dtype))
    checking.same_device(name, t, "x", x)


def _shape(name: str, t: torch.Tensor, *shapes: list[int]) -> None:
    """Check that a tensor has one of the shapes."""
    # Not `in`: Dynamo finds no list of symbolic sizes by it.
    if all(list(t.shape) != shape for shape in shapes):
        want = f"shape {' or '.join(map(str, shapes))}"
        raise ShapeError(expected(name, want, list(t.shape)))


def count_streams(phi: object, head: bool = False) -> int:
    """Return n of phi [N, K]; of a ``head``, [n, K]."""
    mixed_dtype("phi", phi)
    return _streams_by_rows("phi", phi, _HEAD_ROWS if head else _ROWS_OF)


def _streams_by_rows(name: str, phi: torch.Tensor, by_rows: Mapping[int, int]) -> int:
    """Return n of phi [rows, n C]."""
    checking.rank(name, phi, 2, "[n, K]" if by_rows is _HEAD_ROWS else "[N, K]")
    if phi.shape[0] not in by_rows:
        want = " or ".join(f"{rows} rows (n = {n})" for rows, n in by_rows.items())
        raise ShapeError(expected(name, want, list(phi.shape)))
    n = by_rows[phi.shape[0]]
    if phi.shape[1] < n or phi.shape[1] % n:
        raise ShapeError(expected(name, f"columns n C, a multiple of {n}", list(phi.shape)))
    return n


def embedding(t: object) -> None:
    """Check an embedding: [..., C] of bf16 or fp32."""
    mixed_dtype("embedding", t)
    checking.supported("mhc", t.device)
    if t.dim() < 1 or t.shape[-1] < 1:
        want = "shape [..., C] with C of 1 or more"
        raise ShapeError(expected("embedding", want, list(t.shape)))


def mapping(
    phi: torch.Tensor, norm_weight: object, x: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Check phi and norm_weight [K] or None, and return them by name."""
    _weight("phi", phi, x, list(phi.shape))
    if norm_weight is not None:
        _weight("norm_weight", norm_weight, x, [phi.shape[1]])
    return {"phi": phi, "norm_weight": norm_weight}


def _weight(name: str, t: object, x: torch.Tensor, *shapes: list[int]) -> None:
    """Check a weight: bf16 or fp32, of one of the shapes, on x's device."""
    mixed_dtype(name, t)
    checking.same_device(name, t, "x", x)
    _shape(name, t, *shapes)


def gates(
    alpha: object, beta: object, x: torch.Tensor, n: int, head: bool = False
) -> dict[str, torch.Tensor]:
    """Check alpha [3] and beta [N] or [1, N], and return them by name; of a ``head`` [1], [n]."""
    shapes = ([n],) if head else ([mappings(n)], [1, mappings(n)])
    _weight("alpha", alpha, x, [1 if head else 3])
    _weight("beta", beta, x, *shapes)
    return {"alpha": alpha, "beta": beta}


def main_grads(
    grads_by_name: object, weights: Mapping[str, torch.Tensor | None], x: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return a main_grad or None for each weight of a function."""
    if grads_by_name is None:
        grads_by_name = {}
    if not isinstance(grads_by_name, Mapping):
        want = f"None, or a mapping from {', '.join(weights)} to fp32 tensors"
        raise ArgumentTypeError(expected("main_grads", want, type(grads_by_name).__name__))
    for name in grads_by_name:
        if name not in weights:
            raise ArgumentValueError(one_of("main_grads", tuple(weights), name))
    mains = []
    for name, weight in weights.items():
        main = grads_by_name.get(name)
        argument = f"main_grads[{name!r}]"
        if main is not None:
            if weight is None:
                raise ArgumentValueError(expected(argument, f"none without {name}", "a tensor"))
            destination.check(main, weight, x, names=(argument, name))
        if weight is not None and not torch.compiler.is_compiling():
            destination.check_values(x, weight, None, main, argument=argument)
        mains.append(main)
    return mains


def token_rows(name: str, t: torch.Tensor, columns: int) -> torch.Tensor:
    """View [..., ``columns`` or more] as rows."""
    if t.dim() < 2 or t.shape[-1] < columns:
        want = f"shape [M, {columns} or more]"
        raise ShapeError(expected(name, want, list(t.shape)))
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def flat_ms(ms: torch.Tensor, m: int) -> torch.Tensor:
    """Return ms as [M], of the tokens of H."""
    if ms.numel() != m:
        raise ShapeError(expected("ms", f"shape [{m}], the tokens of H", list(ms.shape)))
    return ms.reshape(m)


def matrices(name: str, t: object, n: int) -> torch.Tensor:
    """View fp32 [..., n, n] or [M, n²] as rows."""
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, (torch.float32,))
    checking.supported("mhc", t.device)
    if t.dim() >= 2 and tuple(t.shape[-2:]) == (n, n):
        return t.reshape(t.shape[:-2].numel(), n * n)
    if t.dim() == 2 and t.shape[1] == n * n:
        return t
    want = f"shape [..., {n}, {n}] or [M, {n * n}]"
    raise ShapeError(expected(name, want, list(t.shape)))


def state_options(metadata: Mapping[str, object], mine: Options) -> None:
    """Check that a state was made under a module's options; ``precision`` may differ."""
    theirs = metadata.get("mhc_options")
    if theirs is None:
        return
    for name, value in asdict(mine).items():
        if name != "precision" and theirs.get(name, value) != value:
            want = f"{theirs[name]!r}, that of the state"
            raise ArgumentValueError(expected(f"options.{name}", want, repr(value)))


def unwritten(x: torch.Tensor, version: int) -> None:
    """Check that no sublayer wrote into the streams x of its site, which nothing keeps."""
    if x._version != version:
        want = "streams that the sublayer leaves as they are, in recompute_streams"
        raise ArgumentValueError(expected("x", want, "streams that it wrote in place"))


def sites(value: object) -> None:
    """Check the sites of a group: an int of 1 or more."""
    checking.integer("sites", value)
    if value < 1:
        raise ArgumentValueError(expected("sites", "1 or more", value))


def sublayer(value: object) -> None:
    """Check that a sublayer can be called."""
    if not callable(value):
        raise ArgumentTypeError(expected("sublayer", "a callable", type(value).__name__))


def module(n: object, channels: object, site_options: object, dtype: torch.dtype) -> None:
    """Check the constructor arguments of a module."""
    streams(n)
    checking.integer("channels", channels)
    if not 1 <= channels <= _MAX_SIZE // n:
        raise ArgumentValueError(expected("channels", f"1 to {_MAX_SIZE // n}", channels))
    options(site_options)
    checking.dtype("dtype", dtype, DTYPES)


def converted(
    named: Mapping[str, torch.Tensor | None], head: bool = False
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (n, flat weights) of another library's phi, alpha, beta, norm_weight, in this order.

    ``named``: by that library's names, which errors have.  ``head``: rows of H_pre alone may come.
    """
    (of_phi, phi), (of_alpha, alpha), (of_beta, beta), (of_weight, weight) = named.items()
    for name, t in named.items():
        if name != of_weight or t is not None:
            mixed_dtype(name, t)
            checking.same_device(name, t, of_phi, phi)
    n = _streams_by_rows(of_phi, phi, _HEAD_ROWS | _ROWS_OF if head else _ROWS_OF)
    rows, k = phi.shape
    gates = 1 if rows == n else 3
    for name, t, size in ((of_alpha, alpha, gates), (of_beta, beta, rows), (of_weight, weight, k)):
        if t is not None and t.numel() != size:
            raise ShapeError(expected(name, f"{size} elements", list(t.shape)))
    flat = {"alpha": alpha.reshape(gates), "beta": beta.reshape(rows)}
    flat |= {} if weight is None else {"norm_weight": weight.reshape(k)}
    return n, {"phi": phi, **flat}


def columns(weight: object, n: object) -> None:
    """Check that a weight's last dimension is n C."""
    streams(n)
    checking.tensor("weight", weight)
    if weight.dim() < 1 or weight.shape[-1] % n or not weight.shape[-1]:
        want = f"shape [..., n C], a multiple of {n}"
        raise ShapeError(expected("weight", want, list(weight.shape)))


def sublayers(sites: object) -> list[Sequence]:
    """Return (f, bias, H_post, H_res) of each site."""
    want = "(f, bias or None, H_post, H_res)"
    if not isinstance(sites, Iterable):
        got = type(sites).__name__
        raise ArgumentTypeError(expected("sublayers", f"a sequence of {want}", got))
    sites = list(sites)
    for index, site in enumerate(sites):
        if not isinstance(site, (tuple, list)) or len(site) != 4:
            got = f"{len(site)} values" if isinstance(site, (tuple, list)) else type(site).__name__
            raise ArgumentTypeError(expected(f"sublayers[{index}]", want, got))
    return sites


def te_phi(phi: object) -> None:
    """Check a phi of TransformerEngine: n = 4."""
    if count_streams(phi) != 4:
        raise ShapeError(expected("phi", "24 rows (n = 4)", list(phi.shape)))


def te_streams(n: object) -> None:
    """Check a number of streams of TransformerEngine: 4."""
    streams(n)
    if n != 4:
        raise ArgumentValueError(expected("n", "4, as TransformerEngine has it", n))


def te_options(buffer: object, **flags: object) -> None:
    """Check options of TransformerEngine that change no result here."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "a bool", type(value).__name__))
    if buffer is not None:
        want = "None (ck.mhc.connect adds the gradients of x in one pass)"
        raise ArgumentValueError(expected("fused_grad_x_acc_buffer", want, type(buffer).__name__))
