"""vime's ``linear_logp`` provider: log-probs of its Megatron trainer by ``ck.linear_logp``.

    --linear-logp-provider cute_kernels.integrations.vime.provider
    --linear-logp-provider-mode strict

vime hands over the head's input, a rank's rows of its weight and where they lie in the vocabulary,
and takes log p and the entropy back.  Its request and result are duck types: vime is not imported.
A request that cannot be served raises `LogpProviderUnavailable`: with ``auto`` vime then takes its
own implementation, with ``strict`` it stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .. import contracts
from ..errors import BackendUnavailable, LogpProviderUnavailable, expected
from ..logp import api as logp
from ..logp.checks import DTYPES
from ..schedulers.tiles import leaves

__all__ = ["LinearLogpResult", "provider", "tree_provider"]


@dataclass(frozen=True)
class LinearLogpResult:
    """Result of a provider, with the fields that vime reads.

    Attributes:
        logp: fp32 [T, 1], with gradients in the hidden states, the weight and the bias.
        entropy: fp32 [T]; None: not asked for.  It has gradients if they were asked for.
        backend_id: ``"cute_kernels.<backend>"``.
        contract_id: ``ck.contract_id`` of ``linear_logp``.
        provenance: What a log may say: order, ranks, sizes.
    """

    logp: torch.Tensor
    entropy: torch.Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, object] = field(default_factory=dict)


def provider(request: object) -> LinearLogpResult:
    """Serve a request of vime.

    The order of sums is ``"chain"`` on one rank and ``"tree"`` under tensor parallelism, whose
    ranks share the gradient of the hidden states only so.

    Args:
        request: vime's: ``target_ids`` int [T], of the real vocabulary; ``context`` with
            ``hidden`` [T, D], ``projection`` (``weight`` [V', D], ``bias``) and
            ``vocab_partition`` (``local_start``, ``local_size``, ``real_size``, ``padded_size``);
            ``tensor_parallel_group``; ``temperature``: None, a number or [T];
            ``with_entropy``, ``with_entropy_grad``; ``log_prob_keep_mask``: None.

    Returns:
        The bytes of ``ck.linear_logp`` on the same tensors.  Rows of the weight from ``real_size``
        on are padding and get no gradient.

    Raises:
        LogpProviderUnavailable: no ``context``, as logits are rounded; a keep mask; a dtype, device
            or partition that ``linear_logp`` does not take.
        Others: as ``ck.linear_logp``: a wrong request is never served by another implementation.
    """
    return _serve(request, None)


def tree_provider(request: object) -> LinearLogpResult:
    """Serve a request in the order ``"tree"`` on any number of ranks.

    One rank and several have the same bytes.

    Args, Returns, Raises: As `provider`.
    """
    return _serve(request, "tree")


def _serve(request: object, order: str | None) -> LinearLogpResult:
    context = getattr(request, "context", None)
    if context is None:
        want = "hidden states and the head's weight (the logits are rounded already)"
        raise _unavailable("request.context", want, "None")
    if getattr(request, "log_prob_keep_mask", None) is not None:
        raise _unavailable("request.log_prob_keep_mask", "None (no top-p replay)", "a mask")
    hidden, weight = context.hidden, context.projection.weight
    for name, t in (("context.hidden", hidden), ("context.projection.weight", weight)):
        if t.dtype not in DTYPES or t.dtype is not hidden.dtype:
            want = "one dtype of bfloat16, float16 and float32 in hidden and weight"
            raise _unavailable(f"request.{name}", want, t.dtype)
    try:
        identity = contracts.contract_id("linear_logp", hidden.device, hidden.dtype)
    except BackendUnavailable as error:
        raise LogpProviderUnavailable(str(error)) from None
    group = getattr(request, "tensor_parallel_group", None)
    ranks = 1 if group is None else group.size()
    order = order or ("tree" if ranks > 1 else "chain")
    start, vocab, bias = _vocabulary(context, ranks)
    scored = logp.linear_logp(
        hidden,
        weight,
        request.target_ids,
        bias,
        order=order,
        temperature=_temperature(request),
        return_entropy=bool(request.with_entropy),
        group=group if ranks > 1 else None,
        vocab_start=start,
        vocab_size=vocab,
    )
    log_p, entropy = scored if request.with_entropy else (scored, None)
    if entropy is not None and not request.with_entropy_grad:
        entropy = entropy.detach()
    partition = context.vocab_partition
    return LinearLogpResult(
        logp=log_p[:, None],
        entropy=entropy,
        backend_id=f"cute_kernels.{identity.split('/')[1]}",
        contract_id=identity,
        provenance={
            "order": order,
            "logits_dtype": "float32",
            "tensor_parallel_ranks": ranks,
            "real_vocab_size": partition.real_size,
            "padded_vocab_size": partition.padded_size,
        },
    )


def _temperature(request: object) -> float | torch.Tensor:
    """Return the number, or a tensor shaped like the targets."""
    value = getattr(request, "temperature", None)
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        return value.expand_as(request.target_ids) if value.numel() == 1 else value
    return float(value)


def _vocabulary(context: object, ranks: int) -> tuple[int, int, torch.Tensor | None]:
    """Return (vocab_start, vocab_size, bias) of a rank's rows.

    The gradient of the hidden states is added in leaves that are cut by the size of the
    vocabulary.  Where ranks do not begin at leaves of the real size, as Megatron's padding moves
    them, the size is the padded one, and a bias of -inf takes the padding's probability away.
    """
    weight, bias = context.projection.weight, getattr(context.projection, "bias", None)
    partition = context.vocab_partition
    start, rows = partition.local_start, partition.local_size
    real, padded = partition.real_size, partition.padded_size
    if ranks == 1 or _at_leaves(rows, ranks, real):
        return start, real, bias
    if not _at_leaves(rows, ranks, padded):
        want = (
            f"shards that begin at a multiple of {leaves.length(padded)} = 16 ceil({padded} / 128)"
        )
        raise _unavailable("request.context.vocab_partition", want, f"{ranks} of {rows} rows")
    whole = weight.new_zeros(rows) if bias is None else bias
    padding = torch.arange(start, start + rows, device=weight.device) >= real
    return start, padded, whole.masked_fill(padding, -torch.inf)


def _at_leaves(rows: int, ranks: int, vocab: int) -> bool:
    """Whether every rank begins at a leaf, or behind the vocabulary."""
    length = leaves.length(vocab)
    return all(r * rows % length == 0 or r * rows >= vocab for r in range(ranks))


def _unavailable(name: str, want: str, got: object) -> LogpProviderUnavailable:
    return LogpProviderUnavailable(expected(name, want, got))
