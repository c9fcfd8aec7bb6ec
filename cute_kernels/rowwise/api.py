"""``ck.embedding``, ``ck.softmax``, activations, rotary and ``ck.clip_grad_norm_``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch

from ..runtime import checking
from . import checks, op


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor:
    """weight[ids], whose gradient adds the tokens of an entry in their order.

    dweight[v] = Σ dy_t over the tokens t with ids_t = v: one chain in fp32, t ascending, rounded
    once.  No atomics, and one algorithm for any number of tokens.

    Args:
        ids: [...] int64 or int32, entries of 0 to V - 1.  Another value is an error on a CPU; on a
            GPU torch's lookup asserts.  Tokens are counted after the dimensions are flattened.
        weight: [V, D]; bf16, fp16 or fp32; any strides.
        padding_idx: An entry whose tokens have no gradient, negative from the end; or None.
        main_grad: fp32 [V, D] or None.  If given, backward adds dweight into it in place: a chain
            starts from its value, and ``weight.grad`` stays None, as in ``ck.linear``.  Consecutive
            micro-batches, cut at any token, then leave the bits of one shot.

    Returns:
        [..., D], contiguous, the dtype of ``weight``, which autocast does not change.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs;
        ``split_invariant`` for dweight with ``main_grad``.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError: an
            argument is wrong; the message names it.
        UnsupportedTransformError: a transform of ``torch.func``; a double backward.
        BackendUnavailable: the device has no backend.

    Example:
        >>> ids, weight = torch.tensor([[2, 0, 1]]), torch.randn(3, 64)
        >>> ck.embedding(ids, weight).shape
        torch.Size([1, 3, 64])
    """
    if others:
        checking.no_other_arguments("embedding", others)
    padding = checks.embedding(ids, weight, padding_idx, main_grad).padding
    return op.embedding(ids, weight, main_grad, padding)


def softmax(
    x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, **others: NoReturn
) -> torch.Tensor:
    """e^x / Σ e^x over the last dimension, rounded once.

    The sum is made of lanes, in an order that the width alone decides (docs/rowwise.md).  The
    gradient y (dy - Σ y dy) is row by row, from the rounded result.

    Args:
        x: [..., N]; bf16, fp16 or fp32; any strides.
        dim: The last dimension, as -1 or by its number; no other one is taken.
        dtype: Of the result; None: that of ``x``.  ``x`` is not rounded to it first.

    Returns:
        The shape of ``x``, contiguous.  A row with NaN or +inf, or of -inf alone, is NaN, as
        torch's is; every NaN of a CPU's result has the same bits.  Autocast changes no dtype.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError, ArgumentValueError: an argument is wrong; the
            message names it.
        UnsupportedTransformError: jvp, ``torch.func.grad``, a double backward.
        BackendUnavailable: the device has no backend.

    Example:
        >>> ck.softmax(torch.tensor([[0.0, 0.0, 0.0, 0.0]]))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if others:
        checking.no_other_arguments("softmax", others)
    return op.softmax(x, checks.row("softmax", x, dtype, dim))


def log_softmax(
    x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, **others: NoReturn
) -> torch.Tensor:
    """x - ln Σ e^x over the last dimension, rounded once.

    The gradient dy - softmax(x) Σ dy is row by row, from x itself: a rounded result does not tell
    the small probabilities.

    Args, Returns, Guarantees, Raises: as `softmax`.

    Example:
        >>> ck.log_softmax(torch.tensor([[0.0, 0.0]]))
        tensor([[-0.6931, -0.6931]])
    """
    if others:
        checking.no_other_arguments("log_softmax", others)
    return op.log_softmax(x, checks.row("log_softmax", x, dtype, dim))


def silu(x: torch.Tensor, **others: NoReturn) -> torch.Tensor:
    """x / (1 + e^-x), element by element, rounded once.

    A function of the element alone, on a CPU made of IEEE operations: torch's own rounds otherwise
    behind the last whole vector register.  So are `gelu`, `sigmoid` and `tanh`.

    Args:
        x: Any shape and strides; bf16, fp16 or fp32.

    Returns:
        The shape and dtype of ``x``, contiguous.  Autocast changes no dtype.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        DtypeError, ArgumentTypeError: an argument is wrong; the message names it.
        UnsupportedTransformError: jvp, ``torch.func.grad``, a double backward.
        BackendUnavailable: the device has no backend.

    Example:
        >>> ck.silu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])
    """
    if others:
        checking.no_other_arguments("silu", others)
    return op.activation(x, "silu")


