"""``ck.linear_logp``, ``ck.log_probs``, ``ck.linear_policy_loss``: the public face of logp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, NoReturn, overload

import torch

from ..runtime import checking
from . import checks, op, policy_checks, policy_op, shards


@overload
def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    order: str = ...,
    temperature: float | torch.Tensor = ...,
    softcap: float = ...,
    ignore_index: int = ...,
    return_entropy: Literal[False] = ...,
    group: object | None = ...,
    vocab_start: int = ...,
    vocab_size: int | None = ...,
    main_grad: torch.Tensor | None = ...,
    logits_memory: int | None = ...,
    verify: bool | Literal["all"] = ...,
) -> torch.Tensor: ...


@overload
def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    order: str = ...,
    temperature: float | torch.Tensor = ...,
    softcap: float = ...,
    ignore_index: int = ...,
    return_entropy: Literal[True],
    group: object | None = ...,
    vocab_start: int = ...,
    vocab_size: int | None = ...,
    main_grad: torch.Tensor | None = ...,
    logits_memory: int | None = ...,
    verify: bool | Literal["all"] = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    order: str = "chain",
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    group: object | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    main_grad: torch.Tensor | None = None,
    logits_memory: int | None = None,
    verify: bool | Literal["all"] = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log p(target) of an LM head, in nats, without its logits.

    p = softmax over the vocabulary of z / temperature, z = hidden weightᵀ + bias in fp32, or
    softcap tanh(z / softcap).  A logit is the sum of ``ck.linear`` before it is rounded.  The sum
    over the vocabulary is exact: units of 16 entries are added in fp32, and units in integers, so
    that no tile, no rank and no order shows in a bit (docs/linear_logp.md).

    Args:
        hidden: [..., D]; bf16, fp16 or fp32; any strides.  Rows are tokens.
        weight: [V, D], the LM head; the dtype and device of ``hidden``.
        target: [...] int64 or int32: entries of the vocabulary, or ``ignore_index``.  Another value
            is an error on a CPU and gives NaN on a GPU, where a look at it would wait.
        bias: [V] or None; the dtype of ``hidden``.
        order: Of the sums over D, as in ``ck.linear``; and of dhidden's sum over the vocabulary:
            ``"chain"``, or ``"tree"``, which ranks can share.
        temperature: A number, or a tensor shaped like ``target``; 2^-100 to 2^100.  A number is
            what it is in fp32, so that it has the bits of a tensor of it.
        softcap: 0 for none (Gemma's final_logit_softcapping); at most 1024, as a capped logit has
            an absolute error of up to 2^-21 softcap (1.4e-5 at 30, 4.9e-4 at 1024), and log p twice
            that, over the temperature.
        ignore_index: The target of tokens that count for nothing: log p and entropy are 0, and
            every gradient is exactly 0, whatever the row holds, NaN included.
        return_entropy: Whether the entropy of p comes too.
        group: A ``torch.distributed`` group, or a 1-D DeviceMesh, over which the vocabulary is cut:
            ``weight`` and ``bias`` are this rank's rows, all else is the same on every rank.
        vocab_start: The vocabulary's number of row 0, a multiple of 16.  If ``hidden`` requires a
            gradient, of 16 ⌈vocab_size / 128⌉, and the order is ``"tree"``.
        vocab_size: Entries of the whole vocabulary; rows of weight from there on are padding and
            get a gradient of 0.  None: all rows.  With a group it must be given.
        main_grad: fp32 [V, D] or None; as in ``ck.linear``.
        logits_memory: Bytes from forward to backward for fp32 logits of the first tokens, which the
            backward then reads instead of making them again: 4 V a token.  A matter of speed: no
            bit depends on it.  None: the setting CUTE_KERNELS_LOGITS_MEMORY_MIB, 0 by default.
            Nothing is kept where no gradient is asked for, and with a group.
        verify: With a group: whether ranks first tell each other their sizes, options and shards,
            and digests of ``target`` and of a ``temperature`` tensor, so that all of them raise if
            one would; on a GPU the host waits for the digests.  ``"all"``: and a digest of
            ``hidden``, which reads all of it.  False: arguments that differ hang or give wrong
            results, and every rank's ``weight`` has the same number of rows.

    Returns:
        fp32, shaped like ``target``: log p, at most 0; or (log p, entropy in nats).

    Differentiable in hidden, weight and bias, also through the entropy.  The gradient of the logits
    is rounded to the dtype of ``hidden``; dhidden sums it over the vocabulary, dweight over the
    tokens, both as chains in fp32 (dhidden in leaves if the order is ``"tree"``).  Logits that
    were not kept are made again, a block at a time; docs/linear_logp.md states the workspace.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` (log p, entropy, dhidden), ``split_invariant`` (dweight
        with ``main_grad``), ``tp_invariant``, and ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong; the message names it.
        RankError: shards with a gap or an overlap, or ranks whose arguments differ; on every rank.
        AliasError: ``main_grad`` shares memory with an input.
        UnsupportedTransformError: a double backward, or a transform of ``torch.func``.
        BackendUnavailable: the device has no backend.

    Example:
        >>> hidden, head = torch.randn(5, 64), torch.randn(97, 64)
        >>> ck.linear_logp(hidden, head, torch.randint(97, (5,))).shape
        torch.Size([5])
    """
    options = checks.Options(
        temperature, softcap, ignore_index, return_entropy, vocab_size, order, vocab_start,
        main_grad, logits_memory,
    )  # fmt: skip
    if group is not None:
        logp, entropy = shards.linear_logp(hidden, weight, target, bias, options, group, verify)
        return (logp, entropy) if return_entropy else logp
    problem = checks.linear_logp(hidden, weight, target, bias, options, False)
    operands = hidden, weight, bias
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    logp, _, entropy, _ = op.linear_logp(
        hidden, weight, bias, target, problem.temperatures, main_grad, problem.temperature,
        problem.start, problem.vocab, ignore_index, problem.softcap, order, return_entropy,
        problem.memory if keeps else 0,
    )  # fmt: skip
    return (logp, entropy) if return_entropy else logp


