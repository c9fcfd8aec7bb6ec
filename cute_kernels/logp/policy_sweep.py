"""One sweep over chunks of tokens: log-probabilities, loss and gradients from logits made once.

    z = H Wᵀ (fp32, kept)    log p, entropy = finish(states(z))    loss(log p, entropy) -> dlog p
    G = dlogits of the kept z        dH = G W        dW += Gᵀ H

Three products where a forward and a backward of `linear_logp` make four.  No chunk shows in a bit:
a logit, a state and a row of dH are a token's own, and dW is a chain over tokens that goes on in an
fp32 accumulator, cut at multiples of 16 tokens.  On a CPU the sum over tokens of a dW is one
product that no cut keeps the bytes of, and so is a bias's gradient on every device: there they are
made by the walk through the vocabulary of `chunks`, from logits that are made again.  On SM90 a
softcap, or a gradient of the entropy, has the logits made again as well: `_Chunks.keeps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..arch import CUTE_SM90
from ..cpu.ieee import ieee_on
from ..runtime import dispatch, products
from ..schedulers.tiles import leaves
from . import chunks, op, policy_checks, policy_losses
from .chunks import Needs
from .config import CPU
from .policy_losses import PolicyLossRow
from .tensors import Head, Logits, Rows, Upstream

#: Bytes of a chunk's fp32 logits, with the leaves of order ``tree``; and those of a block of G.
LOGITS_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
GRADIENT_BYTES = 1 << 27
#: Tokens of a chunk are a multiple of the first, and of the second where so many fit.
GROUP, TILE = 16, 128
#: Columns of a block of G on a GPU: whole tiles.
_COLUMNS = 256
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
        """Those of some tokens."""
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
) -> Sweep:
    """Run the sweep over hidden [T, D], T > 0; the arguments have been checked.

    entropy: Whether the entropy is asked for.  needs: gradients that are asked for; without any,
    no logits are kept and nothing is differentiated.
    """
    if not any(needs):
        logp, _, entropies = op.finish(op.states(hidden, head, rows, entropy), rows, hidden.dtype)
        terms = evaluate(loss, logp, entropies, inputs, rows.target >= 0, False)
        return Sweep(logp, entropies, terms, None, None, None)
    walk = _Chunks(hidden, head, rows, needs, chained(hidden))
    results, upstreams = [], []
    for some in walk.slices():
        rows_of_chunk = Rows(*(t[some] for t in rows))
        logits = walk.logits(some) if walk.keeps(False) else None
        parts = walk.states(some, logits, rows_of_chunk, entropy)
        logp, lse2, entropies = op.finish(parts, rows_of_chunk, hidden.dtype)
        counted = rows_of_chunk.target >= 0
        terms = evaluate(loss, logp, entropies, inputs.of(some), counted, True)
        upstream = op.upstream_of(terms.d_logp, terms.d_entropy, rows_of_chunk, lse2, entropies)
        walk.add(some, logits, rows_of_chunk, upstream)
        results.append((logp, entropies, terms))
        upstreams.append(upstream)
    logp, entropies, terms = (
        _joined(column) if i < 2 else TokenTerms(*map(_joined, zip(*column, strict=True)))
        for i, column in enumerate(zip(*results, strict=True))
    )
    upstream = Upstream(*map(_joined, zip(*upstreams, strict=True)))
    return Sweep(logp, entropies, terms, *walk.finish(upstream))


def chained(t: torch.Tensor) -> bool:
    """Whether dW is a chain that an accumulator resumes.

    On a CPU that is the order of a dW with ``main_grad`` alone, so there it is not.
    """
    return t.device.type != "cpu"


class _Chunks:
    """Gradients of the chunks of a sweep, as they come."""

    def __init__(self, hidden: torch.Tensor, head: Head, rows: Rows, needs: Needs, chained: bool):
        self.hidden, self.head, self.rows, self.needs = hidden, head, rows, needs
        self.chained = chained and needs.weight
        self.entries = head.entries
        self.backend = dispatch.backend("logp_gradients", hidden.device, hidden.dtype)
        self.d_hidden = self.total = self.d_weight = None
        if needs.hidden:
            self.d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        if self.chained:
            shape, weight = head.weight.shape, head.weight
            self.d_weight = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            # Padding of the vocabulary is not read.
            self.d_weight[self.entries :] = 0
            if len(self.slices()) > 1 or self.backend != CUTE_SM90:
                self.total = weight.new_zeros(self.entries, shape[1], dtype=torch.float32)

    def slices(self) -> list[slice]:
        """Chunks of tokens, ascending, of about one size."""
        tokens, width = self.hidden.shape
        # Leaves lie beside their sum.
        count = 1 if self.head.order == "chain" else leaves.count(width)
        of_token = 4 * self.entries * (count + (count > 1))
        most = LOGITS_BYTES.get(self.hidden.device.type, 1 << 30) // of_token
        step = TILE if most >= TILE else GROUP
        most = max(step, most // step * step)
        chunk = -(-tokens // -(-tokens // most))
        chunk = -(-chunk // step) * step
        return [slice(first, min(first + chunk, tokens)) for first in range(0, tokens, chunk)]

    def logits(self, some: slice) -> torch.Tensor:
        """fp32 logits [t, entries] before the softcap: the sums that `linear_logp` makes."""
        head = self.head
        logits = products.sums(self.hidden[some], head.weight[: self.entries], head.order)
        if head.bias is not None:
            with ieee_on(logits):
                logits += head.bias[: self.entries].float()
        return logits

    def keeps(self, entropy: bool) -> bool:
        """Whether gradients come from kept logits; ``entropy``: one of the entropy is asked for.

        SM90's kernel has fused operations where a softcap or the entropy enters, and the kernel for
        kept logits has none: there they are made again, for the bytes of `linear_logp`.
        """
        return self.backend != CUTE_SM90 or not (entropy or self.head.softcap)

    def states(
        self, some: slice, logits: torch.Tensor | None, rows: Rows, entropy: bool
    ) -> torch.Tensor:
        """int64 [P, t, C]: the states of a chunk's logits, kept or not."""
        if logits is None:
            return op.states(self.hidden[some], self.head, rows, entropy)
        launch = dispatch.launcher("logit_states", logits.device, logits.dtype)
        return launch(logits, Logits(0, self.head.vocab, self.head.softcap), rows, entropy)

    def gradient(
        self, some: slice, logits: torch.Tensor | None, block: slice, rows: Rows, upstream: Upstream
    ) -> torch.Tensor:
        """G of a chunk's columns, in the dtype of hidden."""
        hidden, head = self.hidden[some], self.head
        if logits is None or not self.keeps(upstream.of_entropy is not None):
            launch = dispatch.launcher("logp_gradients", hidden.device, hidden.dtype)
            return launch(hidden, head.block(block), rows, upstream)
        launch = dispatch.launcher("logit_gradients", logits.device, logits.dtype)
        place = Logits(block.start, head.vocab, head.softcap)
        return launch(logits[:, block], place, rows, upstream, hidden.dtype)

    def add(self, some: slice, logits: torch.Tensor | None, rows: Rows, upstream: Upstream) -> None:
        """Add the gradients of one chunk; ``logits``: None if they are made again."""
        if not (self.chained or self.needs.hidden):
            return
        hidden, head, dtype = self.hidden[some], self.head, self.hidden.dtype
        masked = (rows.target < 0)[:, None]
        add_hidden = dispatch.launcher("logp_add_hidden", hidden.device, dtype)
        # What a masked token holds, NaN as it may be, must not meet its zeros in dW.
        seen = hidden.masked_fill(masked, 0.0) if self.chained else None
        total = None
        for leaf in chunks.leaf_slices(self.entries, head.vocab, head.order):
            part = None
            if self.needs.hidden:
                part = hidden.new_zeros(hidden.shape, dtype=torch.float32)
            for block in self._blocks(leaf, len(hidden)):
                gradient = self.gradient(some, logits, block, rows, upstream)
                if self.needs.hidden:
                    add_hidden(part, gradient, head.weight[block])
                if self.chained:
                    self._add_weight(block, gradient, seen)
                del gradient  # before the next one is made
            if part is not None:
                with ieee_on(part):
                    total = part if total is None else total.add_(part)
        if self.needs.hidden:
            # Zeros times a weight that is not finite are NaN.
            self.d_hidden[some] = total.masked_fill_(masked, 0.0)

    def _add_weight(self, block: slice, gradient: torch.Tensor, seen: torch.Tensor) -> None:
        """dW' += Gᵀ Hidden of one chunk, the chain going on.

        The only chunk is rounded at once on SM90, where an accumulator of zeros and none have the
        same bits; Triton's kernel has other blocks of K for the two.
        """
        if self.total is None:
            products.product(gradient.mT, seen.mT, out=self.d_weight[block])
        else:
            products.product(gradient.mT, seen.mT, accumulator=self.total[block])

    def _blocks(self, leaf: slice, tokens: int) -> Iterator[slice]:
        """Blocks of columns of a leaf; on a CPU they are the order of dHidden."""
        step = CPU.columns
        if self.hidden.device.type != "cpu":
            fitting = GRADIENT_BYTES // (tokens * self.hidden.itemsize)
            step = max(_COLUMNS, fitting // _COLUMNS * _COLUMNS)
        for first in range(leaf.start, leaf.stop, step):
            yield slice(first, min(first + step, leaf.stop))

    def finish(self, upstream: Upstream) -> tuple[torch.Tensor | None, ...]:
        """(dhidden, dweight, dbias) of all chunks."""
        if self.total is not None:
            self.d_weight[: self.entries] = self.total
        left = Needs(False, self.needs.weight and not self.chained, self.needs.bias)
        _, d_weight, d_bias = chunks.gradients(
            self.hidden, self.head, self.rows, upstream, left, None
        )
        return self.d_hidden, self.d_weight if self.chained else d_weight, d_bias


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
    found = []
    for first in range(0, len(logp), _ONE_THREAD):
        last = min(first + _ONE_THREAD, len(logp))
        padded = -(-(last - first) // _WHOLE_VECTORS) * _WHOLE_VECTORS
        index = torch.arange(first, first + padded, device="cpu").clamp(max=last - 1)
        of_part = None if entropy is None else entropy[index]
        terms = _evaluate(loss, logp[index], of_part, inputs.of(index), differentiate)
        found.append([None if t is None else t[: last - first] for t in terms])
    return TokenTerms(*map(_joined, zip(*found, strict=True)))


def _evaluate(loss, logp, entropy, inputs, differentiate) -> TokenTerms:
    tensors = inputs.tensors
    old, reference = tensors.get("old_logp"), tensors.get("reference_logp")
    d_logp = d_entropy = kl = None
    with _recording(differentiate):
        leaves = [t if t is None else t.detach() for t in (logp, entropy)]
        if differentiate:
            leaves = [t if t is None else t.requires_grad_() for t in leaves]
        policy = loss.function(*leaves, **{name: tensors[name] for name in loss.takes})
        policy_checks.losses(policy, logp)
        if "token_weights" in tensors:
            policy = policy * tensors["token_weights"]
        if reference is not None:
            kl = policy_losses.kl_of(loss.kl, leaves[0], reference, old)
        term = policy if not loss.kl_weight else policy + loss.kl_weight * kl
        if differentiate:
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


def _gradients(term, leaves, weights) -> list[torch.Tensor | None]:
    if not term.requires_grad:
        return [None, None]
    asked = [t for t in leaves if t is not None]
    found = list(torch.autograd.grad(term, asked, weights, allow_unused=True))
    return found if len(found) == 2 else [found[0], None]


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


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    return None if parts[0] is None else parts[0] if len(parts) == 1 else torch.cat(parts)
