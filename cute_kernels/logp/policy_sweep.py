"""One sweep over chunks of tokens: log-probabilities, loss and gradients from logits made once.

    z = H Wᵀ (fp32, kept)    log p, entropy = finish(states(z))    loss(log p, entropy) -> dlog p
    G = dlogits of the kept z        dH = G W        dW += Gᵀ H

Three products where a forward and a backward of `linear_logp` make four: a chunk's logits are kept
and read again as those of its ``logits_memory``.  No chunk shows in a bit: a logit, a state and a
row of dH are a token's own, and dW is a chain over tokens that goes on in an fp32 accumulator, cut
at multiples of 16 tokens.  On a CPU the sum over tokens of a dW is one product that no cut keeps
the bytes of, and so is a bias's gradient on every device: with more than one chunk they are made by
the walk through the vocabulary of `chunks`, from logits that are made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..arch import CUTE_SM90
from ..cpu.ieee import ieee_on
from ..runtime import dispatch
from . import chunks, op, policy_checks, policy_losses
from .chunks import Needs, Pass
from .policy_losses import PolicyLossRow

#: Bytes of a chunk's fp32 logits; and of the logits of all tokens that are not cut at all.
LOGITS_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
UNCUT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
#: Tokens of a chunk are a multiple of the first, and of the second where so many fit.
GROUP, TILE = 16, 128
#: torch's vectorised CPU loops compute whole vectors unlike what is left over, and cut work of more
#: elements than it gives one thread.
_WHOLE_VECTORS, _ONE_THREAD = 64, 1 << 14

_C = torch._C
#: Keys without which torch records no graph, as inside an op that a compiled graph calls.
_AUTOGRAD_KEYS = (
    _C.DispatchKeySet(_C.DispatchKey.AutogradCPU)
    | _C.DispatchKeySet(_C.DispatchKey.AutogradCUDA)
    | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
)


class TokenLoss(NamedTuple):
    """A loss with its options, as `evaluate` computes it for some tokens.

    function: ``function(logp, entropy, **tensors)``; of a row of the table or of the user.
    row: The row, or None for a function of the user.  takes: names of its tensors.
    """

    function: Callable[..., torch.Tensor]
    row: PolicyLossRow | None
    options: Mapping[str, float | None]
    takes: tuple[str, ...]
    kl: str
    kl_weight: float
    entropy_weight: float


class TokenInputs(NamedTuple):
    """Tensors of the loss, fp32 [T] each: ``tensors`` by name, and the weights of the sums."""

    tensors: Mapping[str, torch.Tensor]
    weights: torch.Tensor
    entropy_weights: torch.Tensor

    def of(self, index: slice | torch.Tensor) -> TokenInputs:
        """Select the inputs of some tokens."""
        tensors = {name: t[index] for name, t in self.tensors.items()}
        return TokenInputs(tensors, self.weights[index], self.entropy_weights[index])


class TokenTerms(NamedTuple):
    """Terms of each token's loss, and the gradients of the loss: fp32 [T]; None: not asked for."""

    policy: torch.Tensor
    kl: torch.Tensor | None
    ratio: torch.Tensor | None
    clipped: torch.Tensor | None
    d_logp: torch.Tensor | None
    d_entropy: torch.Tensor | None