@overload
def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = ...,
    softcap: float = ...,
    ignore_index: int = ...,
    return_entropy: Literal[False] = ...,
    vocab_size: int | None = ...,
) -> torch.Tensor: ...


@overload
def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = ...,
    softcap: float = ...,
    ignore_index: int = ...,
    return_entropy: Literal[True],
    vocab_size: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    vocab_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log p(target) of logits, in nats: the bytes of `linear_logp`, if it made these logits.

    With a softcap on SM90 the last places of a capped logit may differ (docs/linear_logp.md).

    Args:
        logits: [..., V]; bf16, fp16 or fp32; any strides.
        Others: As in `linear_logp`, the error that ``softcap`` brings included.

    Returns, Raises: As `linear_logp`; differentiable in logits, whose gradient has their dtype.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.

    Example:
        >>> ck.log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    options = checks.Options(temperature, softcap, ignore_index, return_entropy, vocab_size)
    problem = checks.log_probs(logits, target, options)
    logp, _, entropy = op.log_probs(
        logits, target, problem.temperatures, problem.temperature, problem.vocab, ignore_index,
        problem.softcap, return_entropy,
    )  # fmt: skip
    return (logp, entropy) if return_entropy else logp


class PolicyMetrics(NamedTuple):
    """Numbers about the tokens that count, fp32 without dimensions; None: not asked for.

    Attributes:
        policy_loss: The loss without KL and entropy terms.
        kl: Mean KL estimate to the reference, before ``kl_weight``.
        entropy: Mean entropy, in nats.
        ratio: Mean importance ratio.
        clip_fraction: Share of tokens whose ratio is clipped.
    """

    policy_loss: torch.Tensor
    kl: torch.Tensor | None
    entropy: torch.Tensor | None
    ratio: torch.Tensor | None
    clip_fraction: torch.Tensor | None


class PolicyLoss(NamedTuple):
    """Results of `linear_policy_loss`.

    Attributes:
        loss: fp32, no dimensions; differentiable.
        logp: fp32, shaped like target, not differentiable; 0 where a token does not count.
        entropy: The same of the entropy, or None.
        metrics: `PolicyMetrics`.
    """

    loss: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor | None
    metrics: PolicyMetrics


