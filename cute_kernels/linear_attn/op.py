"""The torch ops of linear attention: schemas, fakes, autograd.

    causal_conv           x [B, D, T]: convolution, bias, SiLU
    causal_conv_backward  (dx [B, D, T], dweight, dbias, d_initial)

Results [B, D, T] lie in channel-last memory, as rows [B, T, D].  A gradient that goes to its
main_grad, or that nobody needs, is empty.
"""

from __future__ import annotations

import torch

from .. import contracts
from ..arch import CPU, TRITON
from ..errors import UnsupportedTransformError
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_vmap
from . import checks, config
from .tensors import Conv, ConvGradients, Sequences

_DTYPES = frozenset(config.DTYPE_NAMES)

for _function in ("conv", "conv_backward"):
    dispatch.register(
        f"causal_{_function}",
        {
            TRITON: Implementation(f"{__package__}.triton.launch:{_function}", _DTYPES),
            CPU: Implementation(f"{__package__}.cpu:{_function}", _DTYPES),
        },
        contract="causal_conv1d_fn",
    )


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    return dispatch.backend("causal_conv", device, dtype)


for _name in ("causal_conv1d_fn", "causal_conv1d_update"):
    contracts.register(contracts.Contract(_name, config.KEPT, config.conv_facts, _backend))


def _check_each(x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu):
    # Memory of main_grads, and what reduces their parameters, is in no signature.
    return main_grad is not None or bias_main_grad is not None


def sequences_of(batch: int, length: int, offsets: torch.Tensor | None) -> Sequences:
    """Sequences of B x T rows, a batch or a pack."""
    if offsets is None:
        return Sequences(batch * length, length, None)
    return Sequences(batch * length, 0, offsets.contiguous())


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, D, T] as rows [B T, D]: a view of channel-last memory, else a copy."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def channel_last(x: torch.Tensor) -> torch.Tensor:
    """Allocate [B, ..., T] like x, as rows [B, T, ...].

    It is no view, so that it may be written in place.
    """
    _, *sizes, length = x.shape
    strides = [1]
    for size in reversed(sizes):
        strides.insert(0, strides[0] * size)
    row, *others = strides
    return x.new_empty_strided(x.shape, (length * row, *others, row))


def _fake(x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu):
    return channel_last(x)


def _plan(x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu):
    if not x.numel():
        return Plan(_fake, cacheable=False)
    launch = dispatch.launcher("causal_conv", x.device, x.dtype)

    def run(x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu):
        read = {"x": x, "weight": weight, "bias": bias, "initial_states": initial}
        destination.check_no_aliases(main_grad, bias_main_grad, **read)
        out = channel_last(x)
        launch(
            Conv(_rows(x), weight, bias, initial),
            sequences_of(x.shape[0], x.shape[2], offsets),
            silu,
            _rows(out),
        )
        return out

    return Plan(run)


def _fake_backward(dy, x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu, needs):
    of_x, of_weight, of_bias, of_initial = needs
    wanted = of_weight and main_grad is None, of_bias and bias_main_grad is None, of_initial
    return channel_last(x) if of_x else x.new_empty(0), *(
        like.new_empty(like.shape) if want else x.new_empty(0)
        for like, want in zip((weight, bias, initial), wanted, strict=True)
    )


def _plan_backward(dy, x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu, needs):
    if not x.numel():
        return Plan(_run_backward_of_nothing, cacheable=False)
    launch = dispatch.launcher("causal_conv_backward", x.device, x.dtype)

    def run(dy, x, weight, bias, initial, offsets, main_grad, bias_main_grad, silu, needs):
        destination.check_no_aliases(main_grad, bias_main_grad, dy=dy)
        of_x, of_weight, of_bias, of_initial = needs
        sums = (
            sum_of(weight, main_grad) if of_weight else None,
            sum_of(bias, bias_main_grad) if of_bias else None,
        )
        dx = channel_last(x) if of_x else None
        d_initial = x.new_empty(initial.shape) if of_initial else None
        rows = None if dx is None else _rows(dx)
        operands = (
            Conv(_rows(x), weight, bias, initial),
            sequences_of(x.shape[0], x.shape[2], offsets),
            silu,
        )
        launch(_rows(dy), *operands, ConvGradients(rows, *sums, d_initial))
        d_weight = sums[0].to(weight.dtype) if of_weight and main_grad is None else None
        d_bias = sums[1].to(bias.dtype) if of_bias and bias_main_grad is None else None
        results = dx, d_weight, d_bias, d_initial
        return tuple([x.new_empty(0) if t is None else t for t in results])

    return Plan(run)


