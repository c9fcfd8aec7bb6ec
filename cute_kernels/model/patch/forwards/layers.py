"""Forwards that `patch` gives to modules: each calls one op of ours on the module's tensors.

What a forward reads besides parameters and buffers is in the module's notes, which `patch` wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ....gemm import api as gemm
from ....gemm.config import K_GROUP
from ....integrations.sharded_head import Scoring
from ....norm import api as norm
from ....norm.config import part_rows
from ....rowwise import api as rowwise
from .. import checks
from . import attention, base_model, causal, experts, fused, modes, positions, rotary
from .notes import eps_of, main_grad_of, parameter_of

#: Forwards that multiply and are cut over ranks, in ../../parallel/forwards.py -> op in a report.
PARALLEL_PRODUCTS = {
    "column": "column_parallel_linear",
    "column_gather": "column_parallel_linear, gathered",
    "row": "row_parallel_linear",
    "row_split": "row_parallel_linear",
    "head_parallel": "column_parallel_linear, ck.linear_logp(group=)",
}
#: Forward of experts that are cut over ranks, whose products are there.
EXPERTS_PARALLEL = "experts_parallel"
_PRODUCTS = ("linear", "head", "conv1d", *PARALLEL_PRODUCTS)


def main_grad_parameters(module: torch.nn.Module, kind: str) -> list[torch.Tensor]:
    """Return the parameters whose gradients a forward can add to a ``main_grad``."""
    if kind in ("invariant", "experts", EXPERTS_PARALLEL, "scores"):
        return []
    names = {"layer_norm": ("weight", "bias")}.get(kind, ("weight",))
    parameters = list(module._parameters.values()) if "norm" in kind else []
    parameters = parameters or [module._parameters.get(name) for name in names]
    return [p for p in parameters if p is not None]


def granularity(module: torch.nn.Module, kind: str) -> int:
    """Token count at whose multiples micro-batches may be cut, by this module."""
    if "norm" in kind:
        # A token has one row, or one for each head.
        return max((part_rows(p.numel()) for p in module.parameters(recurse=False)), default=1)
    return K_GROUP if kind in _PRODUCTS else 1


# ---- products -----------------------------------------------------------------------------------


def _sums(module: torch.nn.Module) -> dict[str, object]:
    """Options of ck.linear: order and main_grad."""
    into = main_grad_of(module, module.weight)
    return {"order": module._cute_kernels.order, "main_grad": into}


def _linear(self, input: torch.Tensor) -> torch.Tensor:
    # y = x Wᵀ + b
    return gemm.linear(input, self.weight, self.bias, **_sums(self))


def _head(
    self,
    input: torch.Tensor,
    target: torch.Tensor | None = None,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    # As _linear; with a target, log softmax(x Wᵀ + b)[target] without the logits.
    if target is None:
        return gemm.linear(input, self.weight, self.bias, **_sums(self))
    return causal.head_scores(self, input, target, scoring, main_grad_of(self, self.weight))


def _conv1d(self, x: torch.Tensor) -> torch.Tensor:
    # y = x W + b, W [K, N]: transformers' Conv1D
    sums = _sums(self)
    if sums["main_grad"] is not None:
        sums["main_grad"] = sums["main_grad"].mT
    return gemm.linear(x, self.weight.mT, self.bias, **sums)


# ---- norms and activations ----------------------------------------------------------------------


def _rms_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    # y = x / √(mean(x²) + eps) · (w + offset)
    notes = self._cute_kernels
    weight = parameter_of(self, notes.weight)
    into = main_grad_of(self, weight)
    return norm.rms_norm(hidden_states, weight, eps_of(self), offset=notes.offset, main_grad=into)


def _layer_norm(self, input: torch.Tensor) -> torch.Tensor:
    # y = (x - mean(x)) / √(var(x) + eps) · w + b
    notes = self._cute_kernels
    weight, bias = parameter_of(self, notes.weight), parameter_of(self, notes.bias)
    into = {"main_grad": main_grad_of(self, weight), "bias_main_grad": main_grad_of(self, bias)}
    return norm.layer_norm(input, weight, bias, eps_of(self), **into)


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Return a forward that computes a function of each element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        checks.unchanged(self, self._cute_kernels.reads)
        return function(input)

    return forward


# ---- look-ups -----------------------------------------------------------------------------------


def _embedding(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    into = main_grad_of(self, self.weight)
    return rowwise.embedding(input, self.weight, padding_idx=self.padding_idx, main_grad=into)


class EmbeddingStep(torch.nn.Embedding):
    """Look-up below a subclass's own forward (Gemma's, which scales what it gets)."""

    forward = _embedding


class ParallelEmbeddingStep(torch.nn.Embedding):
    """`EmbeddingStep` of a table whose entries are cut over ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up rows of all ranks."""
        return _parallel_forwards()["embedding_parallel"](self, input)


@torch.no_grad()
def _rotary(
    self,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # cos and sin of position · frequency, times the scaling of the table
    checks.unchanged(self, self._cute_kernels.reads)
    prefix = "" if layer_type is None else f"{layer_type}_"
    name = f"{prefix}inv_freq"
    of_another_dtype = getattr(self, name).dtype != torch.float32
    if of_another_dtype or not (torch.compiler.is_compiling() or rotary.is_checked(self, name)):
        # After the patch, ``model.to(dtype)`` may have rounded them.
        rotary.restore_frequencies(self)
    frequencies = getattr(self, name).to(x.device)
    scaling = getattr(self, f"{prefix}attention_scaling", 1.0)
    dtype = x.dtype if self._cute_kernels.follows else torch.float32
    return rowwise.rotary_table(position_ids, frequencies, scaling, dtype)


# ---- all of them ---------------------------------------------------------------------------------


class Forward(NamedTuple):
    """A forward of ours.

    by: what computes, in a report.  forward: for modules of any class.  of: a factory of the
    forward for a class.  step: a class below the author's in the method resolution order instead.
    """

    by: str
    forward: Callable | None = None
    of: Callable[[type], Callable] | None = None
    step: type | None = None


def _parallel_forwards() -> dict[str, Callable]:
    # At the first use: models that are not cut need none of it.
    from ...parallel import forwards

    return forwards.FORWARDS


def _parallel(kind: str, by: str) -> Forward:
    return Forward(by, of=lambda cls: _parallel_forwards()[kind])


_BY_VOCABULARY = "ck.embedding, by the vocabulary"

#: Name of a forward -> the forward.
FORWARDS: dict[str, Forward] = {
    "linear": Forward("ck.linear", _linear),
    "head": Forward("ck.linear, ck.linear_logp", _head),
    "conv1d": Forward("ck.linear", _conv1d),
    "rms_norm": Forward("ck.rms_norm", _rms_norm),
    "layer_norm": Forward("ck.layer_norm", _layer_norm),
    "silu": Forward("ck.silu", _activation(rowwise.silu)),
    "gelu": Forward("ck.gelu", _activation(rowwise.gelu)),
    "gelu_tanh": Forward(
        "ck.gelu(approximate='tanh')",
        _activation(functools.partial(rowwise.gelu, approximate="tanh")),
    ),
    "tanh": Forward("ck.tanh", _activation(rowwise.tanh)),
    "sigmoid": Forward("ck.sigmoid", _activation(rowwise.sigmoid)),
    # x σ(1.702 x), in the steps of transformers
    "quick_gelu": Forward(
        "ck.sigmoid", _activation(lambda input: input * rowwise.sigmoid(1.702 * input))
    ),
    "embedding": Forward("ck.embedding", _embedding),
    "embedding_step": Forward("ck.embedding", step=EmbeddingStep),
    "rotary": Forward("ck.rotary_table", _rotary),
    "positions": Forward(
        "ck.embedding for each sequence, where gradients go to main_grad", of=positions.forward_of
    ),
    "attention": Forward("ck.apply_rotary_pos_emb", of=attention.forward_of),
    "mlp": Forward("the activation and its product in one launch", of=fused.gated),
    "residual": Forward("ck.rms_norm(residual=)", of=fused.pre_norm),
    "experts": Forward("ck.moe.permute, ck.grouped_linear, ck.moe.combine", of=experts.forward_of),
    "base_model": Forward("no mask where nothing is padded or packed", of=base_model.forward_of),
    "invariant": Forward("its author's forward in ck.batch_invariant", of=modes.invariant),
    "scores": Forward(
        "its author's forward, softmax(q kᵀ) v by ck.block_sparse_attention", of=modes.attending
    ),
    "causal_lm": Forward("ck.tanh, and in the loss ck.linear_logp(softcap=)", of=causal.forward_of),
    **{kind: _parallel(kind, by) for kind, by in PARALLEL_PRODUCTS.items()},
    "head_norm": _parallel("head_norm", "ck.rms_norm, dweight over the heads of all ranks"),
    "embedding_parallel": _parallel("embedding_parallel", _BY_VOCABULARY),
    "embedding_step_parallel": Forward(_BY_VOCABULARY, step=ParallelEmbeddingStep),
    EXPERTS_PARALLEL: Forward(
        "ck.moe.permute, column_ and row_parallel_grouped_linear, ck.moe.combine",
        of=lambda cls: experts.forward_of(cls, _parallel_forwards()[EXPERTS_PARALLEL]),
    ),
}
