"""Functions of elements and rows that have the same bits at every place, and a mode of them.

On a CPU torch computes whole vector registers by one formula and what is left behind them by
another.  Here every element lies in a whole register: rows of a fixed length, padded.  A GPU
computes each element by itself already.  Sums over rows, and gradients of what is broadcast, are
those of `ck.batch_invariant` on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ....moe import checks, routing_op
from ....moe.config import MAX_EXPERTS
from ....rowwise import api as rowwise
from ....runtime import checking
from ....runtime.torch_ops import define_op
from ...batch_invariant.ops import rows

# ---- choice --------------------------------------------------------------------------------------
# Top-k with a stated order of ties, and look-ups along rows whose gradients add in one order.
#
# torch.topk says nothing of equal elements, and the gradient of torch.gather adds by atomics on
# CUDA. Here the lowest index of equal elements comes first, and repeated indices add in their
# order.


def topk(x, k, dim=-1, largest=True, sorted=True, *, out=None):
    """Return the k largest elements of each row and their places, descending."""
    if not _are_rows(x, dim) or not largest or out is not None or not 1 <= k <= x.shape[-1]:
        return NotImplemented
    shape = (*x.shape[:-1], k)
    with torch.no_grad():
        wide = x.detach().float().reshape(-1, x.shape[-1])
        places = routing_op.select(wide, None, int(k), 1, 1).long()
    return torch.return_types.topk((_look_up(x, places).view(shape), places.view(shape)))


def gather(x, dim, index, *, sparse_grad=False, out=None):
    """Return the elements of each row at these places."""
    rows = _are_rows(x, dim) and index.shape[:-1] == x.shape[:-1] and index.shape[-1] > 0
    if not rows or index.dtype != torch.int64 or out is not None:
        return NotImplemented
    places = index.reshape(-1, index.shape[-1])
    # To moe an index outside is a slot that is not used; to torch it is an error.
    if not torch.compiler.is_compiling() and checking.in_memory(places) is not None:
        checks.index_values(places, x.shape[-1])
    return _look_up(x, places).view(index.shape)


def _are_rows(x: object, dim: int) -> bool:
    """Whether these are rows that a program holds, along the last dimension."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES or not x.dim():
        return False
    return dim in (-1, x.dim() - 1) and 1 <= x.shape[-1] <= MAX_EXPERTS


def _look_up(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    wide = x.float().reshape(-1, x.shape[-1])
    return routing_op.weights(wide, places, False, 1.0).to(x.dtype)


#: Elements of one call: fewer than torch splits among threads.
_BLOCK = 8192
#: Elements in two of the widest registers, of 16-bit numbers.
_REGISTERS = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: Name of an op of aten -> dy/dx of y = f(x, c), of an element x and a number c of the call.
SLOPES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "sin": lambda x, y, c: element(x, "cos", 0.0),
    "cos": lambda x, y, c: -element(x, "sin", 0.0),
    "exp": lambda x, y, c: y,
    "exp2": lambda x, y, c: y * 0.6931471805599453,
    "expm1": lambda x, y, c: y + 1,
    "log": lambda x, y, c: 1 / x,
    "log1p": lambda x, y, c: 1 / (x + 1),
    "softplus": lambda x, y, c: torch.where(x > 20, torch.ones_like(x), rowwise.sigmoid(x)),
    "rsqrt": lambda x, y, c: y * y * y * -0.5,
    "pow": lambda x, y, c: element(x, "pow", c - 1) * c,
    "rpow": lambda x, y, c: y * math.log(c),
    "elu": lambda x, y, c: torch.where(x > 0, torch.ones_like(x), y + 1),
    "erf": lambda x, y, c: element(-(x * x), "exp", 0.0) * 1.1283791670955126,
    "erfinv": lambda x, y, c: element(y * y, "exp", 0.0) * 0.8862269254527580,
}
_FUNCTIONS = {"softplus": F.softplus, "elu": F.elu}


def compute(x: torch.Tensor, kind: str, number: float) -> torch.Tensor:
    """Compute a function of `SLOPES` by torch: x ^ c of "pow", c ^ x of "rpow"."""
    if kind in ("pow", "rpow"):
        return torch.pow(x, number) if kind == "pow" else torch.pow(number, x)
    return (_FUNCTIONS.get(kind) or getattr(torch, kind))(x)