def sum_of(parameter: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
    """The fp32 tensor that a gradient is added to."""
    if main_grad is not None:
        return main_grad
    return parameter.new_zeros(parameter.shape, dtype=torch.float32)


def _run_backward_of_nothing(dy, *args):
    dx, *sums = _fake_backward(dy, *args)
    return dx, *(t.zero_() for t in sums)


def _setup(ctx, inputs, output):
    x, weight, bias, initial, offsets, main_grad, bias_main_grad, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, initial, offsets)
    # Not saved tensors: backward of an earlier micro-batch may write them before ours reads them.
    ctx.main_grads = {1: main_grad, 2: bias_main_grad}


def _backward(ctx, dy):
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.causal_conv1d_fn: double backward (create_graph=True) is not available"
        )
    x, weight, bias, initial, offsets = ctx.saved_tensors
    inputs = x, weight, bias, initial, offsets
    targets = destination.targets(ctx, inputs, ctx.main_grads, (dy,))
    of_weight, of_bias = targets[1], targets[2]
    wanted = [t is not None and t.wanted for t in (of_weight, of_bias)]
    into = [t.into for t in (of_weight, of_bias)]
    needs = [ctx.needs_input_grad[0], *wanted, ctx.needs_input_grad[3]]
    results = causal_conv_backward(dy, x, weight, bias, initial, offsets, *into, ctx.silu, needs)
    dx, d_weight, d_bias, d_initial = results
    for target in (of_weight, of_bias):
        if target.wanted:
            target.written()
    return (
        dx if needs[0] else None,
        d_weight if of_weight.returned else None,
        d_bias if of_bias.returned else None,
        d_initial if needs[3] else None,
        None, None, None, None,
    )  # fmt: skip


_OPERANDS = "Tensor weight, Tensor? bias, Tensor? initial, Tensor? offsets"
_vmap = refuse_vmap("causal_conv1d_fn", "is not supported; the batch dimension of x does the same")
causal_conv = define_op(
    f"causal_conv(Tensor x, {_OPERANDS}, Tensor? main_grad, Tensor? bias_main_grad, bool silu) "
    "-> Tensor",
    check=checks.conv,
    check_each=_check_each,
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap,
)
causal_conv_backward = define_op(
    f"causal_conv_backward(Tensor dy, Tensor x, {_OPERANDS}, Tensor(a!)? main_grad, "
    "Tensor(b!)? bias_main_grad, bool silu, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    plan=_plan_backward,
    fake=_fake_backward,
    vmap=_vmap,
)


def final_states(
    x: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    tail: int,
) -> torch.Tensor:
    """The last ``tail`` inputs of each sequence [S, D, tail], older ones from ``initial`` or 0."""
    batch, channels, length = x.shape
    count = batch if offsets is None else offsets.shape[0] - 1
    before = x.new_zeros(count, channels, tail) if initial is None else initial
    if offsets is None or not length:
        return torch.cat([before, x[:count] if length else before], 2)[:, :, -tail:]
    first, end = offsets[:-1, None], offsets[1:, None]
    row = end - tail + torch.arange(tail, device=x.device)
    inside = row >= first
    last = x[0].index_select(1, row.clamp(min=0).flatten()).view(channels, -1, tail).transpose(0, 1)
    older = (row - first + tail).clamp(0, tail - 1)[:, None].expand_as(before)
    return torch.where(inside[:, None], last, before.gather(2, older))
