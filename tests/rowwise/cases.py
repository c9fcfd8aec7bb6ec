"""What the tests of rowwise share: inputs, ops as rows, bounds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

import cute_kernels as ck
from cute_kernels.cpu import elementary
from cute_kernels.rowwise import cpu, op
from tests.contract import RowOp, half_ulp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
#: kind -> the public function of it.
ACTIVATIONS: dict[str, Callable] = {
    "silu": ck.silu,
    "gelu": ck.gelu,
    "gelu_tanh": lambda x: ck.gelu(x, approximate="tanh"),
    "sigmoid": ck.sigmoid,
    "tanh": ck.tanh,
}
GATED: dict[str, Callable] = {
    "silu": ck.silu_mul,
    "gelu": ck.gelu_mul,
    "gelu_tanh": lambda gate, up: ck.gelu_mul(gate, up, approximate="tanh"),
}
#: Functions of elements, a call of each kind.
CALLS: dict[str, Callable] = {
    **{name: ACTIVATIONS[name] for name in ("silu", "gelu", "sigmoid", "tanh")},
    "gelu, tanh": ACTIVATIONS["gelu_tanh"],
    "silu_mul": lambda x: ck.silu_mul(x, x * 0.5),
    "gelu_mul": lambda x: ck.gelu_mul(x, x * 0.5),
}
SOFTMAXES = {"softmax": ck.softmax, "log_softmax": ck.log_softmax}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Numbers of both signs and of sizes from 2^-12 to 2^6: small ones, and tails."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape, generator=generator) * 18 - 12
    return (sizes.exp2() * torch.randn(shape, generator=generator).sign()).to(dtype)


def indices(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def within(got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | float = 0.0) -> float:
    """The largest error, in parts of the bound: 0.51 units in the last place of ``got``, and 2^-36
    of ``terms`` where they cancel."""
    limit = 1.02 * half_ulp(exact, got.dtype) + 2.0**-36 * terms
    largest = torch.finfo(got.dtype).max
    finite = exact.abs() <= largest
    return ((got.double() - exact).abs() / limit)[finite].max().item()


# ---- ops as rows ---------------------------------------------------------------------------------


def _gradient(function: Callable, rows: torch.Tensor) -> torch.Tensor:
    """dx of rows (x, dy)."""
    x, dy = rows.detach().chunk(2, 1)
    x = x.clone().requires_grad_() if x.is_contiguous() else x.requires_grad_()
    (dx,) = torch.autograd.grad(function(x), x, dy)
    return dx


def _gated_gradients(function: Callable, rows: torch.Tensor) -> torch.Tensor:
    gate, up, dy = (t.requires_grad_() for t in rows.detach().chunk(3, 1))
    made = torch.autograd.grad(function(gate, up), (gate, up), dy.detach())
    return torch.cat(made, 1)


def _rotary(rows: torch.Tensor, back: bool) -> torch.Tensor:
    """Rows (x of 20 columns, cos of 12, sin of 12)."""
    x, cos, sin = rows.split((20, 12, 12), 1)
    return op.rotary(x, cos, sin, back)


def _rotary_pos_emb(rows: torch.Tensor) -> torch.Tensor:
    """Rows (x of 20 columns, cos of 12, sin of 12)."""
    x, cos, sin = rows.split((20, 12, 12), 1)
    return ck.apply_rotary_pos_emb(x[None], x[None], cos, sin, 0)[0][0]


def _rotary_pos_emb_gradient(rows: torch.Tensor) -> torch.Tensor:
    """dx of rows (dy of 20 columns, cos of 12, sin of 12)."""
    dy, cos, sin = rows.detach().split((20, 12, 12), 1)
    x = torch.zeros_like(dy[None]).requires_grad_()
    made = ck.apply_rotary_pos_emb(x, x[:, :, :], cos, sin, 0)[0]
    return torch.autograd.grad(made, x, dy[None])[0][0]


def _positions(rows: torch.Tensor) -> torch.Tensor:
    return (rows[:, 0].double().nan_to_num(0, 0, 0).abs() * 1000).clamp(max=1e6).long()


def _table(rows: torch.Tensor) -> torch.Tensor:
    inverse = 1.0 / 10000.0 ** (torch.arange(0, 50, 2) / 50)
    return torch.cat(ck.rotary_table(_positions(rows), inverse, 1.2), 1)


def _lookup(rows: torch.Tensor) -> torch.Tensor:
    return ck.embedding(_positions(rows) % 31, drawn(31, 17, seed=4))


def inside(function: Callable) -> Callable:
    """A function of fp64, whose result is not rounded; of numbers of 53 bits, as sums of fp32
    numbers are exact in fp64 in any order."""
    return lambda rows: function(rows.double() * math.pi)


#: name -> (of rows, how wide they are)
RUNS: dict[str, tuple[Callable, int]] = {
    "softmax": (ck.softmax, 1501),
    "softmax, few": (ck.softmax, 5),
    "log_softmax": (ck.log_softmax, 77),
    "softmax, gradient": (lambda rows: _gradient(ck.softmax, rows), 2 * 301),
    "log_softmax, gradient": (lambda rows: _gradient(ck.log_softmax, rows), 2 * 77),
    "rotary": (lambda rows: _rotary(rows, False), 44),
    "rotary, back": (lambda rows: _rotary(rows, True), 44),
    "rotary_pos_emb": (_rotary_pos_emb, 44),
    "rotary_pos_emb, gradient": (_rotary_pos_emb_gradient, 44),
    "rotary_table": (_table, 3),
    "embedding": (_lookup, 3),
    "exp inside": (inside(lambda x: elementary.exp(x)), 37),
    "sigmoid inside": (inside(lambda x: elementary.value("sigmoid", x)), 37),
    "lane sums inside": (inside(lambda x: cpu._lane_sums(x)), 1501),
}
for _kind, _function in ACTIVATIONS.items():
    RUNS[_kind] = (_function, 37)
    RUNS[f"{_kind}, gradient"] = (lambda rows, f=_function: _gradient(f, rows), 2 * 37)
for _kind, _function in GATED.items():
    RUNS[f"{_kind}_mul"] = (lambda rows, f=_function: f(*rows.chunk(2, 1)), 2 * 37)
    RUNS[f"{_kind}_mul, gradient"] = (lambda rows, f=_function: _gated_gradients(f, rows), 3 * 37)


def rows_op(name: str, dtype: torch.dtype = FP32) -> RowOp:
    run, width = RUNS[name]
    return RowOp(name, run, width, dtype)
