"""``ck.linear_logp`` and ``ck.log_probs``: the public face of linear_logp."""

from __future__ import annotations

from typing import Literal, overload

import torch

from . import checks, op, shards


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
    verify: bool | Literal["all"] = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
    return_entropy: bool,
    group: object | None = ...,
    vocab_start: int = ...,
    vocab_size: int | None = ...,
    main_grad: torch.Tensor | None = ...,
    verify: bool | Literal["all"] = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


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
        verify: With a group: whether ranks first tell each other their sizes, options and shards,
            and digests of ``target`` and of a ``temperature`` tensor, so that all of them raise if
            one would; on a GPU the host waits for the digests.  ``"all"``: and a digest of
            ``hidden``, which reads all of it.  False: arguments that differ hang or give wrong
            results, and every rank's ``weight`` has the same number of rows.

    Returns:
        fp32, shaped like ``target``: log p, at most 0; or (log p, entropy in nats).

    Differentiable in hidden, weight and bias, also through the entropy.  The gradient of the logits
    is rounded to the dtype of ``hidden``; dhidden sums it over the vocabulary, dweight over the
    tokens, both as chains in fp32 (dhidden in leaves if the order is ``"tree"``).  Logits are made
    again, a block at a time; docs/linear_logp.md states the workspace.

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
    """
    options = checks.Options(
        temperature, softcap, ignore_index, return_entropy, vocab_size, order, vocab_start,
        main_grad,
    )  # fmt: skip
    if group is not None:
        logp, entropy = shards.linear_logp(hidden, weight, target, bias, options, group, verify)
        return (logp, entropy) if return_entropy else logp
    problem = checks.linear_logp(hidden, weight, target, bias, options, False)
    logp, _, entropy = op.linear_logp(
        hidden, weight, bias, target, problem.temperatures, main_grad, problem.temperature,
        problem.start, problem.vocab, ignore_index, problem.softcap, order, return_entropy,
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


@overload
def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = ...,
    softcap: float = ...,
    ignore_index: int = ...,
    return_entropy: bool,
    vocab_size: int | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


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

    Args:
        logits: [..., V]; bf16, fp16 or fp32; any strides.
        Others: As in `linear_logp`, the error that ``softcap`` brings included.

    Returns, Raises: As `linear_logp`; differentiable in logits, whose gradient has their dtype.

    Guarantees:
        ``run_to_run``, ``batch_invariant``, and ``schedule_invariant`` on GPUs.
    """
    options = checks.Options(temperature, softcap, ignore_index, return_entropy, vocab_size)
    problem = checks.log_probs(logits, target, options)
    logp, _, entropy = op.log_probs(
        logits, target, problem.temperatures, problem.temperature, problem.vocab, ignore_index,
        problem.softcap, return_entropy,
    )  # fmt: skip
    return (logp, entropy) if return_entropy else logp
