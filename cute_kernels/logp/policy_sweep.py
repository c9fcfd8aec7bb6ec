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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..arch import CUTE_SM90
from ..cpu.ieee import ieee_on
from ..runtime import dispatch
from ..runtime.dispatch import Launches
from . import chunks, op, policy_checks, policy_losses
from .chunks import Needs, Pass
from .policy_losses import PolicyLossRow
from .tensors import Head, Rows, Upstream

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


class Sweep(NamedTuple):
    """Results of a sweep, flat."""

    logp: torch.Tensor
    entropy: torch.Tensor | None
    terms: TokenTerms
    d_hidden: torch.Tensor | None
    d_weight: torch.Tensor | None
    d_bias: torch.Tensor | None


def sweep(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    loss: TokenLoss,
    inputs: TokenInputs,
    entropy: bool,
    needs: Needs,
    memory: int = 0,
) -> Sweep:
    """Run the sweep over hidden [T, D], T > 0; the arguments have been checked.

    entropy: Whether the entropy is asked for.  needs: gradients that are asked for; without any,
    no logits are kept and nothing is differentiated.  memory: as in `token_chunks`.
    """
    if not any(needs):
        logp, _, entropies = op.evaluate(Launches(), hidden, head, rows, entropy)
        terms = evaluate(loss, logp, entropies, inputs, rows.target >= 0, False)
        return Sweep(logp, entropies, terms, None, None, None)
    parts = token_chunks(len(hidden), len(head.weight), hidden.device.type, memory)
    walk = _Gradients(hidden, head, rows, needs, len(parts) == 1)
    results, upstreams = [], []
    for chunk in parts:
        rows_of_chunk = Rows(*(t[chunk] for t in rows))
        operands = hidden[chunk], head, rows_of_chunk
        sums = op.kept_sums(hidden[chunk], head.weight, 1 << 62)
        logp, lse2, entropies = op.evaluate(Launches(), *operands, entropy, sums)
        counted = rows_of_chunk.target >= 0
        terms = evaluate(loss, logp, entropies, inputs.of(chunk), counted, True)
        upstream = op.upstream_of(terms.d_logp, terms.d_entropy, rows_of_chunk, lse2, entropies)
        walk.add(Pass(Launches(), *operands, upstream, sums))
        del sums  # before the next ones are made
        results.append((logp, entropies, terms))
        upstreams.append(upstream)
    logp, entropies, terms = (
        _joined(column) if i < 2 else TokenTerms(*map(_joined, zip(*column, strict=True)))
        for i, column in enumerate(zip(*results, strict=True))
    )
    upstream = Upstream(*map(_joined, zip(*upstreams, strict=True)))
    return Sweep(logp, entropies, terms, *walk.finish(upstream))


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


class _Gradients:
    """Gradients of the chunks of a sweep, as they come.

    now: Those made of each chunk.  left: those made at the end, of logits that are made again.
    total: fp32 [V, D], the chain of dW from chunk to chunk; or None.
    """

    def __init__(self, hidden: torch.Tensor, head: Head, rows: Rows, needs: Needs, alone: bool):
        self.hidden, self.head, self.rows, self.needs = hidden, head, rows, needs
        backend = dispatch.backend("logp_gradients", hidden.device, hidden.dtype)
        resumes = chained(hidden)
        self.now = Needs(needs.hidden, needs.weight and (alone or resumes), needs.bias and alone)
        self.left = Needs(
            False, needs.weight and not self.now.weight, needs.bias and not self.now.bias
        )
        self.total = self.d_weight = self.d_bias = None
        # One chunk needs no accumulator where one of zeros and none have the same bits: on Triton,
        # whose kernel has other blocks of K for the two, no chunk would show otherwise.
        if self.now.weight and resumes and not (alone and backend == CUTE_SM90):
            self.total = head.weight.new_zeros(head.weight.shape, dtype=torch.float32)
        self.d_hidden = []

    def add(self, walk: Pass) -> None:
        """Add the gradients of one chunk, of its kept logits."""
        if not any(self.now):
            return
        d_hidden, self.d_weight, self.d_bias = chunks.gradients(walk, self.now, self.total)
        self.d_hidden.append(d_hidden)

    def finish(self, upstream: Upstream) -> tuple[torch.Tensor | None, ...]:
        """(dhidden, dweight, dbias) of all chunks."""
        d_hidden = _joined(self.d_hidden) if self.needs.hidden else None
        d_weight, d_bias = self.d_weight, self.d_bias
        if self.total is not None:
            d_weight = self.total.to(self.head.weight.dtype)
        if any(self.left):
            walk = Pass(Launches(), self.hidden, self.head, self.rows, upstream)
            gradients = chunks.gradients(walk, self.left, None)
            d_weight = gradients[1] if self.left.weight else d_weight
            d_bias = gradients[2] if self.left.bias else d_bias
        return d_hidden, d_weight, d_bias


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
    with ieee_on(logp):
        if logp.device.type != "cpu":
            terms = _evaluate(loss, logp, entropy, inputs, differentiate)
        else:
            terms = _by_whole_vectors(loss, logp, entropy, inputs, differentiate)
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
        pieces.append([None if t is None else t[: last - first] for t in terms])
    return TokenTerms(*map(_joined, zip(*pieces, strict=True)))


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
    ratio = clipped = None
    if old is not None:
        ratio = policy_losses.ratio_of(logp, old)
    if loss.row is not None and loss.row.clips:
        of_row = policy_losses.ratio_of(logp, old)
        clipped = policy_losses.clipped_tokens(of_row, tensors["advantages"], loss.options).float()
    policy, kl = (t if t is None else t.detach() for t in (policy, kl))
    return TokenTerms(policy, kl, ratio, clipped, d_logp, d_entropy)


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
    return gradients if len(gradients) == 2 else [gradients[0], None]


class _recording:
    """Context in which torch records a graph, or none: also inside an op."""

    def __init__(self, records: bool):
        self._mode = torch.enable_grad() if records else torch.no_grad()
        self._keys = contextlib.nullcontext()
        if records:
            self._keys = _C._ForceDispatchKeyGuard(
                _C._dispatch_tls_local_include_set(),
                _C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS,
            )

    def __enter__(self) -> None:
        self._keys.__enter__()
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        self._keys.__exit__(*error)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return None if parts[0] is None else parts[0] if len(parts) == 1 else torch.cat(parts)
