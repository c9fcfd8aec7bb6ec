"""A vocabulary cut over the ranks of a group: the log-probabilities and gradients of one rank.

Forward: a rank sums its rows of the head; states are exact sums, so those of all ranks, gathered,
come to the bits of one.  Backward: dW and dbias are a rank's own.  dHidden is a sum over the
vocabulary in the order ``tree``: each rank makes whole leaves of it, they are gathered in fp32 and
added ascending on every rank.
"""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

from ..errors import ArgumentValueError, RankError, ShapeError, expected
from ..runtime import checking, digests, dispatch, process_groups
from ..runtime import main_grad as destination
from ..runtime.dispatch import Launches
from ..runtime.dynamo import untraced
from ..runtime.operands import flat_rows
from ..runtime.torch_ops import refuse_double
from ..schedulers.tiles import leaves
from . import checks, chunks, config, exact, op
from .chunks import Needs, Pass
from .tensors import Head

#: Description of a rank's call; all but its place in the vocabulary must be alike.
_FIELDS = (
    "vocab_start",
    "rows of weight",
    "D of weight",
    "vocab_size",
    "tokens",
    "dtype",
    "order",
    "return_entropy",
    "bias",
    "hidden.requires_grad",
    "temperature",
    "softcap",
    "ignore_index",
)
#: Tensors whose digests ranks compare, after the fields; 0 where one is not compared.
_VALUES = ("target", "temperature", "hidden")
_FLOATS = ("temperature", "softcap")
#: Tokens are exchanged in blocks of at most so many bytes of leaves.
_BLOCK_BYTES = 1 << 28


