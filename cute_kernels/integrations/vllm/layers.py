"""vLLM's linears and embedding on `ck.linear` and `ck.embedding`."""

from __future__ import annotations

import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ...errors import PatchError, expected
from ...gemm import api as gemm
from ...rowwise import api as rowwise
from ..tensor_parallel import row_parallel_linear
from . import ranks, releases

_LINEARS = (
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.ReplicatedLinear,
)


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


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """Look-up by `ck.embedding`; the logits of a head are made by `head.Logits`."""

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


def exchange(layer: torch.nn.Module, method: object, unquantized: type) -> None:
    """Give a layer our method in the place of vLLM's unquantized one."""
    method_type = type(layer.quant_method)
    if method_type is not unquantized:
        want = f"unquantized weights ({unquantized.__name__})"
        raise PatchError(expected("quantization", want, method_type.__name__))
    layer.quant_method = method


def _linear(base: type) -> type:
    class Linear(base):
        __doc__ = f"{base.__name__} on `ck.linear`."

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.cute_kernels_order = ranks.current_order()
            method = LinearMethod(self.cute_kernels_order)
            exchange(self, method, linear.UnquantizedLinearMethod)

    Linear.__name__ = Linear.__qualname__ = f"Ck{base.__name__}"
    return Linear


class RowLinear(_linear(linear.RowParallelLinear)):
    """RowParallelLinear, whose sum over ranks has the bytes of one rank's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_size > 1 and not self.reduce_results:
            raise PatchError(expected("reduce_results", "True", False))

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


class Embedding(VocabParallelEmbedding):
    """VocabParallelEmbedding on `ck.embedding`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exchange(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)
        for name, value in (("reduce_results", True), ("parallel_group", None)):
            if getattr(self, name, value) is not value:
                raise PatchError(expected(f"embedding: {name}", value, getattr(self, name)))

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look rows up, those of other ranks' entries on other ranks."""
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_)
        first = self.shard_indices.org_vocab_start_index
        here = (input_ >= first) & (input_ < self.shard_indices.org_vocab_end_index)
        rows = self.quant_method.embedding(self, torch.where(here, input_ - first, 0))
        return ranks.add_bits(rows.masked_fill_(~here[..., None], 0))


def register() -> None:
    """Put these classes in the place of vLLM's."""
    for base in _LINEARS:
        releases.register_layer(base, _linear(base), base.__name__)
    releases.register_layer(linear.RowParallelLinear, RowLinear, linear.RowParallelLinear.__name__)
    releases.register_layer(VocabParallelEmbedding, Embedding, VocabParallelEmbedding.__name__)
