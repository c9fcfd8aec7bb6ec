"""Table of torch's own ops whose bits depend on the rest of the batch, and where.

Sources: ATen's kernels as of torch 2.13, and the threads that docs/model.md names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Known(NamedTuple):
    """Facts about an op.

    text: in words.  where: the types of device on which bits follow the batch, or may.
    """

    text: str
    where: tuple[str, ...] = ("cpu", "cuda")


_SUMS = Known("a sum along a row: CUDA adds with 512 to 32 lanes a row, by the number of rows")
_PRODUCT = Known("a product: cuBLAS and the CPU's BLAS choose kernel and split by the rows")
_SOFTMAX = Known("softmax: on CUDA the path depends on 16-byte alignment; on a CPU on vector tails")
_ATOMICS = Known("atomic additions on CUDA, in the order of arrival", ("cuda",))
_CONVOLUTION = Known("a convolution: cuDNN and oneDNN choose algorithms by the shape of the batch")
ATTENTION = Known("torch's attention: splits of the keys follow the shape of the batch")
_ELEMENTS = Known(
    "an elementwise function: on a CPU vectors and their scalar tail round differently", ("cpu",)
)
_BATCH = Known("statistics over the batch, or over several rows")
_RECURRENT = Known("products and gates of cuDNN or oneDNN, chosen by the shape of the batch")
LOSS = Known("the loss by torch: log-probabilities from logits, and their sum over the batch")

#: Names that a forward may call -> facts.
NAMES: dict[str, Known] = {
    **dict.fromkeys(("mean", "sum", "var", "std", "var_mean", "norm", "vector_norm"), _SUMS),
    **dict.fromkeys(("logsumexp", "normalize", "cosine_similarity", "prod", "nansum"), _SUMS),
    **dict.fromkeys(("layer_norm", "rms_norm"), _SUMS),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), Known("a scan, cut by the shape")),
    **dict.fromkeys(("matmul", "bmm", "mm", "addmm", "baddbmm", "addbmm", "mv"), _PRODUCT),
    **dict.fromkeys(("einsum", "linear", "tensordot", "bilinear", "dot", "outer"), _PRODUCT),
    **dict.fromkeys(("softmax", "log_softmax", "gumbel_softmax"), _SOFTMAX),
    **dict.fromkeys(("cross_entropy", "nll_loss", "kl_div", "mse_loss", "loss_function"), LOSS),
    **dict.fromkeys(("scaled_dot_product_attention", "flex_attention"), ATTENTION),
    **dict.fromkeys(("multi_head_attention_forward",), ATTENTION),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_"), _ATOMICS),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "bincount", "index_reduce"), _ATOMICS),
    **dict.fromkeys(("index_put_", "put_", "embedding", "embedding_bag"), _ATOMICS),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d"), _CONVOLUTION),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "interpolate"), _SUMS),
    **dict.fromkeys(("group_norm", "batch_norm", "instance_norm"), _BATCH),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "log2", "tanh"), _ELEMENTS),
    **dict.fromkeys(("sigmoid", "silu", "gelu", "mish", "softplus", "logsigmoid"), _ELEMENTS),
    **dict.fromkeys(("sin", "cos", "erf", "elu", "selu", "celu", "glu"), _ELEMENTS),
}
#: Functions that draw numbers by the place in the batch.
DRAWS: dict[str, Known] = dict.fromkeys(
    ("uniform_", "exponential_", "normal_", "bernoulli_", "rand_like", "randn_like", "multinomial"),
    Known("random numbers by the place in the batch"),
)

#: Modules of torch that are left -> facts.  The first match counts.
MODULES: tuple[tuple[tuple[type, ...], Known], ...] = (
    ((nn.MultiheadAttention,), ATTENTION),
    ((nn.TransformerEncoderLayer, nn.TransformerEncoder), ATTENTION),
    ((nn.modules.conv._ConvNd,), _CONVOLUTION),
    ((nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm), _BATCH),
    ((nn.RNNBase, nn.RNNCellBase), _RECURRENT),
    ((nn.Bilinear,), _PRODUCT),
    ((nn.EmbeddingBag,), _ATOMICS),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d), _SOFTMAX),
    ((nn.AdaptiveLogSoftmaxWithLoss, nn.modules.loss._Loss), LOSS),
    ((nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _SUMS),
    ((nn.CosineSimilarity, nn.PairwiseDistance), _SUMS),
    (
        (nn.Mish, nn.Softplus, nn.LogSigmoid, nn.ELU, nn.SELU, nn.CELU, nn.GLU),
        _ELEMENTS,
    ),
)


def of_module(module: nn.Module) -> Known | None:
    """Return the facts about one of torch's own modules, or None."""
    return next((facts for types, facts in MODULES if isinstance(module, types)), None)


def applies(facts: Known, devices: set[str]) -> bool:
    """Whether bits follow the batch on one of these types of device; all, where none is known."""
    return bool(set(facts.where) & devices) or not devices & {"cpu", "cuda"}


def devices_of(model: nn.Module) -> set[str]:
    """Return the types of device that a model's tensors are on."""
    tensors = [*model.parameters(), *model.buffers()]
    return {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