@untraced
def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: checks.Options,
    group: object,
    verify: bool | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p, entropy) of a head that is cut over ``group``."""
    process_groups.refuse_graphs("linear_logp")
    group = process_groups.group_of(group, "group")
    order, entropy, ignore_index = options.order, options.return_entropy, options.ignore_index
    refusal, said = None, [0] * (len(_FIELDS) + len(_VALUES))
    asks = isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled()
    try:
        process_groups.check_verify(verify)
        problem = checks.linear_logp(hidden, weight, target, bias, options, True)
        process_groups.check_exchangeable("hidden", hidden, group)
        # Refused now: later the other ranks would wait for this one.
        if options.main_grad is not None:
            destination.check_no_alias(options.main_grad, hidden=hidden, weight=weight, bias=bias)
        if asks:
            _at_leaves(problem.start, problem.vocab, order, group)
        cast = checking.autocast(hidden.device)
        dtype = torch.get_autocast_dtype(hidden.device.type) if cast else hidden.dtype
        dispatch.backend("logp_states", hidden.device, dtype)
        said = [
            problem.start, *weight.shape, problem.vocab, problem.tokens,
            checks.DTYPES.index(dtype), config.ORDERS.index(order), entropy,
            bias is not None, asks, _bits(problem.temperature), _bits(problem.softcap),
            ignore_index,
            *_digests(hidden, target, problem.temperatures, verify if group.size() > 1 else False),
        ]  # fmt: skip
        if not verify:
            cuts = _equal_cuts(problem, len(weight), group)
    except Exception as error:
        refusal = error
    if verify:
        cuts = _agree(said, refusal, group)
    elif refusal is not None:
        raise refusal
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    rows = op.rows_of(
        target, problem.temperatures, problem.temperature, ignore_index, problem.vocab
    )
    extent = (problem.start, problem.vocab, problem.softcap, order)
    if problem.tokens == 0:
        return op.linear_logp(
            hidden, weight, bias, target, problem.temperatures, options.main_grad,
            problem.temperature, *extent[:2], ignore_index, problem.softcap, order, entropy, 0,
        )[:3:2]  # fmt: skip
    arguments = (rows, extent, entropy, options.main_grad, cuts, group)
    logp, entropies = _Sharded.apply(hidden, weight, bias, arguments)
    return logp.view(target.shape), entropies.view(target.shape) if entropy else entropies


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, arguments):
        rows, extent, entropy, main_grad, cuts, group = arguments
        flat, head = flat_rows(hidden, "logp_states"), Head(weight, bias, *extent)
        launches = Launches()
        states = exact.merge(launches("logp_states", hidden, flat, head, rows, entropy, None))
        states = process_groups.all_gather(states, group)
        logp, lse2, entropies = launches("logp_finish", hidden, states, rows)
        entropies = logp.new_empty(0) if entropies is None else entropies
        ctx.save_for_backward(hidden, weight, bias, lse2, entropies)
        ctx.rows, ctx.place, ctx.entropy = rows, extent, entropy
        ctx.cuts, ctx.group = cuts, group
        ctx.main_grad = main_grad if ctx.needs_input_grad[1] else None
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        refuse_double("linear_logp")
        hidden, weight, bias, lse2, entropy = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:3])
        d_entropy = d_entropy if ctx.entropy else None
        upstream = op.upstream_of(d_logp, d_entropy, ctx.rows, lse2, entropy)
        head = Head(weight, bias, *ctx.place)
        flat = flat_rows(hidden, "logp_gradients")
        target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (d_logp, d_entropy))[1]
        walk = Pass(Launches(), flat, head, ctx.rows, upstream)
        of_own = needs._replace(hidden=False, weight=target.wanted)
        _, d_weight, d_bias = chunks.gradients(walk, of_own, target.into)
        target.written()
        d_hidden = None
        if needs.hidden:
            d_hidden = _hidden_of_all(walk, ctx.cuts, ctx.group).view(hidden.shape)
        return d_hidden, d_weight, d_bias, None


def _hidden_of_all(whole: Pass, cuts: list[tuple[int, int]], group) -> torch.Tensor:
    """dHidden [T, D] of the whole vocabulary, on every rank; ``cuts``: (start, rows) of each."""
    hidden, head = whole.hidden, whole.head
    entries = [min(size, max(0, head.vocab - start)) for start, size in cuts]
    counts = [
        len(chunks.leaf_slices(entry_count, head.vocab, head.order)) for entry_count in entries
    ]
    bytes_of_token = max(counts) * len(counts) * hidden.shape[1] * torch.float32.itemsize
    step = max(1, _BLOCK_BYTES // bytes_of_token)
    blocks = []
    for first in range(0, len(hidden), step):
        walk = whole.slice_tokens(slice(first, first + step))
        # A rank of fewer leaves than others, or of padding alone, sends zeros, which are not added.
        sent = hidden.new_zeros(max(counts), *walk.hidden.shape, dtype=torch.float32)
        for leaf, rank_leaf in zip(sent, walk.leaf_by_leaf(), strict=False):
            leaf.copy_(rank_leaf)
        every = process_groups.all_gather(sent, group)
        # Ranks ascend, and so do the leaves of each: all of them do.
        ascending = torch.cat([every[rank, :count] for rank, count in enumerate(counts)])
        total = torch.ops.cute_kernels.add_leaves(ascending, None, torch.float32)
        counted = (walk.rows.target >= 0)[:, None]
        blocks.append(torch.where(counted, total, 0.0).to(hidden.dtype))
    return torch.cat(blocks)


def _at_leaves(start: int, vocab: int, order: str, group: dist.ProcessGroup) -> None:
    """Check that dHidden consists of whole leaves of every rank."""
    if group.size() == 1:
        return
    if order != "tree":
        want = "'tree' (required for sharded gradients: hidden requires one)"
        raise ArgumentValueError(expected("order", want, repr(order)))
    length = leaves.length(vocab)
    if start % length and start < vocab:
        want = (
            f"a multiple of {length} = 16 ceil({vocab} / 128), as hidden requires a gradient, "
            "which is added by such leaves"
        )
        raise ShapeError(expected("vocab_start", want, start))


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _digests(hidden, target, temperatures, verify: bool | str) -> list[int]:
    """Digests of the tensors that must be the same on every rank: `_VALUES`.

    A rank with other values would return other log-probabilities without an error.  Dtypes of equal
    targets, and of equal temperatures, agree.
    """
    if not verify:
        return [0] * len(_VALUES)
    return digests.digests(
        [
            target.to(torch.int64),
            None if temperatures is None else temperatures.to(torch.float32),
            hidden if verify == "all" else None,
        ]
    )


def _equal_cuts(problem: checks.Problem, rows: int, group) -> list[tuple[int, int]]:
    """(start, rows) of each rank where ranks do not tell each other: shards of equal rows."""
    ranks, rank = group.size(), group.rank()
    if problem.start != rank * rows:
        want = f"{rank * rows} on rank {rank}, as with verify=False all shards have {rows} rows"
        raise ArgumentValueError(expected("vocab_start", want, problem.start))
    if ranks * rows < problem.vocab:
        want = f"at most {ranks * rows}, {ranks} shards of {rows} rows"
        raise ArgumentValueError(expected("vocab_size", want, problem.vocab))
    return [(i * rows, rows) for i in range(ranks)]


def _shown(name: str, said: int) -> object:
    """Description of a rank's call, for an error message."""
    if name in _FLOATS:
        return struct.unpack("<d", struct.pack("<q", said))[0]
    names = {"dtype": checks.DTYPES, "order": config.ORDERS}.get(name)
    return said if names is None else names[said]


def _agree(said: list[int], refusal: Exception | None, group) -> list[tuple[int, int]]:
    """(start, rows) of each rank; raises on every rank unless they are a whole vocabulary."""
    heard = process_groups.agree(said, refusal, group, "group")
    columns = list(zip(*heard, strict=True))
    for name, values in zip(_FIELDS, columns, strict=False):
        if name not in ("vocab_start", "rows of weight"):
            process_groups.alike(name, [_shown(name, value) for value in values], "group")
    for name, values in zip(_VALUES, columns[len(_FIELDS) :], strict=True):
        process_groups.alike_values(name, values, "group")
    vocab = heard[0][_FIELDS.index("vocab_size")]
    cuts, end = [(row[0], row[1]) for row in heard], 0
    for rank, (start, rows) in enumerate(cuts):
        if start != end:
            what = "a gap" if start > end else "an overlap"
            want = f"shards that follow each other in the order of ranks (rank {rank} at {end})"
            raise RankError(expected("vocab_start", want, f"{start}: {what}"))
        end = start + rows
    if end < vocab:
        want = f"shards that cover all {vocab} entries (some are on no rank)"
        raise RankError(expected("vocab_size", want, f"{end} rows"))
    return cuts
