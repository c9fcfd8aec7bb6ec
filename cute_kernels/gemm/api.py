"""``ck.linear``, ``ck.matmul`` and ``ck.skinny_linear``: the public face of gemm."""

from __future__ import annotations

import torch

from ..runtime import reduction
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

    Each output is a sum in fp32 over K in the order of that name, the bias is added in fp32, and
    the sum is rounded once.  The gradients are products of the same kind: dx = dy weight is row by
    row, in the same order over N; dW = dyᵀ x is a chain over the tokens, ascending.

    Args:
        x: [..., K]; bf16, fp16 or fp32; any strides.  Rows are tokens.
        weight: [N, K]; the dtype and device of ``x``; any strides, row- or column-major alike.
        bias: [N] or None; the dtype of ``x``.
        order: ``"chain"``: one accumulator, K ascending in groups of 16.  ``"tree"``: K is cut into
            at most eight leaves of 16 ⌈K/128⌉; a leaf is a chain, and leaves are added ascending.
            Each order has its own bits, the same for 1 row and for 16384.  ``"tree"`` can be
            shared by CTAs, and by tensor-parallel ranks (integrations.tensor_parallel).
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

    Example:
        >>> x, weight = torch.randn(4, 64), torch.randn(32, 64)
        >>> torch.equal(ck.linear(x, weight)[:1], ck.linear(x[:1], weight))
        True
    """
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

    Example:
        >>> ck.matmul(torch.randn(4, 64), torch.randn(64, 32)).shape
        torch.Size([4, 32])
    """
    checks.matmul(a, b, order)
    return op.linear(a, b.mT, None, None, order)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """y = x weightᵀ + bias for at most 128 rows: decoding, with the bytes of ``order="tree"``.

    Args:
        x: [..., K] of at most 128 rows; bf16, fp16 or fp32; any strides.
        weight: [N, K]; the dtype and device of ``x``; any strides.
        bias: [N], [rows, N] or None; the dtype of ``x``.
        deterministic: True: leaves are added in their order, and the result has the bytes of
            ``linear(x, weight, bias, order="tree")``.  False: where leaves are shared by CTAs, they
            are added by atomics in arrival order.  On a CPU both are ordered.  None, the default:
            as `set_reduction` says; True unless told otherwise.

    Returns:
        [..., N], contiguous, the dtype of ``x``.

    Guarantees:
        As `linear`; none with ``deterministic=False``.

    Raises:
        ShapeError: more than 128 rows (use `linear`), a bias of another shape.
        NondeterministicError: ``deterministic=False`` while torch.use_deterministic_algorithms is
            on.
        Others: as `linear`.

    Differentiable: the gradients are those of ``linear(order="tree")``.

    Example:
        >>> x, weight = torch.randn(2, 64), torch.randn(32, 64)
        >>> torch.equal(ck.skinny_linear(x, weight), ck.linear(x, weight, order='tree'))
        True
    """
    return op.skinny_linear(x, weight, bias, reduction.skinny_is_ordered(deterministic))
