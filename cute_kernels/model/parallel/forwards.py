"""Forwards of modules that are cut over ranks; each has the bytes of one rank.

column          y = x Wᵀ + b    a rank has rows of W, and gets columns of y
column_gather   y = x Wᵀ + b    and every rank gets all of y
row             y = x Wᵀ + b    a rank has columns of W, and those of x
row_split       y = x Wᵀ + b    of all of x
head            logits, whole; with targets log softmax(logits)[target]
embedding       W[ids]          a rank has some entries
head_norm       RMS norm of each head: a rank has some heads, and all of the weight
experts         f(x Gᵀ) (x Uᵀ) Dᵀ of each row's expert: a rank has rows of G and U, columns of D
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ...integrations import grouped_tensor_parallel, tensor_parallel
from ...integrations.experts import Linears
from ...integrations.sharded_head import Scoring
from ...logp import api as logp
from ...norm import api as norm
from ...norm import checks as norm_checks
from ...norm import op as norm_op
from ...norm.config import RMS
from ...runtime import main_grad as destination
from ...runtime.dynamo import untraced
from ...runtime.torch_ops import refuse_double
from ..patch import state
from ..patch.report import CUT
from . import checks, exchange
from .exchange import local


def _cut(module: torch.nn.Module):
    return vars(module)[CUT]


def _group(module: torch.nn.Module) -> dist.ProcessGroup:
    """Group of the ranks that have parts of a module; each forward asks for it first."""
    checks.not_compiled(module)
    return _cut(module).mesh.get_group()


def _main_grad(
    module: torch.nn.Module, x: torch.Tensor, name: str = "weight"
) -> torch.Tensor | None:
    """This rank's part of the weight's ``main_grad``, or None."""
    weight = getattr(module, name)
    into = state.main_grad_of(module, weight)
    if isinstance(weight, torch.nn.Parameter):
        # Here, as the op gets a part of the parameter.
        destination.check_values(x, weight, None, into)
    return None if into is None else local(into)


# ---- products -----------------------------------------------------------------------------------


def _same(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x


def _product(function: Callable, before: Callable = _same, after: Callable = _same) -> Callable:
    """Forward of a linear: a product of parts, with exchanges of rows before or after it."""

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = _group(self)
        x = before(input, group)
        options = {"mesh": group, "main_grad": _main_grad(self, x), "verify": False}
        y = function(x, local(self.weight), local(self.bias), **options)
        return after(exchange.unchanged(y, self.weight), group)

    return forward


_column_gather = _product(tensor_parallel.column_parallel_linear, after=exchange.gather)


@untraced
def _head(
    self,
    input: torch.Tensor,
    target: torch.Tensor | None = None,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    return _column_gather(self, input) if target is None else scores(self, input, target, scoring)


def scores(
    head: torch.nn.Module, hidden: torch.Tensor, target: torch.Tensor, scoring: Scoring
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``ck.linear_logp`` of a head that is cut by the vocabulary, or that every rank has whole."""
    checks.not_compiled(head)
    weight, cut = local(head.weight), vars(head).get(CUT)
    options = dict(vars(scoring))
    if hasattr(head, state.NOTES):
        options["main_grad"] = _main_grad(head, hidden)
    if cut is not None:
        group = cut.mesh.get_group()
        options["group"], options["vocab_start"] = group, group.rank() * weight.shape[0]
        options["vocab_size"] = scoring.vocab_size or cut.size
    results = logp.linear_logp(hidden, weight, target, local(head.bias), **options)
    return results if cut is None else exchange.unchanged(results, head.weight)


# ---- experts ------------------------------------------------------------------------------------


def _experts(module: torch.nn.Module) -> Linears:
    """Products of experts that are cut; every rank has the same rows, and routes them alike."""
    options = {"mesh": _group(module), "verify": False}

    @untraced
    def up(rows, weight, offsets, bias):
        product = grouped_tensor_parallel.column_parallel_grouped_linear
        return product(rows, weight, offsets, bias, **options)

    @untraced
    def down(rows, weight, offsets, bias):
        product = grouped_tensor_parallel.row_parallel_grouped_linear
        y = product(rows, weight, offsets, bias, **options)
        for parameter in module._parameters.values():
            y = exchange.unchanged(y, parameter)
        return y

    return Linears(up, down, local, halves=True)


# ---- look-ups -----------------------------------------------------------------------------------


@untraced
def _embedding(self, input: torch.Tensor) -> torch.Tensor:
    group, into, weight = _group(self), _main_grad(self, input), local(self.weight)
    state.unchanged(self, self._cute_kernels.reads)
    padding = checks.lookup(input, weight, _cut(self).size, self.padding_idx, into)
    checks.same_input(input, group)
    return exchange.embedding(input, weight, padding, into, group)


# ---- norms of each head -------------------------------------------------------------------------


@untraced
def _head_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    # y = x / √(mean(x²) + eps) · (w + offset)
    checks.not_compiled(self)
    cut, options = _cut(self), self._cute_kernels
    weight, eps = local(getattr(self, options.weight)), state.eps_of(self)
    into = _main_grad(self, hidden_states, options.weight)
    if cut.mesh.size() == 1 or not (torch.is_grad_enabled() and weight.requires_grad):
        return norm.rms_norm(hidden_states, weight, eps, offset=options.offset, main_grad=into)
    checks.heads(hidden_states, cut)
    operands = norm_checks.Operands(hidden_states, None, weight, None, into)
    rule = norm_checks.norm(operands, RMS, eps, options.offset)
    return _HeadNorm.apply(hidden_states, weight, into, rule, cut)


class _HeadNorm(torch.autograd.Function):
    """RMS norm of some heads, whose dweight sums over the rows of all heads in their order."""

    @staticmethod
    def forward(ctx, x, weight, main_grad, rule, cut):
        y, _, _, rstd = norm_op.norm(x, None, weight, None, main_grad, None, *rule)
        ctx.save_for_backward(x, weight, rstd)
        ctx.rule, ctx.cut = rule, cut
        # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
        ctx.main_grad = main_grad
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_double("head_norm")
        x, weight, rstd = ctx.saved_tensors
        dim, group = ctx.cut.dim, ctx.cut.mesh.get_group()
        # The rows of all heads, as one rank has them: dweight is one sum, dx is row by row.
        rstd = exchange.joined(rstd.view(x.shape[:-1]), dim, group).reshape(-1)
        dy, x = (exchange.joined(t, dim, group) for t in (dy, x))
        target = destination.targets(ctx, (x, weight), {1: ctx.main_grad}, (dy,))[1]
        needs = [ctx.needs_input_grad[0], target.wanted, False]
        saved = dy, None, x, None, rstd, weight, None
        d_x, d_weight, _ = norm_op.norm_backward(*saved, target.into, None, *ctx.rule, needs)
        target.written()
        d_x = exchange.part_of(d_x, dim, group) if needs[0] else None
        return d_x, d_weight if target.returned else None, None, None, None


#: Name -> forward.
FORWARDS = {
    "column": _product(tensor_parallel.column_parallel_linear),
    "column_gather": _column_gather,
    "row": _product(tensor_parallel.row_parallel_linear),
    "row_split": _product(tensor_parallel.row_parallel_linear, before=exchange.split),
    "head_parallel": _head,
    "embedding_parallel": _embedding,
    "head_norm": _head_norm,
    "experts_parallel": _experts,
}
