"""Calls of torch's functions on rows, one for each op that `batch_invariant` covers, and more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model.batch_invariant import overrides
from tests.contract import RowOp

BF16, FP32 = torch.bfloat16, torch.float32


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Case:
    """``call(rows [M, width])`` returns M results of torch's function; ``op``: the covered one.

    ``rows`` is how many the battery takes: fewer where a row is a matrix.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    op: str
    width: int = 203
    rows: int = 67
    gradient: bool = True


def of_gradient(function: str, *others: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A backward op of aten on (dy, x or y), both from one row."""

    def call(x: torch.Tensor) -> torch.Tensor:
        dy, y = x.chunk(2, -1)
        return getattr(torch.ops.aten, function)(dy, y.contiguous(), *others)

    return call


def like(x: torch.Tensor, *shape: int, seed: int = 1) -> torch.Tensor:
    return drawn(*shape, seed=seed, dtype=x.dtype)


def layer_norm_backward(x):
    dy, rows = (t.contiguous() for t in x.chunk(2, -1))
    width = rows.shape[-1]
    weight, bias = like(x, width), like(x, width, seed=2)
    _, mean, rstd = torch.ops.aten.native_layer_norm(rows, [width], weight, bias, 1e-5)
    make = torch.ops.aten.native_layer_norm_backward
    return make(dy, rows, [width], mean, rstd, weight, bias, [True, False, False])[0]


def rms_norm_backward(x):
    dy, rows = (t.contiguous() for t in x.chunk(2, -1))
    width = rows.shape[-1]
    weight = like(x, width)
    _, rstd = torch.ops.aten._fused_rms_norm(rows, [width], weight, 1e-5)
    make = torch.ops.aten._fused_rms_norm_backward
    return make(dy, rows, [width], rstd, weight, [True, False])[0]


def attention(x, heads: int = 2, length: int = 9, **options):
    q, k, v = x.reshape(len(x), 3, heads, length, -1).unbind(1)
    return F.scaled_dot_product_attention(q, k, v, **options).flatten(1)


def lookups(x):
    """The gradient of an embedding whose tokens are rows: a table of one entry a row."""
    ids = torch.arange(len(x))
    return torch.ops.aten.embedding_dense_backward(x.contiguous(), ids, len(x), -1, False)


def table(x):
    return like(x, x.shape[-1], 37)


def matrices(x):
    """Each row as a matrix of 5 x 21, and a matrix for all of them."""
    return x.reshape(len(x), 5, 21), like(x, 1, 21, 9).expand(len(x), 21, 9)


def weight_in_fp32(x):
    weight = like(x.double(), x.shape[-1])
    return F.rms_norm(x, x.shape[-1:], weight.to(torch.promote_types(x.dtype, FP32)))


_BACKWARD = {"width": 206, "gradient": False}
_MATRIX = {"width": 105}
_ATTENTION = {"op": "scaled_dot_product_attention", "width": 3 * 2 * 9 * 24, "rows": 9}
CASES: dict[str, Case] = {
    "linear": Case(lambda x: F.linear(x, like(x, 37, x.shape[-1]), like(x, 37, seed=2)), "linear"),
    # Which torch computes as a product, a rounding and a sum.
    "linear, strided": Case(
        lambda x: F.linear(x.reshape(len(x), 21, 5).mT, like(x, 9, 21), like(x, 9, seed=2)),
        "linear",
        **_MATRIX,
    ),
    "mm": Case(lambda x: torch.mm(x, table(x)), "mm"),
    "matmul": Case(lambda x: x @ table(x), "mm"),
    "addmm": Case(lambda x: torch.addmm(like(x, 37), x, table(x), beta=0.5, alpha=1.5), "addmm"),
    "addmm bias": Case(lambda x: torch.addmm(like(x, 37), x, table(x)), "addmm"),
    "bmm": Case(lambda x: torch.bmm(*matrices(x)), "bmm", **_MATRIX),
    "baddbmm": Case(lambda x: torch.baddbmm(like(x, 1, 9), *matrices(x)), "baddbmm", **_MATRIX),
    "matmul 3-D": Case(lambda x: matrices(x)[0] @ like(x, 21, 9), "mm", **_MATRIX),
    "einsum": Case(lambda x: torch.einsum("mi,ji->mj", x, like(x, 37, x.shape[-1])), "bmm"),
    "mv": Case(lambda x: torch.mv(x, like(x, x.shape[-1])), "mv"),
    "addmv": Case(lambda x: torch.addmv(like(x, 1), x, like(x, x.shape[-1]), beta=2), "addmv"),
    "dot": Case(
        lambda x: torch.stack([torch.dot(row, like(x, x.shape[-1])) for row in x]), "dot", rows=9
    ),
    "softmax": Case(lambda x: F.softmax(x, -1), "_softmax"),
    "log_softmax": Case(lambda x: F.log_softmax(x, -1), "_log_softmax"),
    "softmax, dim 1 of 3": Case(
        lambda x: F.softmax(x.reshape(len(x), 21, 5), 1), "_softmax", **_MATRIX
    ),
    "softmax's gradient": Case(
        of_gradient("_softmax_backward_data", -1, FP32), "_softmax_backward_data", **_BACKWARD
    ),
    "log_softmax's gradient": Case(
        of_gradient("_log_softmax_backward_data", -1, FP32),
        "_log_softmax_backward_data",
        **_BACKWARD,
    ),
    "cross_entropy": Case(
        lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), reduction="none"),
        "_log_softmax",
    ),
    "sum": Case(lambda x: x.sum(-1), "sum.dim_IntList"),
    "mean": Case(lambda x: x.mean(-1, keepdim=True), "mean.dim"),
    "mean, dim 1 of 3": Case(lambda x: x.reshape(len(x), 21, 5).mean(1), "mean.dim", **_MATRIX),
    "sum of all": Case(lambda x: torch.stack([row.sum() for row in x]), "sum", rows=9),
    "mean of all": Case(lambda x: torch.stack([row.mean() for row in x]), "mean", rows=9),
    "layer_norm": Case(
        lambda x: F.layer_norm(x, x.shape[-1:], like(x, x.shape[-1]), like(x, x.shape[-1])),
        "layer_norm",
    ),
    "native_layer_norm": Case(
        lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)[0],
        "native_layer_norm",
    ),
    "layer_norm's gradient": Case(layer_norm_backward, "native_layer_norm_backward", **_BACKWARD),
    "rms_norm": Case(lambda x: F.rms_norm(x, x.shape[-1:], like(x, x.shape[-1])), "rms_norm"),
    "rms_norm, a weight in fp32": Case(weight_in_fp32, "rms_norm"),
    "_fused_rms_norm": Case(
        lambda x: torch.ops.aten._fused_rms_norm(x, list(x.shape[-1:]), None, 1e-6)[0],
        "_fused_rms_norm",
    ),
    "rms_norm's gradient": Case(rms_norm_backward, "_fused_rms_norm_backward", **_BACKWARD),
    "llama's norm": Case(
        lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype),
        "mean.dim",
    ),
    "silu": Case(F.silu, "silu"),
    "silu's gradient": Case(of_gradient("silu_backward"), "silu_backward", **_BACKWARD),
    "gelu": Case(lambda x: F.gelu(x, approximate="tanh"), "gelu"),
    "gelu's gradient": Case(of_gradient("gelu_backward"), "gelu_backward", **_BACKWARD),
    "sigmoid": Case(torch.sigmoid, "sigmoid"),
    "tanh": Case(torch.tanh, "tanh"),
    "embedding": Case(lambda x: F.embedding(torch.arange(len(x)), x.contiguous()), "embedding"),
    "embedding's gradient": Case(lookups, "embedding_dense_backward", gradient=False),
    "attention": Case(attention, **_ATTENTION),
    "attention, causal": Case(lambda x: attention(x, is_causal=True), **_ATTENTION),
    "attention, mask of numbers": Case(
        lambda x: attention(x, attn_mask=like(x, 9, 9)), **_ATTENTION
    ),
}


#: torch has no such kernel for a CPU.
ON_GPUS = "rms_norm's gradient"


def inside(call: Callable, *args, strict: bool = True):
    """The result of a call in the mode."""
    with ck.batch_invariant(strict=strict):
        return call(*args)


def row_op(name: str, dtype: torch.dtype, run: Callable | None = None) -> RowOp:
    """A case for the battery; ``run`` instead of the call in the mode."""
    case = CASES[name]
    run = run or (lambda rows: inside(case.call, rows))
    return RowOp(f"{name}, {dtype}", run, case.width, dtype)


def gradient(call: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    """rows -> the gradient of rows, forward and backward in the mode; dy is a function of y."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        leaf = rows.detach().clone().requires_grad_()
        with ck.batch_invariant(strict=True):
            y = call(leaf)
            y.backward(y.detach() * 0.75 + 0.5)
        return leaf.grad

    return run


# ---- tables with something left out, and what reaches torch below the mode ----------------------


@contextlib.contextmanager
def installed(covered: tuple, refused: tuple) -> Iterator[None]:
    """Inside, these tables are registered; afterwards those of the library."""
    before = overrides.COVERED, overrides.REFUSED
    _again(covered, refused)
    try:
        yield
    finally:
        _again(*before)


def _again(covered: tuple, refused: tuple) -> None:
    for library in overrides._installed.values():
        library._destroy()
    overrides._installed.clear()
    overrides.COVERED, overrides.REFUSED = covered, refused
    overrides.install(strict=True)