def sweep(
    whole: Pass, loss: TokenLoss, inputs: TokenInputs, entropy: bool, needs: Needs, memory: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, TokenTerms, list[torch.Tensor | None]]:
    """(log p, entropy, terms, [dhidden, dweight, dbias]), flat; the arguments have been checked.

    whole: The walk of all tokens, one at least, whose upstream gradients are not known yet.
    entropy: Whether the entropy is asked for.  needs: gradients that are asked for; without any,
    no logits are kept and nothing is differentiated.  memory: as in `token_chunks`.
    """
    launches, hidden, head, rows = whole[:4]
    if not any(needs):
        logp, _, entropies = op.evaluate(launches, hidden, head, rows, entropy)
        terms = evaluate(loss, logp, entropies, inputs, rows.target >= 0, False)
        return logp, entropies, terms, [None] * 3
    parts = token_chunks(len(hidden), len(head.weight), hidden.device.type, memory)
    alone, resumes = len(parts) == 1, chained(hidden)
    # Gradients that are made of each chunk, and those made at the end, of logits made again.
    now = Needs(needs.hidden, needs.weight and (alone or resumes), needs.bias and alone)
    left = Needs(False, needs.weight and not now.weight, needs.bias and not now.bias)
    # The chain of dW from chunk to chunk.  One chunk needs no accumulator where one of zeros and
    # none have the same bits: on Triton, whose kernel has other blocks of K for the two, no chunk
    # would show otherwise.
    total, backend = None, dispatch.backend("logp_gradients", hidden.device, hidden.dtype)
    if now.weight and resumes and not (alone and backend == CUTE_SM90):
        total = head.weight.new_zeros(head.weight.shape, dtype=torch.float32)
    results = []
    for chunk in parts:
        walk = whole.slice_tokens(chunk)
        sums = op.kept_sums(walk.hidden, head.weight, 1 << 62)
        logp, lse2, entropies = op.evaluate(launches, walk.hidden, head, walk.rows, entropy, sums)
        terms = evaluate(loss, logp, entropies, inputs.of(chunk), walk.rows.target >= 0, True)
        upstream = op.upstream_of(terms.d_logp, terms.d_entropy, walk.rows, lse2, entropies)
        walk = walk._replace(upstream=upstream, sums=sums)
        d_hidden, d_weight, d_bias = chunks.gradients(walk, now, total)
        del walk, sums  # before the next ones are made
        results.append((logp, entropies, terms, upstream, d_hidden))
    logp, entropies, terms, upstream, d_hidden = map(_joined, zip(*results, strict=True))
    if total is not None:
        d_weight = total.to(head.weight.dtype)
    if any(left):
        gradients = chunks.gradients(whole._replace(upstream=upstream), left, None)
        d_weight = gradients[1] if left.weight else d_weight
        d_bias = gradients[2] if left.bias else d_bias
    return logp, entropies, terms, [d_hidden, d_weight, d_bias]


