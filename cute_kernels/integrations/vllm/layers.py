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
from . import releases

_LINEARS = (
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.ReplicatedLinear,
    linear.RowParallelLinear,
)


class LinearMethod(linear.UnquantizedLinearMethod):
    """y = x Wᵀ + b by `ck.linear`, from the weight as it was loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weight as it is: vLLM repacks it on a CPU."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply; rows of fused linears (QKV, gate and up) are those of separate ones."""
        return gemm.linear(x, layer.weight, bias)


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
        """Logits rounded to the model's dtype, for callers other than the logits processor."""
        return gemm.linear(x, layer.weight, bias)


def exchange(layer: torch.nn.Module, method: object, unquantized: type) -> None:
    """Give a layer our method in the place of vLLM's unquantized one."""
    found = type(layer.quant_method)
    if found is not unquantized:
        want = f"unquantized weights ({unquantized.__name__})"
        raise PatchError(expected("quantization", want, found.__name__))
    layer.quant_method = method


def _linear(base: type) -> type:
    class Linear(base):
        __doc__ = f"{base.__name__} on `ck.linear`."

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            exchange(self, LinearMethod(), linear.UnquantizedLinearMethod)

    Linear.__name__ = Linear.__qualname__ = f"Ck{base.__name__}"
    return Linear


class Embedding(VocabParallelEmbedding):
    """VocabParallelEmbedding on `ck.embedding`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exchange(self, EmbeddingMethod(), UnquantizedEmbeddingMethod)


def register() -> None:
    """Put these classes in the place of vLLM's."""
    for base in _LINEARS:
        releases.register_layer(base, _linear(base), base.__name__)
    releases.register_layer(VocabParallelEmbedding, Embedding, VocabParallelEmbedding.__name__)
