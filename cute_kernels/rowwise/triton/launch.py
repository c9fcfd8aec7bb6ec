"""Launch the Triton kernels of rowwise: outputs, operands in their layout, grids.

Each function has the name and the result of one in cpu.py, runs on the device of its first tensor
and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from ... import arch
from ...compile.call import allocator, call
from ...runtime.operands import empty_rows_like
from ...runtime.plan_cache import Plan
from ...runtime.triton_products import cdiv, least_block, next_power_of_2
from ..config import LANES, SQUARES, lanes
from . import kernel as kernels
from .plan import TRITON

#: Whether a compiled kernel is known to take all of its function's arguments, constants too: run
#: with Triton 3.6, read in the source of 3.7.  Others, and AMD's launcher, are not checked.
_TAKES_ALL = torch.version.hip is None and re.match(r"3\.[67]\.", arch.version("triton"))
#: Columns of a program of `gated_rows`, at least.
_ROW_COLUMNS = 1024


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(x), contiguous, the dtype of x."""
    out = x.new_empty(x.shape)
    _elementwise(kernels.activation_kernel, (x,), (out,), KIND=kind)
    return out


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f'(x) dy in the dtype of x."""
    out = x.new_empty(x.shape)
    _elementwise(kernels.activation_backward_kernel, (dy, x), (out,), KIND=kind)
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str, steps: bool) -> torch.Tensor:
    """Compute f(gate) up; ``steps``: f(gate) rounded."""
    out = gate.new_empty(gate.shape)
    _elementwise(kernels.gated_kernel, (gate, up), (out,), KIND=kind, STEPS=steps)
    return out


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute f(gate) up over rows [gate, up], f(gate) rounded."""
    rows, width = x.contiguous().view(-1, x.shape[-1]), x.shape[-1] // 2
    out, columns = x.new_empty(len(rows), width), max(_ROW_COLUMNS, least_block(width))
    with torch.cuda.device(x.device):
        kernels.gated_rows_kernel[(len(rows), cdiv(width, columns))](
            rows,
            out,
            width,
            KIND=kind,
            COLUMNS=columns,
            num_warps=TRITON.num_warps,
            enable_fp_fusion=TRITON.fp_fusion,
        )
    return out.view(*x.shape[:-1], width)


def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, steps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (f'(gate) dy up, f(gate) dy); ``steps``: dy up and f(gate) rounded."""
    gradients = gate.new_empty(gate.shape), up.new_empty(up.shape)
    kernel = kernels.gated_backward_kernel
    _elementwise(kernel, (dy, gate, up), gradients, KIND=kind, STEPS=steps)
    return gradients


#: Launchers of tensors of one shape -> (kernel, number of inputs, number of results).
_ELEMENTS = {
    activation: (kernels.activation_kernel, 1, 1),
    activation_backward: (kernels.activation_backward_kernel, 2, 1),
    gated: (kernels.gated_kernel, 2, 1),
    gated_backward: (kernels.gated_backward_kernel, 3, 2),
}


