"""Forwards that `patch` gives to modules: each calls one op of ours on the module's tensors.

What a forward reads besides parameters and buffers is in the module's notes, which `patch` wrote.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from ....gemm import api as gemm
from ....gemm.config import K_GROUP
from ....integrations.sharded_head import NOTES as NOTES
from ....integrations.sharded_head import Scoring
from ....norm import api as norm
from ....norm import op as norm_op
from ....norm.config import RMS, part_rows
from ....rowwise import api as rowwise
from ....rowwise import op as rowwise_op
from ....rowwise.config import GATES
from .. import checks
from . import attention, base_model, causal, experts, invariant, mlp, positions, rotary
from . import residual as residual_forward
from . import scores as spelled_out
from .causal import head_scores

#: Forwards of modules that are cut over ranks, in ../../parallel/forwards.py -> op in a report.
PARALLEL_PRODUCTS = {
    "column": "column_parallel_linear",
    "column_gather": "column_parallel_linear, gathered",
    "row": "row_parallel_linear",
    "row_split": "row_parallel_linear",
    "head_parallel": "column_parallel_linear, ck.linear_logp(group=)",
}
_PARALLEL = {
    **PARALLEL_PRODUCTS,
    "head_norm": "ck.rms_norm, dweight over the heads of all ranks",
    "embedding_parallel": "ck.embedding, by the vocabulary",
}
#: Forward of experts that are cut over ranks, whose products are there.
EXPERTS_PARALLEL = "experts_parallel"

#: Attribute of a patched class: the name of its forward in `FORWARDS`.
KIND = "_cute_kernels_kind"
#: Forwards that multiply; those of parts are in ../../parallel/forwards.py.
_PRODUCTS = ("linear", "head", "conv1d", *PARALLEL_PRODUCTS)


class Notes(NamedTuple):
    """Options that the forward of one module reads.

    order: of linear products.
    main_grad: whether gradients go to the ``main_grad`` of parameters that have one.
    weight, bias: the names of a norm's parameters; None: it has none.
    eps, offset: of a norm.  eps_name: the attribute that its eps is read from at each call; None:
    it is ``eps``.  reads: (attribute, value) that the author's forward reads and ours does not: a
    call with another value is refused.
    follows: whether a rotary table has the dtype of its input, or fp32.
    softcap: of a causal LM's logits, 0: none.  logp: whether its loss is
    ck.linear_logp's; of a head, whether it can score targets.
    """

    order: str = "chain"
    main_grad: bool = False
    weight: str | None = None
    bias: str | None = None
    eps: float = 0.0
    offset: float = 0.0
    follows: bool = True
    softcap: float = 0.0
    logp: bool = False
    eps_name: str | None = None
    reads: tuple[tuple[str, object], ...] = ()


def main_grad_of(module: torch.nn.Module, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Destination of a parameter's gradient other than its ``grad``, or None."""
    if not (module._cute_kernels.main_grad and torch.is_grad_enabled()):
        return None
    return getattr(parameter, "main_grad", None)


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
    return head_scores(self, input, target, scoring, main_grad_of(self, self.weight))


def _conv1d(self, x: torch.Tensor) -> torch.Tensor:
    # y = x W + b, W [K, N]: transformers' Conv1D
    sums = _sums(self)
    if sums["main_grad"] is not None:
        sums["main_grad"] = sums["main_grad"].mT
    return gemm.linear(x, self.weight.mT, self.bias, **sums)


# ---- norms and activations ----------------------------------------------------------------------


def _parameter(module: torch.nn.Module, name: str | None) -> torch.Tensor | None:
    return None if name is None else getattr(module, name)


def _eps(module: torch.nn.Module) -> float:
    """Return the eps of a norm, which may have changed since the patch."""
    notes = module._cute_kernels
    checks.unchanged(module, notes.reads)
    if notes.eps_name is None:
        return notes.eps
    eps = getattr(module, notes.eps_name)
    return torch.finfo(torch.float32).eps if eps is None else eps  # None: nn.RMSNorm's default


def _rms_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    # y = x / √(mean(x²) + eps) · (w + offset)
    notes = self._cute_kernels
    weight = _parameter(self, notes.weight)
    into = main_grad_of(self, weight)
    return norm.rms_norm(hidden_states, weight, _eps(self), offset=notes.offset, main_grad=into)


