"""``ck.grouped_linear`` and the functions of ``ck.moe``: the public face of moe."""

from __future__ import annotations

import torch

from . import checks, exchange, op, routing_op
from .config import ORDER, SOFTMAX
from .tensors import Dispatch, Permutation, Routing


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    order: str = ORDER,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = x[t] weight[e]ᵀ + bias[e] for rows sorted by expert, each with the bytes of `linear`.

    Expert e has the rows ``expert_offsets[e]`` to ``expert_offsets[e + 1]``.  A row of y has the
    bytes of ``ck.linear(row, weight[e], bias[e], order=order)`` on the same backend, and so has dx:
    no bit depends on the other rows, or on how many rows an expert has.  dW[e] is a chain over the
    rows of e, ascending, under either order: ``ck.linear``'s dW of those rows alone.

    Args:
        x: [T, K]; bf16, fp16 or fp32; any strides.
        weight: [E, N, K]; the dtype and device of ``x``; any strides; at most 1024 experts.
        expert_offsets: int32 [E + 1], on the device of ``x``, ascending from 0, at most to T.
            `moe.permute` makes them.  Rows from the last one on have no expert: in y and dx they
            are zeros on a CPU and undefined on a GPU.  A GPU does not check offsets: nothing is
            read or written out of bounds.
        bias: [E, N] or None; the dtype of ``x``.
        order: ``"chain"``, or ``"tree"``, whose leaves tensor-parallel ranks share; as in `linear`.
        main_grad: fp32 [E, N, K] or None.  As in `linear`: backward adds dW into it in place, each
            accumulator starting from its value.  Micro-batches of which each expert's rows are cut
            at multiples of 16 leave the bits of one shot.  An expert without rows leaves its part
            untouched.

    Returns:
        [T, N], contiguous, the dtype of ``x``.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs; ``split_invariant``
        for dW with ``main_grad``.  See ``ck.guarantees("grouped_linear", device)``.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.  On a CPU, offsets that do not ascend from 0 or pass T.
        AliasError: ``main_grad`` shares memory with an input.
        UnsupportedTransformError: a double backward with ``main_grad``; ``torch.func.vmap``.
        BackendUnavailable: the device has no backend.

    Example:
        >>> x, weight = torch.randn(10, 64), torch.randn(3, 32, 64)
        >>> offsets = torch.tensor([0, 4, 4, 10], dtype=torch.int32)  # of 3 experts' rows
        >>> ck.grouped_linear(x, weight, offsets).shape
        torch.Size([10, 32])
    """
    return op.grouped_linear(x, weight, expert_offsets, bias, main_grad, order)


def route(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = SOFTMAX,
    bias: torch.Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    indices: torch.Tensor | None = None,
) -> Routing:
    """Choose k experts for each token, and their weights.

    Scores are the softmax or the sigmoid of the logits, rounded to fp32 once.  The k largest of
    score + bias are chosen, in descending order; of equal ones the lowest index.  With groups,
    experts of the ``topk_groups`` best groups alone: a group is ranked by the sum of its two best
    score + bias, or without a bias by its best score.  A weight is the score, without the bias,
    over the sum of the chosen ones (``normalize``), times ``scale``.

    Args:
        logits: [T, E]; bf16, fp16 or fp32; at most 1024 experts.  ``ck.linear`` in fp32 makes them
            with bits that do not follow the batch.
        k: Experts of a token.
        score: ``"softmax"`` or ``"sigmoid"``.
        bias: [E] or None: added for the choice, and not in the weights.  It gets no gradient.
        groups, topk_groups: Neighbouring experts make ``groups`` groups; both or none.
        normalize: Divide by the sum of the k scores, added in the order of experts, plus 1e-20.
        scale: Factor of the weights.
        indices: int32 or int64 [T, k]: the experts to take (routing replay), in place of a choice.
            The weight of an index that is no expert is 0.

    Returns:
        `Routing`: weights fp32 [T, k], indices int32 [T, k], and the scores fp32 [T, E].
        Weights and scores are differentiable.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        BackendUnavailable: the device has no backend.

    Example:
        >>> routing = ck.moe.route(torch.randn(5, 8), k=2)
        >>> routing.weights.shape, routing.indices.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """
    choice = checks.route(logits, k, score, bias, groups, topk_groups, indices)
    checks.weight_options(normalize, scale)
    scores = routing_op.scores(logits, score)
    if indices is None:
        indices = routing_op.select(
            scores.detach(), None if bias is None else bias.detach(), *choice
        )
    else:
        # A copy: what the caller writes into its tensor later is not in this routing.  What int32
        # does not hold stays an index of no expert.
        limits = torch.iinfo(torch.int32)
        indices = indices.clamp(limits.min, limits.max).to(torch.int32)
    return Routing(routing_op.weights(scores, indices, normalize, float(scale)), indices, scores)


def permute(
    x: torch.Tensor, indices: torch.Tensor, experts: int
) -> tuple[torch.Tensor, Permutation]:
    """Copy each token's row once for each of its experts, sorted by expert.

    The sort is stable: rows of an expert are in the order of (token, choice).

    Args:
        x: [T, D]; bf16, fp16 or fp32.
        indices: int32 or int64 [T, k]; the same one twice is two rows.  The row of an index that
            is no expert, below 0 or from ``experts`` on, is zeros and comes after all others;
            `combine` and the gradient of x leave it out.
        experts: Number of experts, at most 1024.

    Returns:
        (rows [T k, D], `Permutation`): ``grouped_linear(rows, weight, permutation.offsets)``.
        The gradient of x is that of `combine` without weights.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        BackendUnavailable: the device has no backend.

    Example:
        >>> routing = ck.moe.route(torch.randn(5, 8), k=2)
        >>> rows, permutation = ck.moe.permute(torch.randn(5, 64), routing.indices, experts=8)
        >>> rows.shape, permutation.offsets.shape
        (torch.Size([10, 64]), torch.Size([9]))
    """
    checks.permute(x, indices, experts)
    permutation = Permutation(*routing_op.sort(indices, experts))
    return routing_op.gather(x, *permutation), permutation


def dispatch(
    x: torch.Tensor, indices: torch.Tensor, experts: int, *, group: object, verify: bool = True
) -> tuple[torch.Tensor, Dispatch]:
    """Send each token's row to the ranks of its experts (expert parallel); `combine` sends back.

    Rank r of R has the experts r E / R to (r + 1) E / R - 1, and tokens of its own.  It gets the
    rows of its experts in the order of (expert, source rank, token, choice): that of `permute` for
    the tokens of rank 0, then of rank 1, and so on.  So rows of y and dx, dW, dbias and the
    gradients of routing have the bytes of one rank with all tokens and experts, for any R, any
    loads, and ranks without tokens.

    Args:
        x: [T, D], this rank's tokens; bf16, fp16 or fp32.  T may differ between ranks, and be 0.
        indices: int32 or int64 [T, k], each from 0 to ``experts`` - 1.
        experts: Number E of experts of all ranks, a multiple of R and at most 1024.
        group: ``torch.distributed`` group, or a 1-D DeviceMesh.  Every rank of it makes the call.
        verify: Whether ranks first tell each other their sizes and dtypes, here and in `combine`,
            so that all of them raise if one would (56 bytes; over NCCL alone the host waits).
            False: arguments that differ hang or give wrong results.

    Returns:
        (rows, `Dispatch`): ``grouped_linear(rows, weight, dispatch.offsets)`` with this rank's
        weights [E / R, N, K]; then ``combine(rows, weights, dispatch)``.  Differentiable in x, any
        number of times; gradients travel the other way, so every rank has to run the backward.

    The host waits once for the counts of rows, as ``all_to_all`` takes sizes from there: the call
    cannot be captured in a CUDA graph.

    Raises:
        RankError: ranks have arguments that differ, or one of them refused its own.
        ArgumentValueError: ``experts`` is not a multiple of R; an index that is no expert, on GPUs
            too.
        UnsupportedTransformError: torch.compile(fullgraph=True), a transform of torch.func.
        Others: as `permute`.
    """
    return exchange.dispatch(x, indices, experts, group, verify)


def combine(
    rows: torch.Tensor, weights: torch.Tensor | None, permutation: Permutation | Dispatch
) -> torch.Tensor:
    """y[t] = Σ_j weights[t, j] rows[positions[t, j]], experts ascending.

    Each product and each sum is rounded to fp32, the result once more to the dtype of ``rows``.
    Rows without an expert are not read: they are left out, and their gradients are +0.

    Args:
        rows: [T k, D], in the order of ``permutation``; bf16, fp16 or fp32.
        weights: [T, k], any of these dtypes; None: all are 1.
        permutation: Of `permute`; or of `dispatch`, whose ranks first send the rows back: then T
            is the number of this rank's tokens, and ``rows`` are those that it received.

    Returns:
        [T, D], the dtype of ``rows``.  Differentiable in rows and weights.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError: an argument is wrong; the message
            names it.
        BackendUnavailable: the device has no backend.
        RankError: ranks of a `Dispatch` have arguments that differ, or one refused its own.

    Example:
        >>> x, routing = torch.randn(5, 64), ck.moe.route(torch.randn(5, 8), k=2)
        >>> rows, permutation = ck.moe.permute(x, routing.indices, experts=8)
        >>> ck.moe.combine(rows, routing.weights, permutation).shape
        torch.Size([5, 64])
    """
    if isinstance(permutation, Dispatch):
        rows = exchange.collect(rows, weights, permutation)
        permutation = permutation.permutation
    checks.permutation(permutation)
    checks.combine(rows, weights, permutation)
    return routing_op.combine(rows, weights, *permutation)


def load_balance_loss(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """E Σ_e f_e P_e: f_e the share of tokens that chose e, P_e its mean score (Switch, Mixtral).

    Tokens are added in the order of ``ck.linear``'s dbias, experts by halves.

    Args:
        scores: fp32 [T, E], of `route`.
        indices: int32 or int64 [T, k].

    Returns:
        fp32 scalar, differentiable in scores.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.

    Example:
        >>> routing = ck.moe.route(torch.randn(5, 8), k=2)
        >>> ck.moe.load_balance_loss(routing.scores, routing.indices).shape
        torch.Size([])
    """
    checks.balance(scores, indices)
    return routing_op.balance_loss(scores, indices)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of (ln Σ_e e^logits)²: the router's z-loss (ST-MoE).

    Args:
        logits: [T, E]; bf16, fp16 or fp32.

    Returns:
        fp32 scalar, differentiable.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError: an argument is wrong; the message names it.

    Example:
        >>> ck.moe.z_loss(torch.zeros(5, 8))
        tensor(4.3241)
    """
    checks.z_loss(logits)
    return routing_op.z_loss(logits)