def linear_policy_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    loss: str | Callable[..., torch.Tensor] = "grpo",
    advantages: torch.Tensor | None = None,
    old_logp: torch.Tensor | None = None,
    reference_logp: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    reduction: str | None = None,
    divisor: float | torch.Tensor | None = None,
    max_length: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    max_ratio: float | None = None,
    gate_positive: float | None = None,
    gate_negative: float | None = None,
    kl: str = "k3",
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    entropy_reduction: str | None = None,
    return_entropy: bool = False,
    loss_scale: float = 1.0,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    order: str = "chain",
    logits_memory: int | None = None,
    **others: NoReturn,
) -> PolicyLoss:
    """Policy loss of an LM head's log-probs, with its gradients, from logits that are made once.

    loss = Σ_t w_t (token_weights_t f(log p_t) + kl_weight KL_t) - entropy_weight Σ_t v_t H_t

    f is a row of the table in docs/policy_loss.md, or your own function; w and v are the weights
    of ``reduction`` and ``entropy_reduction``.  Log-probs, entropy and gradients have the bytes of
    `linear_logp` with the same gradient of log p, at three products instead of four.

    Args:
        hidden, weight, target, bias, temperature, softcap, ignore_index, vocab_size, order: As in
            `linear_logp`.
        loss: Name of a row of the table, or ``f(logp, entropy, **tensors) -> loss`` of fp32 tensors
            [tokens] without a token reading another: it is called for parts of the batch, and
            differentiated by autograd.  ``tensors`` are those below that are given.  A result
            without a gradient is refused, unless no gradient is asked for or another term has one.
        advantages, old_logp, reference_logp, token_weights: fp32, bf16 or fp16; shaped like
            target, or [...] or [..., 1], or [B] or [B, 1] with ``cu_seqlens``: a value a sequence
            ([B, 1] where T = B; there a GPU waits).  Without ``old_logp`` a ratio is 1 and has a
            gradient.  ``token_weights`` multiply f, not the KL.
        tensors: More of them by name, for a function of yours.
        mask: Shaped like target; tokens where it is 0 do not count, as those of ``ignore_index``.
            Values besides 0 and 1 are refused on a CPU, and are 1 on a GPU; see ``token_weights``.
        cu_seqlens: [B + 1] int64 or int32: where packed sequences begin in target [T].
        reduction: ``"sum"``: w = 1 / divisor (1).  ``"token_mean"``: 1 / divisor (tokens that
            count).  ``"sequence_mean"``: 1 / (divisor (sequences) tokens of the sequence).
            ``"constant"``: 1 / (divisor (sequences) max_length).  None: the row's, or token_mean.
        divisor: Replaces the number in parentheses; max_length: of ``"constant"``.
        clip_low, clip_high, max_ratio, gate_positive, gate_negative: Options of the row; None: its
            defaults.  One that the row does not have is refused.
        kl: ``"k1"``, ``"k2"``, ``"k3"``, or ``"k3_importance"``: k3 times the importance ratio.
        kl_weight, entropy_weight: Weights of the additive terms.
        entropy_reduction: None: v = w.  Else v is of this reduction, without ``divisor``.
        return_entropy: Whether the entropy comes, too; with an entropy term or a function, always.
        loss_scale: Multiplies the loss, as for gradient accumulation.
        logits_memory: Bytes of a chunk's fp32 logits, if above the default (docs/policy_loss.md).
            No bit depends on it.  None: the setting CUTE_KERNELS_LOGITS_MEMORY_MIB.

    Returns:
        `PolicyLoss` (loss, logp, entropy, metrics).  A token whose loss is beyond fp32 (inf) has
        no gradient if its own is not finite: no NaN reaches other tokens or dweight.

    Differentiable once, in hidden, weight and bias, through ``loss`` alone.  The gradients are made
    in the forward; the backward multiplies them by the gradient of ``loss``: by 1 or a power of two
    they keep their bytes, by another number they are rounded once more (use ``loss_scale``, in fp16
    also for that of a GradScaler: small gradients are lost before they are multiplied).  There is
    no ``main_grad``.  Without a gradient to make, no logits are kept.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` (log p, entropy; dhidden with the same w and v), and
        ``schedule_invariant`` on GPUs.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError: an argument is
            wrong, or a loss is of whole sequences (GSPO); the message names it.
        UnsupportedTransformError: a double backward, or a transform of ``torch.func``.
        BackendUnavailable: the device has no backend.

    Example:
        >>> hidden, head, ids = torch.randn(1, 5, 64), torch.randn(9, 64), torch.randint(9, (1, 5))
        >>> out = ck.linear_policy_loss(hidden, head, ids, advantages=torch.randn(1, 5))
    """
    if others:
        checking.no_other_arguments("linear_policy_loss", others, policy_checks.OTHER_NAMES)
    target = policy_checks.counted_target(target, mask, ignore_index)
    operands = advantages, old_logp, reference_logp, token_weights
    given = dict(zip(policy_checks.GIVEN, operands, strict=True))
    options = checks.Options(
        temperature, softcap, ignore_index, return_entropy, vocab_size, order,
        logits_memory=logits_memory,
    )  # fmt: skip
    head = checks.linear_logp(hidden, weight, target, bias, options, False)
    choices = policy_checks.Choices(loss, kl, reduction, entropy_reduction)
    numbers = policy_checks.Numbers(
        kl_weight, entropy_weight, loss_scale, max_length, divisor,
        clip_low, clip_high, max_ratio, gate_positive, gate_negative,
    )  # fmt: skip
    problem = policy_checks.policy_loss(
        target, ignore_index, given, tensors, cu_seqlens, choices, numbers
    )
    function, bonus = problem.function, problem.numbers.entropy_weight
    wanted = function is not None or return_entropy or bonus != 0
    results = policy_op.call(hidden, weight, bias, target, head, problem, options, wanted)
    metrics = PolicyMetrics(*(t if t.dim() == 0 else None for t in results[3:8]))
    return PolicyLoss(*results[:2], results[2] if wanted else None, metrics)