def _add_rms_norm(
    module: torch.nn.Module, residual: torch.Tensor, update: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    # (norm(h), h), h = residual + update, in one launch; None: hooks or operands want two steps.
    whole = vars(type(module)).get(KIND) == "rms_norm" and NOTES in vars(module)
    if not (
        whole and residual_forward.is_bare(module) and residual_forward.alike(residual, update)
    ):
        return None
    notes = module._cute_kernels
    weight = _parameter(module, notes.weight)
    operands = update, residual, weight, None, main_grad_of(module, weight), None
    y, h, _, _ = norm_op.norm_in_steps(*operands, RMS, _eps(module), notes.offset)
    return y, h


def _gate_product(
    activation: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor | None:
    # f(gate) · up in one launch; None: another activation, or hooks want to see f(gate).
    kind = vars(type(activation)).get(KIND)
    bare = kind in GATES and NOTES in vars(activation) and residual_forward.is_bare(activation)
    if not bare:
        return None
    checks.unchanged(activation, activation._cute_kernels.reads)
    return rowwise_op.gated(gate, up, kind, True)


def _layer_norm(self, input: torch.Tensor) -> torch.Tensor:
    # y = (x - mean(x)) / √(var(x) + eps) · w + b
    notes = self._cute_kernels
    weight, bias = _parameter(self, notes.weight), _parameter(self, notes.bias)
    into = {"main_grad": main_grad_of(self, weight), "bias_main_grad": main_grad_of(self, bias)}
    return norm.layer_norm(input, weight, bias, _eps(self), **into)


def _silu(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    return rowwise.silu(input)


def _gelu(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    return rowwise.gelu(input)


def _gelu_tanh(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    return rowwise.gelu(input, approximate="tanh")


def _tanh(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    return rowwise.tanh(input)


def _sigmoid(self, input: torch.Tensor) -> torch.Tensor:
    checks.unchanged(self, self._cute_kernels.reads)
    return rowwise.sigmoid(input)


def _quick_gelu(self, input: torch.Tensor) -> torch.Tensor:
    # y = x σ(1.702 x), in the steps of transformers
    checks.unchanged(self, self._cute_kernels.reads)
    return input * rowwise.sigmoid(1.702 * input)


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


def _any_class(forward: Callable) -> Callable[[type], Callable]:
    return lambda cls: forward


def _parallel(kind: str) -> Callable[[type], Callable]:
    """Factory of a forward of a module that is cut over ranks, imported at its first use."""

    return lambda cls: _parallel_forwards()[kind]


def _parallel_forwards() -> dict[str, Callable]:
    # By name, as that module imports this one.
    return importlib.import_module("cute_kernels.model.parallel.forwards").FORWARDS


#: Name -> factory of the forward for a class.
FORWARDS: dict[str, Callable[[type], Callable]] = {
    "linear": _any_class(_linear),
    "head": _any_class(_head),
    "conv1d": _any_class(_conv1d),
    "rms_norm": _any_class(_rms_norm),
    "layer_norm": _any_class(_layer_norm),
    "silu": _any_class(_silu),
    "gelu": _any_class(_gelu),
    "gelu_tanh": _any_class(_gelu_tanh),
    "tanh": _any_class(_tanh),
    "sigmoid": _any_class(_sigmoid),
    "quick_gelu": _any_class(_quick_gelu),
    "embedding": _any_class(_embedding),
    "rotary": _any_class(_rotary),
    "causal_lm": causal.forward_of,
    "base_model": base_model.forward_of,
    "positions": positions.forward_of,
    "attention": attention.forward_of,
    "mlp": lambda cls: mlp.forward_of(cls, _gate_product),
    "experts": lambda cls: experts.forward_of(cls, _gate_product),
    EXPERTS_PARALLEL: lambda cls: experts.forward_of(
        cls, _gate_product, _parallel_forwards()[EXPERTS_PARALLEL]
    ),
    "invariant": invariant.forward_of,
    "scores": spelled_out.forward_of,
    "residual": lambda cls: residual_forward.forward_of(cls, _add_rms_norm),
    **{kind: _parallel(kind) for kind in _PARALLEL},
}
#: Name -> class below the author's in the method resolution order.
STEPS: dict[str, type] = {
    "embedding_step": EmbeddingStep,
    "embedding_step_parallel": ParallelEmbeddingStep,
}

#: Name -> op in a report.
OPS = {
    "linear": "ck.linear",
    "head": "ck.linear, ck.linear_logp",
    "conv1d": "ck.linear",
    "rms_norm": "ck.rms_norm",
    "layer_norm": "ck.layer_norm",
    "silu": "ck.silu",
    "gelu": "ck.gelu",
    "gelu_tanh": "ck.gelu(approximate='tanh')",
    "tanh": "ck.tanh",
    "sigmoid": "ck.sigmoid",
    "quick_gelu": "ck.sigmoid",
    "embedding": "ck.embedding",
    "embedding_step": "ck.embedding",
    "rotary": "ck.rotary_table",
    "positions": "ck.embedding for each sequence, where gradients go to main_grad",
    "attention": "ck.apply_rotary_pos_emb",
    "mlp": "the activation and its product in one launch",
    "experts": "ck.moe.permute, ck.grouped_linear, ck.moe.combine",
    EXPERTS_PARALLEL: "ck.moe.permute, column_ and row_parallel_grouped_linear, ck.moe.combine",
    "residual": "ck.rms_norm(residual=)",
    "base_model": "no mask where nothing is padded or packed",
    "invariant": "its author's forward in ck.batch_invariant",
    "scores": "its author's forward, softmax(q kᵀ) v by ck.block_sparse_attention",
    "causal_lm": "ck.tanh, and in the loss ck.linear_logp(softcap=)",
    **_PARALLEL,
    "embedding_step_parallel": _PARALLEL["embedding_parallel"],
}
