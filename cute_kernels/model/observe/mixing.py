"""Dispatch mode in which products give cheap numbers that follow every bit of what they may read.

    y[r, n] = a_r c_n + b_r d_n,    a_r, b_r = digest of the row r of x,    c, d fixed

A row that differs from another in one bit has another y in all columns, so nothing that reaches a
product is rounded away, at the price of an addition.  A NaN in the row makes y NaN.
Attention, the gated delta rule and Mamba-2's scan have one head, mixed from all heads, and their
gradients are mixed from the whole sequence.
Other ops are computed, ours by their CPU backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...sparse_attn.lowering import OF_SEQUENCES
from . import ops
from . import rows as digests

_SCALE = 2.0**-23


class Mixing(TorchDispatchMode):
    """Inside, products are mixed.

    bidirectional: whether an attention that ran reads keys behind its queries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bidirectional = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        space, name = ops.name_of(func)
        if space != "cute_kernels":
            return func(*args, **kwargs)
        rule = _RULES.get(name)
        names = (argument.name for argument in func._schema.arguments)
        operands = dict(zip(names, args, strict=False)) | kwargs
        # Other block masks may have one for each head.
        if rule is None or operands.get("kind", OF_SEQUENCES) != OF_SEQUENCES:
            return func(*args, **kwargs)
        if name == "sequence_attention" and not self.bidirectional:
            self.bidirectional = _reads_ahead(**operands)
        return rule(**operands)


# ---- products -----------------------------------------------------------------------------------


def _product(axis: int) -> Callable:
    """Return the rule of a product with as many columns as a dimension of its weight."""

    def rule(
        weight: torch.Tensor,
        x: torch.Tensor | None = None,
        dy: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        **others: object,
    ) -> torch.Tensor:
        rows = dy if x is None else x
        groups = 0 if offsets is None else _groups(rows, offsets)
        return _mixed(rows, weight.shape[axis], weight, groups)

    return rule


def _linear_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: list[bool], **others: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = _mixed(dy, weight.shape[1], weight) if needs[0] else dy.new_empty(0)
    dw = torch.zeros_like(weight) if needs[1] else dy.new_empty(0)
    return dx, dw, dy.new_zeros(weight.shape[0] if needs[2] else 0)


