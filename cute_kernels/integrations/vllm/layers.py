"""vLLM's layers on our ops, in the steps of a patched transformers model.

Linears, the embedding, the LM head with its logits, norms, and gated activations.  Logits are fp32:
the sums of `ck.linear` before they are rounded, as `ck.linear_logp` makes them in the trainer.
A layer's ``cute_kernels_part`` is what a contract says of it.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.activation import GeluAndMul, ReLUSquaredActivation, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ...errors import PatchError, expected
from ...gemm import api as gemm
from ...norm import api as norm
from ...rowwise import api as rowwise
from ...rowwise.op import gated_rows
from .. import contract_exchange as exchange
from ..engine_layers import fp32_logits, require
from ..tensor_parallel import row_parallel_linear
from . import ranks, releases

_LINEARS = (
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.ReplicatedLinear,
)
Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


# ---- linears ------------------------------------------------------------------------------------


class LinearMethod(linear.UnquantizedLinearMethod):
    """y = x Wᵀ + b by `ck.linear`, from the weight as it was loaded."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weight as it is: vLLM repacks it on a CPU."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply; rows of fused linears (QKV, gate and up) are those of separate ones."""
        return gemm.linear(x, layer.weight, bias, order=self.order)


def replace_method(layer: torch.nn.Module, method: object, unquantized: type) -> None:
    """Give a layer our method in the place of vLLM's unquantized one."""
    method_type = type(layer.quant_method)
    if method_type is not unquantized:
        want = f"unquantized weights ({unquantized.__name__})"
        raise PatchError(expected("quantization", want, method_type.__name__))
    layer.quant_method = method


class OrderedLayer:
    """A layer whose sums have the order of the engine that is being built."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.cute_kernels_order = ranks.current_order()
        self.replace_method()

    def replace_method(self) -> None:
        """Multiply by `ck.linear`."""
        method = LinearMethod(self.cute_kernels_order)
        replace_method(self, method, linear.UnquantizedLinearMethod)

    @property
    def cute_kernels_part(self) -> exchange.ContractPart:
        return exchange.linear_part(self.cute_kernels_order)


def _linear(base: type) -> type:
    return type(f"Ck{base.__name__}", (OrderedLayer, base), {"__module__": __name__})


class RowLinear(OrderedLayer, linear.RowParallelLinear):
    """RowParallelLinear, whose sum over ranks has the bytes of one rank's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_size > 1:
            require("linear", "reduce_results", self.reduce_results, True)

    def forward(self, input_: torch.Tensor):
        """Multiply this rank's columns, and add the leaves of all ranks in their order."""
        if self.tp_size == 1:
            return super().forward(input_)
        x = input_ if self.input_is_parallel else input_.chunk(self.tp_size, -1)[self.tp_rank]
        bias = None if self.skip_bias_add else self.bias
        y = row_parallel_linear(x, self.weight, bias, mesh=ranks.group(), verify=False)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


# ---- the embedding and the head -----------------------------------------------------------------


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """Look-up by `ck.embedding`; the logits of a head are made by `Logits`."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weight as it is: vLLM repacks it on a CPU."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Rows of the table."""
        return rowwise.embedding(input_, layer.weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse to make logits that are rounded: vLLM's samplers ask the logits processor."""
        raise PatchError(expected("logits", "those of the logits processor", "a call of the head"))


class Embedding(VocabParallelEmbedding):
    """VocabParallelEmbedding on `ck.embedding`."""

    cute_kernels_part = exchange.embedding_part()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        replace_method(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)
        for name, want in (("reduce_results", True), ("parallel_group", None)):
            require("embedding", name, getattr(self, name, want), want)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look rows up, those of other ranks' entries on other ranks."""
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_)
        first = self.shard_indices.org_vocab_start_index
        here = (input_ >= first) & (input_ < self.shard_indices.org_vocab_end_index)
        rows = self.quant_method.embedding(self, torch.where(here, input_ - first, 0))
        return ranks.add_bits(rows.masked_fill_(~here[..., None], 0))


class Head(OrderedLayer, ParallelLMHead):
    """ParallelLMHead, whose weight the logits processor reads."""

    def replace_method(self) -> None:
        """Leave the product to `Logits`."""
        replace_method(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)


class Logits(LogitsProcessor):
    """LogitsProcessor with logits in fp32."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.order = ranks.current_order()
        # No log-prob of such logits was compared with the trainer's.
        require("logits processor", "soft_cap", self.soft_cap)
        require("logits processor", "scale", self.scale, 1.0)

    @property
    def cute_kernels_part(self) -> exchange.ContractPart:
        return exchange.logits_part(self.soft_cap or 0.0, self.scale)

    def _get_logits(self, hidden_states, lm_head, embedding_bias, *_):
        logits = fp32_logits(hidden_states, lm_head.weight, embedding_bias, order=self.order)
        if lm_head.tp_size > 1:
            logits = self._gather_logits(logits)
        return None if logits is None else logits[..., : self.org_vocab_size]


# ---- norms and gated activations ----------------------------------------------------------------


class _RmsNorm:
    """A norm on `ck.rms_norm`; with a residual, (norm(x + residual), x + residual)."""

    #: What is added to the weight.
    offset = 0.0

    @property
    def cute_kernels_part(self) -> exchange.ContractPart:
        return exchange.norm_part("rms_norm", self.variance_epsilon, self.offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """Normalize rows, or heads of rows."""
        weight = self.weight if getattr(self, "has_weight", True) else None
        eps = self.variance_epsilon
        return norm.rms_norm(x, weight, eps, residual=residual, offset=self.offset)


class Norm(_RmsNorm, RMSNorm):
    """RMSNorm over all of a row."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        require("norm", "var_hidden_size", self.variance_size_override)


class GemmaNorm(_RmsNorm, GemmaRMSNorm):
    """GemmaRMSNorm, whose weight counts from 1."""

    offset = 1.0


class Silu(SiluAndMul):
    """SiluAndMul: silu(gate) is rounded, as in the trainer, and then multiplied by up."""

    cute_kernels_part = exchange.activation_part("silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[..., :N]) x[..., N:]."""
        return gated_rows(x, "silu")


class Gelu(GeluAndMul):
    """GeluAndMul: gelu(gate) is rounded, as in the trainer, and then multiplied by up."""

    @property
    def cute_kernels_part(self) -> exchange.ContractPart:
        tanh = self.approximate == "tanh"
        return exchange.activation_part("gelu(approximate='tanh')" if tanh else "gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x[..., :N]) x[..., N:]."""
        return gated_rows(x, "gelu_tanh" if self.approximate == "tanh" else "gelu")


class SquaredRelu(ReLUSquaredActivation):
    """ReLUSquaredActivation: one rounding, of the square."""

    cute_kernels_part = exchange.ContractPart("activation", "ReLUSquaredActivation of transformers")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(x)², in the steps of transformers."""
        return torch.square(torch.relu(x))


def register() -> None:
    """Put these classes in the place of vLLM's."""
    releases.register_layers(
        {base: _linear(base) for base in _LINEARS}
        | {
            linear.RowParallelLinear: RowLinear,
            VocabParallelEmbedding: Embedding,
            ParallelLMHead: Head,
            LogitsProcessor: Logits,
            RMSNorm: Norm,
            GemmaRMSNorm: GemmaNorm,
            SiluAndMul: Silu,
            GeluAndMul: Gelu,
            ReLUSquaredActivation: SquaredRelu,
        }
    )