def _planner(launcher: Callable) -> Callable[..., Plan]:
    """Planner of an elementwise launcher that calls Triton's compiled kernel directly.

    The plan is ``launcher`` itself where an operand has to be copied, and for a Triton that
    `_TAKES_ALL` does not know.
    """
    kernel, inputs, results = _ELEMENTS[launcher]

    def plan(*args: object) -> Plan:
        operands, options = args[:inputs], args[inputs:]
        if not all(t.is_contiguous() for t in operands) or not _TAKES_ALL:
            return Plan(launcher, fresh=False)
        like = operands[-1]
        count, device = like.numel(), like.device
        grid = cdiv(count, TRITON.elements), 1, 1
        scalars = count, *options, TRITON.elements
        outputs = [like.new_empty(like.shape) for _ in range(results)]
        with torch.cuda.device(device):
            # A kernel is compiled for pointers at multiples of 16 bytes, which signatures include.
            launch = kernel.warmup(*operands, *outputs, *scalars, grid=grid, **_options())[grid]
        new = allocator(like.shape, like.dtype, device)

        def run_one(*args: object) -> torch.Tensor:
            out = new()
            call(device, launch, *args[:inputs], out, *scalars)
            return out

        def run_two(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
            out = new(), new()
            call(device, launch, *args[:inputs], *out, *scalars)
            return out

        return Plan(run_one if results == 1 else run_two)

    return plan


plan_activation = _planner(activation)
plan_activation_backward = _planner(activation_backward)
plan_gated = _planner(gated)
plan_gated_backward = _planner(gated_backward)


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """Compute x *= factor, an fp32 number of no dimension."""
    source = x.contiguous()
    with torch.cuda.device(x.device):
        kernels.scale_kernel[(cdiv(x.numel(), TRITON.elements),)](
            source, factor, source, x.numel(), ELEMENTS=TRITON.elements, **_options()
        )
    if source.data_ptr() != x.data_ptr():
        x.copy_(source)


def softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute e^(x - max) / Σ e^(x - max) of rows [M, N]."""
    return _softmax(x, dtype, False)


def log_softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute (x - max) - ln Σ e^(x - max)."""
    return _softmax(x, dtype, True)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute y (dy - Σ y dy)."""
    return _two_row_operands(kernels.softmax_backward_kernel, dy, y, dtype)


def log_softmax_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute dy - softmax(x) Σ dy."""
    return _two_row_operands(kernels.log_softmax_backward_kernel, dy, x, x.dtype)


def rotary_table(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) [P, 2 F] of positions [P] and frequencies [F]."""
    count, f = len(positions), len(inv_freq)
    cos, sin = (inv_freq.new_empty(count, 2 * f, dtype=dtype) for _ in range(2))
    with torch.cuda.device(inv_freq.device):
        kernels.rotary_table_kernel[(cdiv(count * f, TRITON.elements),)](
            *(positions.contiguous(), inv_freq.contiguous(), cos, sin),
            *(count * f, f, scaling),
            ELEMENTS=TRITON.elements,
            **_options(),
        )
    return cos, sin


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    """Return x [A, B, C, D] with its first R columns rotated by cos and sin [A, B, C, R]."""
    out = x.new_empty(x.shape)
    *lead, d = x.shape
    rows = lead[0] * lead[1] * lead[2]
    columns = max(min(TRITON.wide, next_power_of_2(d)), least_block(d))
    height = max(1, TRITON.elements // columns)
    with torch.cuda.device(x.device):
        kernels.rotary_kernel[(cdiv(rows, height), cdiv(d, columns))](
            *(x, cos, sin, out, rows, lead[1], lead[2], d, cos.shape[-1]),
            *(*x.stride(), *cos.stride(), *sin.stride()),
            BACK=back,
            ROWS=height,
            COLUMNS=columns,
            **_options(),
        )
    return out


def rotary_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    dtype: torch.dtype,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated by cos and sin, or their gradients if ``back``, as `cpu.rotary_pair`.

    The results have ``dtype``.
    """
    outputs = tuple(empty_rows_like(t, dtype) for t in (q, k))
    tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin)]
    grid, scalars = _pair_arguments(tensors, outputs, dim, back)
    with torch.cuda.device(q.device):
        kernels.rotary_pair_kernel[grid](*tensors, *outputs, *scalars, **_options())
    return outputs


def plan_rotary_pair(q, k, cos, sin, dim: int, dtype: torch.dtype, back: bool) -> Plan:
    """Launch plan of `rotary_pair`; as in `_planner`, the launcher itself where it must copy."""
    tensors = q, k, cos, sin
    if not all(t.stride(-1) == 1 for t in tensors) or not _TAKES_ALL:
        return Plan(rotary_pair)
    device = q.device
    outputs = [empty_rows_like(t, dtype) for t in (q, k)]
    grid, scalars = _pair_arguments(tensors, outputs, dim, back)
    with torch.cuda.device(device):
        kernel = kernels.rotary_pair_kernel
        launch = kernel.warmup(*tensors, *outputs, *scalars, grid=grid, **_options())[grid]
    new_q, new_k = (allocator(t.shape, dtype, device, t.stride()) for t in outputs)

    def run(q, k, cos, sin, *_) -> tuple[torch.Tensor, torch.Tensor]:
        out = new_q(), new_k()
        call(device, launch, q, k, cos, sin, *out, *scalars)
        return out

    return Plan(run)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up weight[ids] by torch's lookup, which copies."""
    return torch.embedding(weight, ids)