def _groups(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the group of each row of x, int64 [M]."""
    places = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, **others: object) -> torch.Tensor:
    numbers = _numbers(ids.reshape(-1, 1), _salt(weight))
    return _spread(numbers, weight.shape[1], weight.dtype).view(*ids.shape, weight.shape[1])


def _batched_product(
    a: torch.Tensor, b: torch.Tensor, base: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    rows, columns = (
        [number.view(t.shape[:-1]) for number in _numbers(t.reshape(-1, t.shape[-1]))]
        for t in (a, b.transpose(1, 2))
    )
    first, second = (
        row[..., None] * column[:, None] for row, column in zip(rows, columns, strict=True)
    )
    y = (first + second).to(a.dtype)
    return y if base is None else y + base * beta


# ---- attention ----------------------------------------------------------------------------------


def _attention(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor | None, **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend by an op with one head, whose q, k and v are mixed from those of all heads."""
    # Small scores: no key has a weight so small that its value is rounded away.
    one = [_joined(t, t.shape[3])[:, :, None] * 0.125 for t in (q, k, v)]
    sink = None if sinks is None else sinks[:1]
    out, lse = getattr(torch.ops.cute_kernels, op)(*one, **others, sinks=sink)
    width = q.shape[2] * v.shape[3]
    out = _joined(out, width).view(*q.shape[:3], v.shape[3])
    return out, lse.expand(-1, q.shape[2], -1).contiguous()


# ---- layers with a state -------------------------------------------------------------------------

#: Size of the head.
_STATE = 8


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial: torch.Tensor | None, with_final: bool, **others: object,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Apply the rule to one head, mixed from all; its state is a corner of the first one's."""
    # |k|² below 2, and a decay near 1: no state grows, and none is rounded away.
    rows = [_joined(t, _STATE)[:, :, None].float() * 0.125 for t in (q, k, v)]
    gate, step = (_joined(t.float(), 1) for t in (g, beta))
    state = None if initial is None else initial[:, :1, :_STATE, :_STATE].contiguous()
    out, final, *saved = torch.ops.cute_kernels.gated_delta_rule(
        *rows, gate.abs() * -0.0625, step.abs() * 0.5, state, with_final=with_final, **others
    )
    if with_final:
        final = _with_corner(final, v.shape[2], k.shape[3], v.shape[3])
    return _joined(out, v.shape[2] * v.shape[3]).view(v.shape).to(v.dtype), final, *saved


def _with_corner(corner: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return states [S, *sizes] that hold those of one head."""
    final = corner.new_zeros(len(corner), *sizes)
    final[:, :1, :_STATE, :_STATE] = corner
    return final


def _scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    z: torch.Tensor | None, initial: torch.Tensor | None, **others: object,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Scan one head, mixed from all; its state is a corner of the first one's."""
    rows = [_joined(t, _STATE)[:, :, None].float() * 0.125 for t in (x, B, C)]
    state = None if initial is None else initial[:, :1, :_STATE, :_STATE].contiguous()
    # Steps up to a half, and a decay near 1: no state grows, and none is rounded away.
    step = _joined(dt.float(), 1).abs() * 0.5
    out, final, *saved = torch.ops.cute_kernels.ssd_scan(
        rows[0], step, A.new_full((1,), -0.125), *rows[1:], None, None, None, state,
        others["offsets"], *[None] * 3, False, 0.0, float("inf"), others["with_final"],
        others["lag"],
    )  # fmt: skip
    if others["with_final"]:
        final = _with_corner(final, x.shape[2], x.shape[3], B.shape[3])
    if z is not None:  # no state sees it
        out = torch.cat([out, z.flatten(2)[:, :, None].float()], 3)
    return _joined(out, x.shape[2] * x.shape[3]).view(x.shape).to(x.dtype), final, *saved


# ---- gradients -----------------------------------------------------------------------------------

#: Operands of ops whose gradients are zeros here.
_WITHOUT_ROWS = {"A", "D", "dt_bias", "initial", "sinks"}


def _gradients(upstream: str, names: str) -> Callable:
    """Return the rule of a backward, whose results are the gradients of these operands.

    Those of rows are mixed from all of a sequence; in a pack, each from its own row.
    """

    def rule(**operands: object) -> tuple[torch.Tensor, ...]:
        d_out, inputs = operands[upstream], {n: operands.get(n) for n in names.split()}
        rows = {n: t for n, t in inputs.items() if t is not None and n not in _WITHOUT_ROWS}
        if operands.get("offsets") is not None:
            mixed = [_joined(t, t[0, 0].numel()).view(t.shape) for t in rows.values()]
        else:
            mixed = _of_sequence(d_out, *rows.values())
        gradients = dict(zip(rows, mixed, strict=True))
        return tuple(
            d_out.new_empty(0) if t is None else gradients.get(n, torch.zeros_like(t))
            for n, t in inputs.items()
        )

    return rule


def _of_sequence(d_out: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
    """Return a gradient of each operand [B, T, ...], mixed from its row and all of a sequence."""
    sums = [digests.digest(_bytes(t.flatten(1)), t.dtype)[:, :1] for t in (d_out, *operands)]
    sequence = sum(sums).view(-1, 1)
    return [
        _joined(t, t[0, 0].numel(), sequence.repeat(1, t.shape[1])).view(t.shape) for t in operands
    ]


def _joined(t: torch.Tensor, width: int, salt: torch.Tensor | int = 0) -> torch.Tensor:
    """Return [B, T, width] mixed from the heads of [B, T, H, D]."""
    rows = t.flatten(2).flatten(0, 1)
    return _spread(_numbers(rows, salt), width, t.dtype).view(*t.shape[:2], width)


def _reads_ahead(q: torch.Tensor, k: torch.Tensor, kv_ranges: torch.Tensor, **_: object) -> bool:
    """Whether the first query of one sequence sees the last of as many keys."""
    tokens = k.shape[1]
    return len(q) == 1 and q.shape[1] == tokens > 1 and int(kv_ranges[0, 0, 0, 3]) == tokens


_RULES: dict[str, Callable] = {
    "linear": _product(0),
    "linear_dx": _product(1),
    "linear_gradients": _linear_gradients,
    "grouped_linear": _product(1),
    "grouped_dx": _product(2),
    "embedding": _embedding,
    "batched_product": _batched_product,
    "sequence_attention": functools.partial(_attention, "sequence_attention"),
    "sequence_attention_backward": _gradients("dout", "q k v sinks"),
    "block_sparse_attention": functools.partial(_attention, "block_sparse_attention"),
    "block_sparse_attention_backward": _gradients("dout", "q k v sinks"),
    "gated_delta_rule": _delta_rule,
    "gated_delta_rule_backward": _gradients("d_out", "q k v g beta initial"),
    "ssd_scan": _scan,
    "ssd_scan_backward": _gradients("d_out", "x dt A B C D z dt_bias initial"),
}


# ---- numbers ------------------------------------------------------------------------------------


def _mixed(
    x: torch.Tensor, width: int, weight: torch.Tensor, groups: torch.Tensor | int = 0
) -> torch.Tensor:
    """Return [..., width]: numbers that follow the rows of x, and their groups."""
    rows = x.reshape(-1, x.shape[-1])
    numbers = _numbers(rows, _salt(weight) + groups)
    return _spread(numbers, width, x.dtype).view(*x.shape[:-1], width)


def _salt(weight: torch.Tensor) -> int:
    """Return a whole number that most weights do not share: the first 8 bytes."""
    first = weight[(0,) * (weight.dim() - 1)][:4]
    return int.from_bytes(bytes(_bytes(first)[:8].tolist()), "little", signed=True)


def _numbers(rows: torch.Tensor, salt: torch.Tensor | int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two numbers in [-1, 1) for each row, float32 [M]; NaN for a row with a NaN."""
    salt = salt.view(-1, 1) if isinstance(salt, torch.Tensor) else salt
    digest = digests.mixed(digests.digest(_bytes(rows), rows.dtype) + salt)
    first, second = ((lane >> 40).float() * _SCALE for lane in digest.unbind(1))
    return first.masked_fill(rows.isnan().any(1), float("nan")), second


def _spread(
    numbers: tuple[torch.Tensor, torch.Tensor], width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a_r c_n + b_r d_n, [M, width]."""
    (a, b), (c, d) = (number.to(dtype)[:, None] for number in numbers), _columns(width, dtype)
    return a * c + b * d


@functools.lru_cache(maxsize=64)
def _columns(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(width)
    numbers = torch.rand(2, width, generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
    signs = torch.randint(0, 2, (2, width), generator=generator, device="cpu") * 2 - 1
    return tuple((numbers * signs).to(dtype))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
