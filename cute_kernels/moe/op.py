"""The torch ops of grouped products: schemas, fakes, autograd.

    grouped_linear     y[t]  = x[t] W[e]ᵀ + b[e]    x [T, K], W [E, N, K], b [E, N]  -> y [T, N]
    grouped_dx         dx[t] = dy[t] W[e]           dy [T, N], W [E, N, K]           -> dx [T, K]
    grouped_dw         dW[e] = Σ dy[t]ᵀ x[t]        dy [T, N], x [T, K]              -> dW [E, N, K]
    grouped_dw_        main_grad[e] += the same     the accumulator starts from it, in fp32
    grouped_dbias      db[e] = Σ dy[t]              dy [T, N]                        -> db [E, N]

    grouped_leaf_sums  the leaves of a[t] b[e]ᵀ     a [T, K'], b [E, N, K'], K' a slice of K
                                                                         -> fp32 [leaves, T, N]

Expert e has the rows offsets[e] to offsets[e + 1].  The set is closed under differentiation.  Each
expert's products are those of ``ck.linear``, byte for byte; no sum crosses experts.

``order`` is that of y and dx.  A sum over tokens is a chain under either order.
"""

from __future__ import annotations

import torch

from .. import contracts
from ..arch import CPU, CUTE_SM90, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.torch_ops import define_op
from . import checks, config

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

_HALF = frozenset({torch.bfloat16, torch.float16})
#: Entry of `dispatch` -> its launcher on SM90, where dbias is Triton's.
_ON_SM90 = {
    "grouped_gemm": "launch:grouped_gemm",
    "grouped_tree": "launch:grouped_tree",
    "grouped_leaf_sums": "launch:grouped_leaf_sums",
    "grouped_dw": "launch:grouped_dw",
    "grouped_column_sum": "triton.launch:grouped_column_sum",
}

