"""``ck.linear`` and ``ck.matmul``: the public face of gemm."""

from __future__ import annotations

import torch

from . import checks, op


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    order: str = "chain",
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x weightᵀ + bias, with bits that depend on each row and the weights only.

    Each output is one fp32 accumulator over ascending K in groups of 16, the bias is added in fp32,
    and the sum is rounded once.  The gradients are products of the same kind: dx = dy weight is
    row by row, dW = dyᵀ x adds tokens in ascending order.

    Args:
        x: [..., K]; bf16, fp16 or fp32; any strides.  Rows are tokens.
        weight: [N, K]; the dtype and device of ``x``; any strides, row- or column-major alike.
        bias: [N] or None; the dtype of ``x``.
        order: The name of the summation order; ``"chain"`` is the only one there is.
        main_grad: fp32 [N, K] or None.  If given, backward adds dW into it in place, starting the
            accumulator from its value, and ``weight.grad`` stays None.  Consecutive micro-batches
            cut at multiples of 16 tokens then leave the bits of one shot.  A
            ``grad_added_to_main_grad`` attribute (Megatron, TransformerEngine) of the parameter
            that ``weight`` is, or is a cast or view of, is set True.  It is written where
            ``grad`` would be: ``torch.autograd.grad`` returns dW and leaves it alone, and so does
            ``backward(inputs=...)`` without the parameter.  A graph made by ``torch.compile``
            cannot tell: there every backward writes it, and the attribute is not set.

    Returns:
        [..., N], contiguous, the dtype of ``x``.  fp16/bf16 accumulate in fp32; fp32 is IEEE (no
        TF32).  Under autocast x, weight and bias are cast as for ``torch.nn.functional.linear``.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs; ``split_invariant``
        for dW with ``main_grad``.  See ``ck.guarantees("linear", device)``.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.  So is ``main_grad`` inside DistributedDataParallel (but
            for its ``no_sync``) and ``fully_shard``, which reduce ``weight.grad``.
        AliasError: ``main_grad`` shares memory with an input, whoever allocated it.
        UnsupportedTransformError: a double backward (``create_graph=True``) with ``main_grad``, or
            a transform of ``torch.func`` other than vmap over ``x``.
        BackendUnavailable: the device has no backend.

    Sizes of zero are valid; K = 0 gives the bias.  NaN and Inf stay in their own rows.
    """
    checks.linear(x, weight, bias, order, main_grad)
    return op.linear(x, weight, bias, main_grad, order)


def matmul(a: torch.Tensor, b: torch.Tensor, *, order: str = "chain") -> torch.Tensor:
    """a b, each output row with the same bits whatever the other rows of ``a`` are.

    Args:
        a: [M, K]; bf16, fp16 or fp32; any strides.
        b: [K, N]; the dtype and device of ``a``; any strides.
        order: As in `linear`.

    Returns:
        [M, N], contiguous, the dtype of ``a``.

    Guarantees, Raises: as `linear`, whose op this is: ``linear(a, b.mT)``.
    """
    checks.matmul(a, b, order)
    return op.linear(a, b.mT, None, None, order)