def gelu(x: torch.Tensor, *, approximate: str = "none", **others: NoReturn) -> torch.Tensor:
    """x Φ(x), or with ``approximate="tanh"`` x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.

    Φ is made of erfc: where x is far below 0 the result is exact to its last place, which
    1 + erf(x / √2) is not.

    Args:
        x: As in `silu`.
        approximate: ``"none"`` or ``"tanh"``.

    Returns, Guarantees, Raises: as `silu`; ArgumentValueError for another ``approximate``.

    Example:
        >>> ck.gelu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])
    """
    if others:
        checking.no_other_arguments("gelu", others)
    return op.activation(x, checks.gelu_kind(approximate))


def sigmoid(x: torch.Tensor, **others: NoReturn) -> torch.Tensor:
    """1 / (1 + e^-x).

    Args, Returns, Guarantees, Raises: as `silu`.

    Example:
        >>> ck.sigmoid(torch.tensor([0.0, 2.0]))
        tensor([0.5000, 0.8808])
    """
    if others:
        checking.no_other_arguments("sigmoid", others)
    return op.activation(x, "sigmoid")


def tanh(x: torch.Tensor, **others: NoReturn) -> torch.Tensor:
    """(1 - e^(-2 x)) / (1 + e^(-2 x)), for soft caps.

    Args, Returns, Guarantees, Raises: as `silu`.

    Example:
        >>> ck.tanh(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.7616])
    """
    if others:
        checking.no_other_arguments("tanh", others)
    return op.activation(x, "tanh")


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) up, rounded once: silu(gate) is not rounded before the product.

    Args:
        gate: As x in `silu`.
        up: The shape, dtype and device of ``gate``.

    Returns, Guarantees, Raises: as `silu`; ShapeError and DeviceError where the two differ.

    Example:
        >>> ck.silu_mul(torch.tensor([1.0]), torch.tensor([2.0]))
        tensor([1.4621])
    """
    return op.gated(gate, up, "silu", False)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) up, rounded once.

    Args, Returns, Guarantees, Raises: as `silu_mul`, and `gelu` for ``approximate``.

    Example:
        >>> ck.gelu_mul(torch.tensor([1.0]), torch.tensor([2.0]))
        tensor([1.6827])
    """
    return op.gated(gate, up, checks.gelu_kind(approximate), False)