for _kernel, _launcher in _ON_SM90.items():
    dispatch.register(
        _kernel,
        {
            CUTE_SM90: Implementation(
                f"{__package__}.{_launcher}", _HALF, " (fp32 in IEEE arithmetic runs on triton)"
            ),
            TRITON: Implementation(f"{__package__}.triton.launch:{_kernel}", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu:{_kernel}", _DTYPES),
        },
        contract="grouped_linear",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("grouped_gemm", device, dtype)


contracts.register(
    contracts.Contract("grouped_linear", config.KEPT, config.contract_facts, _backend)
)


def _launch(kernel: str, like: torch.Tensor, *operands) -> torch.Tensor:
    return dispatch.launcher(kernel, like.device, like.dtype)(*operands)


def _product(a, b, offsets, bias, order) -> torch.Tensor:
    """a [T, K] · b[e] [N, K]ᵀ + bias[e]; sizes of zero need no kernel."""
    checks.offset_values("expert_offsets", offsets, a.shape[0])
    shape = a.shape[0], b.shape[1]
    if 0 in shape:
        return a.new_empty(shape)
    if a.shape[1] == 0:
        out = a.new_zeros(shape)
        return out if bias is None else out.copy_(bias[expert_of_rows(offsets, shape[0])])
    kernel = "grouped_tree" if order == config.TREE else "grouped_gemm"
    return _launch(kernel, a, a, b, offsets, bias)


def expert_of_rows(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row: [T], int64."""
    index = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    experts = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    return experts.clamp(max=len(offsets) - 2)


def _run_linear(x, weight, offsets, bias, main_grad, order):
    if main_grad is not None:
        # Here, for a compiled graph too: a tensor that is traced has no address.
        destination.apart(main_grad, x=x, weight=weight, bias=bias)
    return _product(x, weight, offsets, bias, order)


def _run_dx(dy, weight, offsets, order):
    return _product(dy, weight.mT, offsets, None, order)


def _run_leaf_sums(a, b, offsets, length):
    checks.offset_values("expert_offsets", offsets, a.shape[0])
    if 0 in (*a.shape, b.shape[1]):
        return _fake_leaf_sums(a, b, offsets, length)
    return _launch("grouped_leaf_sums", a, a, b, offsets, length)


def _fake_leaf_sums(a, b, offsets, length):
    (t, k), n = a.shape, b.shape[1]
    return a.new_empty(-(-k // length), t, n, dtype=torch.float32)


def _run_dw(dy, x, offsets, order):
    checks.offset_values("expert_offsets", offsets, dy.shape[0])
    if not dy.numel() or not x.numel():
        return dy.new_zeros(_weight_shape(dy, x, offsets))
    return _launch("grouped_dw", dy, dy, x, offsets, None)


def _run_dw_(dy, x, offsets, main_grad):
    # The gradient that comes in is known only here: y.backward(main_grad) passes main_grad itself.
    destination.apart(main_grad, dy=dy)
    checks.offset_values("expert_offsets", offsets, dy.shape[0])
    if dy.numel() and x.numel():
        _launch("grouped_dw", dy, dy, x, offsets, main_grad)


def _run_dbias(dy, offsets):
    checks.offset_values("expert_offsets", offsets, dy.shape[0])
    if not dy.numel():
        return dy.new_zeros(len(offsets) - 1, dy.shape[1])
    return _launch("grouped_column_sum", dy, dy, offsets)


def _weight_shape(dy, x, offsets) -> tuple[int, int, int]:
    return offsets.shape[0] - 1, dy.shape[1], x.shape[1]


def _setup_linear(ctx, inputs, output):
    x, weight, offsets, _, main_grad, ctx.order = inputs
    needs_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight else None, weight, offsets)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if needs_weight else None


def _backward_linear(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    if ctx.main_grad is not None and torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.grouped_linear: double backward (create_graph=True) is not available "
            "with main_grad, as a gradient's part of it would go to weight.grad; leave main_grad "
            "out"
        )
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
    dx = grouped_dx(dy, weight, offsets, ctx.order) if needs_x else None
    dw = weight_gradient(ctx, dy, x, offsets) if needs_weight else None
    db = grouped_dbias(dy, offsets) if needs_bias else None
    return dx, dw, None, db, None, None


def weight_gradient(ctx, dy, x, offsets) -> torch.Tensor | None:
    """dW, or None where it went into main_grad, which stands for the parameter's ``grad``.

    For a node whose second input is the weight, and that has ``main_grad`` and ``order``.
    """
    target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (dy,))[1]
    if target.into is not None:
        grouped_dw_(dy, x, offsets, target.into)
        target.written()
    return grouped_dw(dy, x, offsets, ctx.order) if target.returned else None


def _setup_two(ctx, inputs, output):
    *tensors, ctx.order = inputs
    ctx.save_for_backward(*tensors)


def _backward_dx(ctx, g):
    dy, weight, offsets = ctx.saved_tensors
    needs_dy, needs_weight = ctx.needs_input_grad[:2]
    d_dy = grouped_linear(g, weight, offsets, None, None, ctx.order) if needs_dy else None
    d_weight = grouped_dw(dy, g, offsets, ctx.order) if needs_weight else None
    return d_dy, d_weight, None, None


def _backward_dw(ctx, g):
    dy, x, offsets = ctx.saved_tensors
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    d_dy = grouped_linear(x, g, offsets, None, None, ctx.order) if needs_dy else None
    d_x = grouped_dx(dy, g, offsets, ctx.order) if needs_x else None
    return d_dy, d_x, None, None


def _setup_dbias(ctx, inputs, output):
    dy, offsets = inputs
    ctx.rows = dy.shape[0]
    ctx.save_for_backward(offsets)


def _backward_dbias(ctx, g):
    (offsets,) = ctx.saved_tensors
    return g[expert_of_rows(offsets, ctx.rows)], None


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.grouped_linear: torch.func.vmap is not supported, as the mapped dimension "
        "would add rows to every expert; call it for each part"
    )


grouped_linear = define_op(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? main_grad, "
    "str order) -> Tensor",
    _run_linear,
    fake=lambda x, w, offsets, bias, main_grad, order: x.new_empty(x.shape[0], w.shape[1]),
    setup=_setup_linear,
    backward=_backward_linear,
    vmap=_vmap_refused,
    autocast_args=(0, 1, 3),
)
grouped_dx = define_op(
    "grouped_dx(Tensor dy, Tensor weight, Tensor offsets, str order) -> Tensor",
    _run_dx,
    fake=lambda dy, w, offsets, order: dy.new_empty(dy.shape[0], w.shape[2]),
    setup=_setup_two,
    backward=_backward_dx,
    vmap=_vmap_refused,
)
grouped_dw = define_op(
    "grouped_dw(Tensor dy, Tensor x, Tensor offsets, str order) -> Tensor",
    _run_dw,
    fake=lambda dy, x, offsets, order: dy.new_empty(_weight_shape(dy, x, offsets)),
    setup=_setup_two,
    backward=_backward_dw,
    vmap=_vmap_refused,
)
grouped_dw_ = define_op(
    "grouped_dw_(Tensor dy, Tensor x, Tensor offsets, Tensor(a!) main_grad) -> ()",
    _run_dw_,
    fake=lambda dy, x, offsets, main_grad: None,
    vmap=_vmap_refused,
)
grouped_dbias = define_op(
    "grouped_dbias(Tensor dy, Tensor offsets) -> Tensor",
    _run_dbias,
    fake=lambda dy, offsets: dy.new_empty(offsets.shape[0] - 1, dy.shape[1]),
    setup=_setup_dbias,
    backward=_backward_dbias,
    vmap=_vmap_refused,
)
grouped_leaf_sums = define_op(
    "grouped_leaf_sums(Tensor a, Tensor b, Tensor offsets, int length) -> Tensor",
    _run_leaf_sums,
    fake=_fake_leaf_sums,
)