def token_chunks(tokens: int, vocab: int, device_type: str, memory: int = 0) -> list[slice]:
    """Chunks of tokens, ascending, of about one size; no bit depends on them.

    A chunk's fp32 logits take the larger of `LOGITS_BYTES` and ``memory`` (``logits_memory=``, or
    the setting) at most.  Up to `UNCUT_BYTES` there is one chunk: a cut of dW's chain costs 12
    bytes an element of dW and more (fp32 read and written a chunk, zeros, a cast), logits in
    memory that is free cost nothing.
    """
    budget = max(LOGITS_BYTES[device_type], memory)
    if 4 * vocab * tokens <= max(budget, UNCUT_BYTES[device_type]):
        return [slice(0, tokens)]
    most = budget // (4 * vocab)
    step = TILE if most >= TILE else GROUP
    most = max(step, most // step * step)
    chunk = -(-tokens // -(-tokens // most))
    chunk = -(-chunk // step) * step
    return [slice(first, min(first + chunk, tokens)) for first in range(0, tokens, chunk)]


def chained(t: torch.Tensor) -> bool:
    """Whether dW is a chain that an accumulator resumes.

    On a CPU that is the order of a dW with ``main_grad`` alone, so there it is not.
    """
    return t.device.type != "cpu"


# ---- the loss of tokens --------------------------------------------------------------------------


def evaluate(
    loss: TokenLoss,
    logp: torch.Tensor,
    entropy: torch.Tensor | None,
    inputs: TokenInputs,
    counted: torch.Tensor,
    differentiate: bool,
) -> TokenTerms:
    """Terms of the tokens' losses and, if asked for, gradients; 0 where a token does not count.

    Tokens that do not count are selected away: the loss sees zeros in all of their tensors.
    """
    tensors = {name: torch.where(counted, t, 0.0) for name, t in inputs.tensors.items()}
    inputs = inputs._replace(tensors=tensors)
    run = _by_whole_vectors if logp.device.type == "cpu" else _evaluate
    with ieee_on(logp):
        terms = run(loss, logp, entropy, inputs, differentiate)
        return TokenTerms(*(t if t is None else torch.where(counted, t, 0.0) for t in terms))


def _by_whole_vectors(loss, logp, entropy, inputs, differentiate) -> TokenTerms:
    """`_evaluate` of parts whose sizes are multiples of a vector, the last token repeated."""
    pieces = []
    for first in range(0, len(logp), _ONE_THREAD):
        last = min(first + _ONE_THREAD, len(logp))
        padded = -(-(last - first) // _WHOLE_VECTORS) * _WHOLE_VECTORS
        index = torch.arange(first, first + padded, device="cpu").clamp(max=last - 1)
        of_part = None if entropy is None else entropy[index]
        terms = _evaluate(loss, logp[index], of_part, inputs.of(index), differentiate)
        pieces.append(TokenTerms(*(None if t is None else t[: last - first] for t in terms)))
    return _joined(pieces)


def _evaluate(loss, logp, entropy, inputs, differentiate) -> TokenTerms:
    tensors = inputs.tensors
    old, reference = tensors.get("old_logp"), tensors.get("reference_logp")
    d_logp = d_entropy = kl = None
    with _recording(differentiate):
        leaves = [t if t is None else t.detach() for t in (logp, entropy)]
        if differentiate:
            leaves = [t if t is None else t.requires_grad_() for t in leaves]
        taken = {name: tensors[name] for name in loss.takes}
        policy = loss.function(*leaves, **taken) if loss.row else _of_user(loss, leaves, taken)
        policy_checks.losses(policy, logp)
        if "token_weights" in tensors:
            policy = policy_losses.product(policy, tensors["token_weights"])
        if reference is not None:
            kl = policy_losses.KL[loss.kl](leaves[0], reference, old)
        term = policy if not loss.kl_weight else policy + loss.kl_weight * kl
        if differentiate:
            if loss.row is None:
                policy_checks.some_gradient(term, loss.entropy_weight)
            d_logp, d_entropy = _gradients(term, leaves, inputs.weights)
    if differentiate:
        d_logp = torch.zeros_like(logp) if d_logp is None else d_logp
        if loss.entropy_weight:
            of_bonus = -loss.entropy_weight * inputs.entropy_weights
            d_entropy = of_bonus if d_entropy is None else d_entropy + of_bonus
    ratio, clipped = policy_losses.ratio_of(logp, old), None
    if loss.row is not None and loss.row.clips:
        clipped = policy_losses.clipped_tokens(ratio, tensors["advantages"], loss.options).float()
    policy, kl = (t if t is None else t.detach() for t in (policy, kl))
    return TokenTerms(policy, kl, None if old is None else ratio, clipped, d_logp, d_entropy)


def _of_user(loss: TokenLoss, leaves, taken) -> torch.Tensor:
    """Losses by a function of the user's, which may write into what it gets."""
    if not torch.is_grad_enabled():  # torch refuses to write into leaves of a graph
        leaves = [t if t is None else t.clone() for t in leaves]
    policy = loss.function(*leaves, **{name: t.clone() for name, t in taken.items()})
    policy_checks.no_other_gradient(policy, leaves)
    return policy


def _gradients(term, leaves, weights) -> list[torch.Tensor | None]:
    if not term.requires_grad:
        return [None, None]
    asked = [t for t in leaves if t is not None]
    gradients = [
        # Of a loss that is inf: log p of all entries would make NaN of it in all of dweight.
        t if t is None else t.masked_fill(term.isinf() & ~t.isfinite(), 0.0)
        for t in torch.autograd.grad(term, asked, weights, allow_unused=True)
    ]
    return [*gradients, None][:2]


@contextlib.contextmanager
def _recording(records: bool) -> Iterator[None]:
    """Context in which torch records a graph, or none: also inside an op."""
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    if records:
        excluded = excluded - _AUTOGRAD_KEYS
    with _C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(records):
        yield


def _joined(parts: Sequence[torch.Tensor | NamedTuple | None]):
    """Tensors of all chunks of tokens as one, field by field."""
    if isinstance(parts[0], tuple):
        return type(parts[0])(*map(_joined, zip(*parts, strict=True)))
    return parts[0] if parts[0] is None or len(parts) == 1 else torch.cat(parts)