def rotary_table(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of a rotary embedding: each element of its position and frequency alone.

    (scaling cos a, scaling sin a), a = position · inv_freq rounded to fp32, each rounded once.

    Args:
        positions: [...] int64 or int32.  Angles are exact to the last place below 2^25.
        inv_freq: [D / 2] fp32.
        scaling: transformers' ``attention_scaling``.
        dtype: Of the tables: bf16, fp16 or fp32.

    Returns:
        (cos, sin), each [..., D] and contiguous, their two halves equal, as transformers' rotary
        modules return them.  They have no gradient.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        BackendUnavailable: the device has no backend.

    Example:
        >>> cos, sin = ck.rotary_table(torch.arange(4)[None], 1e4 ** -(torch.arange(32) / 32))
        >>> cos.shape, cos[0, 0, 0]
        (torch.Size([1, 4, 64]), tensor(1.))
    """
    scaling = checks.rotary_table(positions, inv_freq, scaling, dtype)
    return op.rotary_table(positions, inv_freq, scaling, dtype)


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k turned by their positions: (x cos + rotate_half(x) sin), rounded once.

    The convention is transformers': the first R columns are two halves (x1, x2), rotate_half is
    (-x2, x1).  Columns from R on are copied (partial rotary).

    Args:
        q: [B, H, S, D] or [H, S, D]; bf16, fp16 or fp32; any strides.
        k: As q, of any number of heads; the dtype and device of ``q``.
        cos: [B, S, R], [1, S, R], or without B; R even and at most D; bf16, fp16 or fp32.  Its
            halves may differ.
        sin: The shape and dtype of ``cos``.
        unsqueeze_dim: Where cos and sin get a dimension of 1, to go with q and k: 1 for
            [B, H, S, D], 2 for [B, S, H, D], 0 for [H, S, D].

    Returns:
        (q, k), contiguous, of the shapes and dtype that came; differentiable in q and k.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        UnsupportedTransformError: jvp, or a transform of ``torch.func``.
        BackendUnavailable: the device has no backend.

    Example:
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> cos, sin = ck.rotary_table(torch.arange(5)[None], torch.rand(32))
        >>> [t.shape[1] for t in ck.apply_rotary(q, k, cos, sin)]
        [8, 2]
    """
    cos, sin = checks.apply_rotary(q, k, cos, sin, unsqueeze_dim)
    return op.rotary(q, cos, sin, False), op.rotary(k, cos, sin, False)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' function of this name in one launch, with the bytes of torch's eager ops.

    x cos + rotate_half(x) sin, where torch rounds both products and their sum to the dtype of x and
    cos; `apply_rotary` rounds once.  The gradient has the bytes of autograd's, one launch too.

    Args:
        q, k, cos, sin, unsqueeze_dim: As in `apply_rotary`; bf16 and fp16 do not mix.
        dtype: Of the results, that of q or fp32; None: that of torch's promotion, fp32 where the
            dtypes of q and cos differ.  The steps are rounded to the promoted dtype first.

    Returns:
        (q, k), of the shapes that came, each dense and laid out in memory as its input, with
        contiguous rows; differentiable in q and k.  NaNs are torch's, their bits need not be.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        UnsupportedTransformError: jvp, a transform of ``torch.func``, or a double backward.
        BackendUnavailable: the device has no backend.

    Example:
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> cos, sin = ck.rotary_table(torch.arange(5)[None], torch.rand(32))
        >>> [t.shape[1] for t in ck.apply_rotary_pos_emb(q, k, cos, sin)]
        [8, 2]
    """
    return op.rotary_pair(q, k, cos, sin, unsqueeze_dim, dtype)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    main_grad: bool = False,
    **others: NoReturn,
) -> torch.Tensor:
    """Scales gradients in place so that their norm is at most ``max_norm``; returns the norm.

    Squares are added in fp64: each gradient, in row-major order, in chunks of 65536; chunks
    ascending in lanes; gradients in the order of ``parameters``.  The factor
    min(1, max_norm / (norm + 1e-6)) is rounded to fp32, and each gradient times it once.

    Args:
        parameters: A tensor, or an iterable of tensors, whose ``grad`` is clipped; bf16, fp16 or
            fp32, on one device.  Those without a gradient are passed over.
        max_norm: 0 or more.
        norm_type: 2.0, or inf for the largest element.
        error_if_nonfinite: Whether a norm that is NaN or inf is an error; the host then waits.
        main_grad: Whether to take ``parameter.main_grad`` where there is one.

    Returns:
        The norm before clipping, fp32, of no dimension; 0 without gradients.

    Guarantees:
        ``run_to_run``: no thread count and no SM count shows; ``schedule_invariant`` on GPUs.

    Raises:
        ArgumentTypeError: a DTensor, or another tensor that holds a part of a parameter.
        NonfiniteError: the norm, with ``error_if_nonfinite``; gradients are as they were.
        ArgumentValueError, DtypeError, DeviceError, AliasError: an argument is wrong; the message
            names it.
        BackendUnavailable: the device has no backend.

    Example:
        >>> weight = torch.randn(32, 64, requires_grad=True)
        >>> weight.sum().backward()
        >>> ck.clip_grad_norm_([weight], max_norm=1.0)
        tensor(45.2548)
    """
    if others:
        checking.no_other_arguments("clip_grad_norm_", others)
    problem = checks.clip(parameters, max_norm, norm_type, error_if_nonfinite, main_grad)
    if not problem.gradients:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        total = op.total_norm(problem.gradients, problem.largest)
        if error_if_nonfinite:
            checks.finite(total)
        op.clip(problem.gradients, total, problem.max_norm)
    return op.fp32_norm(total)
