"""The backward, block by block of the vocabulary: a block's logits are made again, or were kept.

    G = dlogits of a block [T, V']       dHidden += G W'       dW' = Gᵀ Hidden       dbias' = Σ G

dHidden is a chain over the vocabulary, ascending; in the order ``tree`` it is cut into at most
eight leaves of 16 ⌈V / 128⌉, and leaves are added ascending.  dW is a chain over the tokens.  No
block shows in a bit of the GPU backends.  On a CPU blocks are the order: 1024 from a leaf's start.

Workspace, at most `WORKSPACE` bytes: dHidden in fp32 (twice in the order ``tree``), and what is
left, at most `BLOCK`, for a block's G.  Where too little is left, dHidden is made in blocks of
tokens, and dW in a second pass over the vocabulary: the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..cpu.ieee import ieee_on
from ..runtime import dispatch, products
from ..runtime.dispatch import Launches
from ..runtime.operands import padded_empty
from ..runtime.plan_cache import Plan, launcher
from ..schedulers.tiles import leaves
from .config import CPU
from .tensors import Head, Rows, Upstream

#: Bytes beyond the gradients, with what tokens have besides (2 MiB); and of a block's G, at least
#: and at most.
WORKSPACE = (1 << 28) - (1 << 21)
BLOCK = 1 << 25, 1 << 27
#: Columns of a block are a multiple of it: whole tiles.
_STEP = 256


class Needs(NamedTuple):
    """Flags of the requested gradients."""

    hidden: bool
    weight: bool
    bias: bool


_HIDDEN = Needs(True, False, False)


def gradients(
    walk: Pass, needs: Needs, main_grad: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dhidden, dweight, dbias), None where not needed; dweight also where main_grad took it."""
    d_hidden, tokens = None, len(walk.hidden)
    if needs.hidden and BLOCK[0] > WORKSPACE - walk.held(needs):
        bytes_of_token = walk.held(_HIDDEN) // tokens
        step = max(16, (WORKSPACE - BLOCK[1]) // bytes_of_token // 16 * 16)
        blocks = [
            walk.slice_tokens(slice(first, first + step)).run(_HIDDEN, None)[0]
            for first in range(0, tokens, step)
        ]
        d_hidden, needs = torch.cat(blocks), needs._replace(hidden=False)
    if any(needs):
        grad_hidden, d_weight, d_bias = walk.run(needs, main_grad)
        return (grad_hidden if d_hidden is None else d_hidden), d_weight, d_bias
    return d_hidden, None, None


class Pass(NamedTuple):
    """One walk through the vocabulary.

    upstream: None until it is known.
    sums: fp32 [T', V'] or None: kept logits of the first T' tokens, before bias and softcap.
    """

    launches: Launches
    hidden: torch.Tensor
    head: Head
    rows: Rows
    upstream: Upstream | None = None
    sums: torch.Tensor | None = None

    def held(self, needs: Needs) -> int:
        """Bytes of workspace besides G."""
        sums = torch.float32.itemsize * (1 + (self.head.order == "tree")) * needs.hidden
        copy = self.hidden.itemsize * (needs.weight and not needs.hidden)
        return self.hidden.numel() * (sums + copy)

    def slice_tokens(self, chunk: slice) -> Pass:
        """Restrict to a chunk of the tokens: dHidden is row by row."""
        rows = Rows(*(t[chunk] for t in self.rows))
        upstream = self.upstream
        if upstream is not None:
            upstream = Upstream(*(None if t is None else t[chunk] for t in upstream))
        sums = None if self.sums is None else self.sums[chunk]
        return Pass(self.launches, self.hidden[chunk], self.head, rows, upstream, sums)

    def run(self, needs: Needs, main_grad: torch.Tensor | None):
        """(dhidden, dweight, dbias), as `gradients`, in one walk."""
        hidden, head = self.hidden, self.head
        product = functools.partial(products.product, launch=self.launches)
        masked = (self.rows.target < 0)[:, None]
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        # What a masked token holds, NaN as it may be, must not meet its zeros in dW.  The memory is
        # dHidden's, which is written last.
        seen = d_hidden.copy_(hidden).masked_fill_(masked, 0.0) if needs.weight else None
        d_weight = d_bias = total = None
        if needs.weight and main_grad is None:
            d_weight = torch.empty_like(head.weight, memory_format=torch.contiguous_format)
        if needs.bias:
            d_bias = torch.empty_like(head.bias)
        # Padding of the vocabulary is not read: 0 times what it holds may be NaN.
        for destination in (d_weight, d_bias):
            if destination is not None:
                destination[head.entries :] = 0
        for leaf in leaf_slices(head.entries, head.vocab, head.order):
            part = hidden.new_zeros(hidden.shape, dtype=torch.float32) if needs.hidden else None
            for block in self.blocks(leaf, needs):
                gradient = self.of_logits(block)
                if needs.hidden:
                    self.add_hidden(part, gradient, head.weight[block])
                if needs.weight and main_grad is not None:
                    product(gradient.mT, seen.mT, accumulator=main_grad[block])
                elif needs.weight:
                    product(gradient.mT, seen.mT, out=d_weight[block])
                if needs.bias:
                    d_bias[block] = products.column_sum(gradient, self.launches)
                # Before the next one is made.
                del gradient
            total = part if total is None else _added(total, part)
        if not needs.hidden:
            return None, d_weight, d_bias
        if total is None:  # of padding alone
            return d_hidden.zero_(), d_weight, d_bias
        # Zeros times a weight that is not finite are NaN.
        return d_hidden.copy_(total.masked_fill_(masked, 0.0)), d_weight, d_bias

    def leaf_by_leaf(self) -> Iterator[torch.Tensor]:
        """The leaves of dHidden, one after the other: fp32 [T, D] each."""
        head = self.head
        for leaf in leaf_slices(head.entries, head.vocab, head.order):
            part = self.hidden.new_zeros(self.hidden.shape, dtype=torch.float32)
            for block in self.blocks(leaf, _HIDDEN):
                self.add_hidden(part, self.of_logits(block), head.weight[block])
            yield part

    def of_logits(self, block: slice) -> torch.Tensor:
        """G: [T, V'] in the dtype of hidden."""
        hidden, head = self.hidden, self.head.block(block)
        kept_tokens = 0 if self.sums is None else len(self.sums)
        if not kept_tokens:
            operands = hidden, head, self.rows, self.upstream
            return self.launches("logp_gradients", hidden, *operands)
        out = padded_empty(hidden, len(hidden), len(head.weight))
        first = self.slice_tokens(slice(0, kept_tokens))
        operands = first.sums[:, block], head, first.rows, first.upstream, out[:kept_tokens]
        self.launches("logp_gradients_kept", hidden, *operands)
        others = self.slice_tokens(slice(kept_tokens, None))
        if len(others.hidden):
            operands = others.hidden, head, others.rows, others.upstream, out[kept_tokens:]
            self.launches("logp_gradients", hidden, *operands)
        return out

    def add_hidden(self, total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor):
        """total += G W', on this backend."""
        self.launches("logp_add_hidden", self.hidden, total, gradient, weight)

    def blocks(self, leaf: slice, needs: Needs) -> Iterator[slice]:
        """A leaf's blocks, ascending."""
        step = CPU.columns
        if self.hidden.device.type != "cpu":
            space = min(BLOCK[1], max(BLOCK[0], WORKSPACE - self.held(needs)))
            bytes_of_column = len(self.hidden) * self.hidden.itemsize
            step = max(_STEP, space // bytes_of_column // _STEP * _STEP)
        for first in range(leaf.start, leaf.stop, step):
            yield slice(first, min(first + step, leaf.stop))


def _added(total: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor | None:
    if part is None:
        return None
    with ieee_on(total):
        return total.add_(part)


def leaf_slices(entries: int, vocab: int, order: str) -> list[slice]:
    """A head's entries of the vocabulary by leaves of all of it; one leaf in a chain.

    A rank's entries begin at a leaf wherever its dHidden is asked for.
    """
    length = max(1, entries) if order == "chain" else leaves.length(vocab)
    return [slice(first, min(first + length, entries)) for first in range(0, entries, length)]


def plan_add_hidden(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> Plan:
    """Plan of total [T, D] fp32 += gradient [T, V'] · weight [V', D], the chain going on."""

    def operands(total, gradient, weight):
        return gradient, weight.mT, None, total, "chain", None

    of_product = operands(total, gradient, weight)
    run = dispatch.plan("gemm", gradient.device, gradient.dtype, *of_product).run
    return Plan(lambda *args: run(*operands(*args)))


add_hidden = launcher(plan_add_hidden)