def _run(x: torch.Tensor, kind: str, number: float) -> torch.Tensor:
    if x.device.type != "cpu":
        return compute(x, kind, number)
    flat = x.contiguous().view(-1)
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        # A buffer of its own: the address is a multiple of a register's size.
        buffer = block.new_ones(-(-block.numel() // _REGISTERS) * _REGISTERS)
        buffer[: block.numel()] = block
        out[start : start + _BLOCK] = compute(buffer, kind, number)[: block.numel()]
    return out.view(x.shape)


def _setup(ctx, inputs, output):
    x, ctx.kind, ctx.number = inputs
    ctx.save_for_backward(x, output)


def _backward(ctx, g):
    return g * SLOPES[ctx.kind](*ctx.saved_tensors, ctx.number), None, None


element = define_op(
    "element(Tensor x, str kind, float number) -> Tensor",
    _run,
    fake=lambda x, kind, number: x.new_empty(x.shape),
    setup=_setup,
    backward=_backward,
    vmap=lambda info, in_dims, x, kind, number: (element(x, kind, number), in_dims[0]),
)


def _covered(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in DTYPES


def _by_place(x: object) -> bool:
    """Whether torch rounds an element of a tensor by its place."""
    return _covered(x) and x.device.type != "cuda"


def _element(kind: str, **options: object) -> Callable:
    """Return a function of one element that takes these values of its options and no others."""

    def call(x, *args, **kwargs):
        asked = dict(zip(options, args, strict=False)) | kwargs
        if not _by_place(x) or len(args) > len(options) or not asked.items() <= options.items():
            return NotImplemented
        return element(x, kind, 0.0)

    return call


def _power(x, exponent, *args, **kwargs):
    if isinstance(x, int | float):
        return _power_of(exponent, x, *args, **kwargs)
    exact = not isinstance(exponent, int | float) or exponent in (-2, -1, 0, 1, 2, 3)
    if exact or not _by_place(x) or args or kwargs:
        return NotImplemented
    return element(x, "pow", float(exponent))


def _power_of(exponent, base, *args, **kwargs):
    """Compute base ^ x of a number; Tensor.__rpow__ has the tensor first."""
    if not _by_place(exponent) or base <= 0 or args or kwargs:
        return NotImplemented
    return element(exponent, "rpow", float(base))


def _polar(length, angle, *, out=None):
    """Compute length (cos angle + i sin angle)."""
    if out is not None or not (_by_place(length) and _by_place(angle)):
        return NotImplemented
    return torch.complex(length * element(angle, "cos", 0.0), length * element(angle, "sin", 0.0))


def _norm(x, *args, p=None, ord=None, dim=None, keepdim=False, dtype=None, **kwargs):
    """Compute the 2-norm of rows: √Σ x², the sum by `ck.batch_invariant`."""
    args = list(args)
    order = p if p is not None else ord if ord is not None else args.pop(0) if args else 2
    dim = dim if dim is not None else args.pop(0) if args else None
    keepdim = args.pop(0) if args else keepdim
    if order not in (2, 2.0, "fro") or dim is None or args or kwargs or not _covered(x):
        return NotImplemented
    wide = x.to(torch.float32)
    return (wide * wide).sum(dim, keepdim=keepdim).sqrt().to(dtype or x.dtype)


def _normalize(x, p=2.0, dim=1, eps=1e-12, out=None):
    if p != 2 or out is not None or not _covered(x):
        return NotImplemented
    return x / _norm(x, dim=dim, keepdim=True).clamp_min(eps)


def _moment(finish: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Return a function of the variance of rows, Σ (x - mean)² / (n - correction), in fp32."""

    def call(x, dim=None, unbiased=None, keepdim=False, *, correction=None):
        if dim is None or isinstance(dim, bool) or not _covered(x):
            return NotImplemented
        dims = [dim] if isinstance(dim, int) else list(dim)
        freedom = correction if correction is not None else int(unbiased is not False)
        wide = x.to(torch.float32)
        centred = wide - wide.mean(dims, keepdim=True)
        total = (centred * centred).sum(dims, keepdim=keepdim)
        count = math.prod(x.shape[d] for d in dims)
        return finish(total / max(count - freedom, 0)).to(x.dtype)

    return call


class _Spread(torch.autograd.Function):
    """Broadcast a tensor; its gradient is summed by `ck.batch_invariant`'s tree."""

    @staticmethod
    def forward(ctx, t: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.shape = t.shape
        return t.expand(shape)

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        added = g.dim() - len(ctx.shape)
        sizes = (1,) * added + tuple(ctx.shape)
        dims = [d for d, size in enumerate(sizes) if size == 1 and g.shape[d] != 1]
        return (rows.total(g, dims, True) if dims else g).view(ctx.shape), None


def _spread(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Broadcast two tensors, so that gradients are summed by `_Spread`."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    # A parameter's gradient is a sum over tokens, whoever computes it.
    needs = [t.shape != shape and t.requires_grad and not t.is_leaf for t in (a, b)]
    pair = zip((a, b), needs, strict=True)
    return tuple(_Spread.apply(t, shape) if need else t for t, need in pair)


def _binary(function: Callable) -> Callable:
    """Return an elementwise function of two tensors whose broadcasts are `_Spread`."""

    def call(a, b, *args, **kwargs):
        if not (_covered(a) and _covered(b)) or a.shape == b.shape or not torch.is_grad_enabled():
            return NotImplemented
        return function(*_spread(a, b), *args, **kwargs)

    return call


def _repeat(x: torch.Tensor, *sizes) -> torch.Tensor:
    """Repeat a tensor; its gradient is summed as that of a broadcast."""
    counts = _listed(sizes)
    if not _is_tracked(x) or len(counts) < x.dim() or 0 in counts:
        return NotImplemented
    shape = (1,) * (len(counts) - x.dim()) + tuple(x.shape)
    # [n0, n1] -> [1, n0, 1, n1] -> [c0, n0, c1, n1] -> [c0 n0, c1 n1]
    ones = [size for n in shape for size in (1, n)]
    full = torch.Size(size for pair in zip(counts, shape, strict=True) for size in pair)
    out = [count * n for count, n in zip(counts, shape, strict=True)]
    return _Spread.apply(x.reshape(ones), full).reshape(out)


def _expand(x: torch.Tensor, *sizes) -> torch.Tensor:
    """Expand a tensor; its gradient is summed as that of a broadcast."""
    shape = _listed(sizes)
    added = len(shape) - x.dim()
    if not _is_tracked(x) or x.is_leaf or not sizes or added < 0:
        return NotImplemented
    sizes = [x.shape[d - added] if size == -1 else size for d, size in enumerate(shape)]
    return _Spread.apply(x, torch.Size(sizes))


def _is_tracked(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad and _covered(x)


def _listed(sizes: tuple) -> list[int]:
    return list(sizes[0]) if sizes and isinstance(sizes[0], list | tuple) else list(sizes)


def _product(function: Callable) -> Callable:
    """Return a product as `_binary`, and of complex numbers with each step rounded.

    A CPU contracts a product and a sum in whole vector registers, and not behind them.
    """
    real = _binary(function)

    def call(a, b, *args, **kwargs):
        if not (_is_complex(a) or _is_complex(b)) or args or kwargs:
            return real(a, b, *args, **kwargs)
        if isinstance(a, int | float):
            a, b = b, a
        if isinstance(b, int | float):
            return torch.view_as_complex(torch.view_as_real(a) * b)
        if _by_place(a) or _by_place(b):
            z, x = (b, a) if _by_place(a) else (a, b)
            parts = (torch.mul(*_spread(part, x)) for part in torch.view_as_real(z).unbind(-1))
            return torch.complex(*parts)
        if not (_is_complex(a) and _is_complex(b)):
            return NotImplemented
        parts = zip(torch.view_as_real(a).unbind(-1), torch.view_as_real(b).unbind(-1), strict=True)
        (ar, br), (ai, bi) = (_spread(*pair) for pair in parts)
        return torch.complex(ar * br - ai * bi, ar * bi + ai * br)

    return call


def _is_complex(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.complex64 and x.device.type != "cuda"


def _operators() -> dict[Callable, Callable]:
    names = ("mul", "add", "sub", "div", "multiply", "subtract", "divide", "true_divide")
    methods = ("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__truediv__")
    methods += ("mul_", "add_", "sub_", "div_", "__imul__", "__iadd__", "__isub__", "__itruediv__")
    homes = [(torch, name) for name in names]
    homes += [(torch.Tensor, name) for name in (*names, *methods)]
    functions = [getattr(home, name) for home, name in homes]
    products = {getattr(torch.Tensor, n) for n in ("mul", "multiply", "__mul__", "__rmul__")}
    products |= {torch.mul, torch.multiply}
    return {f: _product(f) if f in products else _binary(f) for f in functions}


def _both(name: str, function: Callable) -> dict[Callable, Callable]:
    homes = (torch, torch.Tensor, F, torch.special, torch.linalg)
    return {getattr(home, name): function for home in homes if hasattr(home, name)}


#: Function of torch -> ours, which may return NotImplemented.
TABLE: dict[Callable, Callable] = {
    **{f: c for kind in SLOPES if kind not in ("pow", "rpow", "softplus", "elu")
       for f, c in _both(kind, _element(kind)).items()},
    **_both("softplus", _element("softplus", beta=1, threshold=20)),
    **_both("elu", _element("elu", alpha=1, inplace=False)),
    **_both("pow", _power),
    torch.Tensor.__pow__: _power,
    torch.Tensor.__rpow__: _power_of,
    **_both("polar", _polar),
    **_both("norm", _norm),
    torch.linalg.vector_norm: _norm,
    F.normalize: _normalize,
    **_both("var", _moment(lambda variance: variance)),
    **_both("std", _moment(torch.sqrt)),
    torch.Tensor.repeat: _repeat,
    torch.Tensor.expand: _expand,
    torch.Tensor.expand_as: lambda x, other: _expand(x, other.shape),
    **_both("broadcast_to", _expand),
    **_both("topk", topk),
    **_both("gather", gather),
    **_operators(),
}  # fmt: skip
#: Names of the ops that the mode stands in for, as a dispatch mode sees them.
NAMES = frozenset(SLOPES) | {"linalg_vector_norm", "norm", "var", "std", "topk", "polar", "mul"}


class Elements(TorchFunctionMode):
    """Inside, functions of the table are ours."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        ours = TABLE.get(func)
        if ours is not None:
            result = ours(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