def embedding_gradient(
    dy: torch.Tensor, ids: torch.Tensor, padding: int, into: torch.Tensor
) -> None:
    """Compute into [V, D] += Σ_{t: ids_t = v} dy_t in fp32, tokens ascending, no ``padding``."""
    entry, order = ids.sort(stable=True)
    end = torch.searchsorted(entry, entry, right=True)
    d = dy.shape[1]
    columns = min(TRITON.wide, next_power_of_2(d))
    blocks = cdiv(d, columns)
    with torch.cuda.device(dy.device):
        kernels.embedding_gradient_kernel[(len(ids) * blocks,)](
            *(dy, order, entry, end, into, d, padding, blocks),
            *(*dy.stride(), *into.stride()),
            COLUMNS=columns,
            **(_options() | {"num_warps": TRITON.chain_warps}),
        )


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Compute Σ x² in fp64 of x [N]."""
    chunks = cdiv(x.numel(), SQUARES)
    parts = x.new_empty(chunks, dtype=torch.float64)
    out = x.new_empty((), dtype=torch.float64)
    with torch.cuda.device(x.device):
        _lane_sums(x.contiguous(), parts, SQUARES)
        _lane_sums(parts, out, 0)
    return out


def add_sums(sums: torch.Tensor) -> torch.Tensor:
    """Sum fp64 numbers [N], ascending."""
    out = sums.new_empty(())
    with torch.cuda.device(sums.device):
        kernels.chain_kernel[(1,)](sums, out, len(sums), **_options())
    return out


# ---- helpers -------------------------------------------------------------------------------------


def _elementwise(kernel, inputs: tuple, outputs: tuple, **constants: object) -> None:
    count = outputs[0].numel()
    with torch.cuda.device(outputs[0].device):
        kernel[(cdiv(count, TRITON.elements),)](
            *(t.contiguous() for t in inputs),
            *outputs,
            count,
            **constants,
            ELEMENTS=TRITON.elements,
            **_options(),
        )


def _pair_arguments(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], dim: int, back: bool
) -> tuple[tuple[int, int, int], tuple]:
    """Return (grid, what `rotary_pair_kernel` takes after its tensors)."""
    q, k, cos, sin = tensors
    order = _memory_order(q)
    half = cos.shape[-1] // 2
    columns = min(TRITON.wide, next_power_of_2(half))
    height = TRITON.elements // columns
    rows = [t.shape[:-1].numel() for t in (q, k)]
    tiles = [cdiv(count, height) for count in rows]
    sizes = ((count, *_lead(t, order)[0][1:]) for count, t in zip(rows, (q, k), strict=True))
    strides = (
        *(_lead(t, order)[1] for t in (q, k, *outputs)),
        *(_lead(t.unsqueeze(dim), order)[1] for t in (cos, sin)),
    )
    same = (outputs[0] if back else q).dtype == cos.dtype
    constants = q.shape[-1], k.shape[-1], half, same, back, height, columns
    scalars = (tiles[0], *chain(*sizes), *chain(*strides), *constants)
    return (sum(tiles), 1, 1), scalars


def _memory_order(x: torch.Tensor) -> list[int]:
    """Return three leading dimensions in the order of their strides, the largest first.

    Rows that follow each other in memory are then in one program.
    """
    strides = _lead(x, range(3))[1]
    return sorted(range(3), key=lambda i: -strides[i])


def _lead(t: torch.Tensor, order: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return (sizes, strides) of three leading dimensions in this order, missing ones in front.

    A dimension of 1 has a stride of 0, so that a table goes with more rows.
    """
    missing = 4 - t.dim()
    sizes = [1] * missing + list(t.shape[:-1])
    strides = [0] * missing + list(t.stride()[:-1])
    strides = [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
    return [sizes[i] for i in order], [strides[i] for i in order]


def _softmax(x: torch.Tensor, dtype: torch.dtype, log: bool) -> torch.Tensor:
    m, n = x.shape
    out = x.new_empty(m, n, dtype=dtype)
    with torch.cuda.device(x.device):
        kernels.softmax_kernel[(m,)](x, out, n, *x.stride(), LOG=log, LANES=lanes(n), **_options())
    return out


def _two_row_operands(
    kernel, dy: torch.Tensor, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    m, n = like.shape
    out = like.new_empty(m, n, dtype=dtype)
    with torch.cuda.device(like.device):
        kernel[(m,)](dy, like, out, n, *dy.stride(), *like.stride(), LANES=lanes(n), **_options())
    return out


def _lane_sums(x: torch.Tensor, out: torch.Tensor, chunk: int) -> None:
    """Compute out = the sums of chunks: of squares, or of all x where ``chunk`` is 0."""
    kernels.lane_sums_kernel[(max(1, out.numel()),)](
        x, out, x.numel(), SQUARE=chunk > 0, CHUNK=chunk, LANES=LANES, **_options()
    )


def _options() -> dict[str, int | bool]:
    """Return the compiler options of every launch."""
    return {"num_warps": TRITON.num_warps, "enable_fp_fusion": TRITON.fp_fusion}
