"""The ops of aten that ``batch_invariant(strict=True)`` refuses: why, what instead, who says so.

docs/batch_invariant.md shows this table.  A row holds for every overload of its ops, in-place and
``out=`` variants among them, for tensors of floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Refused(NamedTuple):
    """Ops with one reason.

    Attributes:
        ops: Names in aten, of all overloads or of one.
        devices: The device types on which it is known.
        why: What their bits follow.
        instead: What to do about it.
        source: Who says so.
        when: With the call's arguments by name: whether this call is one; None: each is.
    """

    ops: tuple[str, ...]
    devices: tuple[str, ...]
    why: str
    instead: str
    source: str
    when: Callable[[Mapping[str, object]], bool] | None = None


_GPU, _CPU, _BOTH = ("cuda",), ("cpu",), ("cpu", "cuda")

_DOCS = "torch.use_deterministic_algorithms"
_NUMERICS = "torch's docs, Numerical accuracy: batched computations"
_CONVOLUTION = "torch's docs, Reproducibility: CUDA convolution benchmarking"
_REDUCE = "ATen/native/cuda/Reduce.cuh, setReduceConfig"
_CDIST = "torch.cdist, compute_mode"
_SEEN = "seen on a CPU: tests/model/batch_invariant/test_refused.py"

_ATOMICS = "adds in the order in which threads arrive"
_LANES = "the number of results decides how many threads share one"
_BLAS = "a product whose algorithm follows its sizes, of a library that is not asked"
_TRANSPOSED = "strides decide whether a matrix or its transpose is factorised"
_DRAWN = "numbers are drawn for places in the batch"
_ELEMENTS = "elements behind the last whole vector register are rounded otherwise"

_SORTED = "sort, and add in an order of your own, or keep it out of what must not change"
_ROWS = "use the covered sum or mean, or ck.layer_norm and ck.rms_norm"
_PRODUCTS = "use a covered product (linear, mm, bmm)"
_OUTSIDE = "call it outside the context, if its bits may follow the batch"
_EVAL = "put the module into eval mode"


def _accumulates(arguments: Mapping[str, object]) -> bool:
    return bool(arguments.get("accumulate", False))


def _trains(arguments: Mapping[str, object]) -> bool:
    return bool(arguments.get("training", True))


def _weighs(arguments: Mapping[str, object]) -> bool:
    return arguments.get("weights") is not None


def _is_general_power(arguments: Mapping[str, object]) -> bool:
    """Whether a power is not made of products, which are rounded alike anywhere."""
    return arguments.get("exponent") not in (-2, -1, 0, 1, 2, 3)


def _is_half(arguments: Mapping[str, object]) -> bool:
    return arguments["self"].element_size() == 2


def _is_single(arguments: Mapping[str, object]) -> bool:
    tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
    return any(t.dtype == torch.float32 for t in tensors)


def _is_scattered(arguments: Mapping[str, object]) -> bool:
    """Whether a CPU adds in another order than along contiguous rows; on a GPU always."""
    t, dims = arguments["self"], arguments.get("dim")
    if t.device.type != "cpu" or not t.is_contiguous():
        return True
    dims = [dims] if isinstance(dims, int) else list(dims or range(t.dim()))
    return sorted(d % max(1, t.dim()) for d in dims) != list(range(t.dim() - len(dims), t.dim()))


REFUSED = (
    # ---- atomics ----
    Refused(
        ("index_add", "scatter_add", "scatter_reduce"),
        _GPU,
        f"{_ATOMICS} (so do the gradients of index_select, gather and repeat_interleave)",
        _SORTED,
        _DOCS,
    ),
    Refused(
        ("index_put", "_index_put_impl", "_unsafe_index_put", "put"),
        _GPU,
        f"with accumulate=True it {_ATOMICS} (so does the gradient of indexing by tensors)",
        _SORTED,
        f"{_DOCS}; pytorch #88621",
        _accumulates,
    ),
    Refused(("histc",), _GPU, _ATOMICS, _OUTSIDE, _DOCS),
    Refused(("bincount",), _GPU, f"with weights it {_ATOMICS}", _OUTSIDE, _DOCS, _weighs),
    Refused(
        ("grid_sampler_2d_backward", "grid_sampler_3d_backward"), _GPU, _ATOMICS, _OUTSIDE, _DOCS
    ),
    Refused(
        (
            "upsample_linear1d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
            "upsample_trilinear3d_backward",
        ),
        _GPU,
        _ATOMICS,
        "upsample by mode='nearest'",
        _DOCS,
    ),
    Refused(
        (
            "reflection_pad1d_backward",
            "reflection_pad2d_backward",
            "reflection_pad3d_backward",
            "replication_pad1d_backward",
            "replication_pad2d_backward",
            "replication_pad3d_backward",
        ),
        _GPU,
        _ATOMICS,
        "pad with a constant",
        _DOCS,
    ),
    Refused(
        (
            "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward",
            "avg_pool3d_backward",
            "fractional_max_pool2d_backward",
            "fractional_max_pool3d_backward",
            "max_pool3d_with_indices_backward",
            "max_unpool2d",
            "max_unpool3d",
        ),
        _GPU,
        _ATOMICS,
        _OUTSIDE,
        _DOCS,
    ),
    Refused(
        ("nll_loss2d_forward", "_ctc_loss_backward"),
        _GPU,
        _ATOMICS,
        "of an nll_loss flatten to [N, C] first",
        _DOCS,
    ),
    Refused(("_embedding_bag_dense_backward",), _GPU, _ATOMICS, "use embedding and sum", _DOCS),
    Refused(
        ("cumsum",),
        _GPU,
        "blocks of a scan add in the order in which they arrive",
        _OUTSIDE,
        _DOCS,
    ),
    # ---- sums whose order follows the shape ----
    Refused(("var", "std", "var_mean", "std_mean"), _GPU, _LANES, _ROWS, _REDUCE),
    Refused(("logsumexp",), _GPU, _LANES, _ROWS, _REDUCE),
    Refused(
        ("norm", "linalg_vector_norm", "prod", "nansum"),
        _BOTH,
        f"{_LANES}; on a CPU, of rows that are not contiguous, strides decide the order",
        f"{_ROWS}; on a CPU call contiguous() first, and reduce the last dimensions",
        f"{_REDUCE}; {_SEEN}",
        _is_scattered,
    ),
    Refused(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_batch_norm_with_update",
            "cudnn_batch_norm",
            "miopen_batch_norm",
        ),
        _BOTH,
        "in training its statistics are those of the batch",
        _EVAL,
        _SEEN,
        _trains,
    ),
    # ---- products of libraries ----
    Refused(
        ("convolution", "convolution_backward", "_convolution", "mkldnn_convolution"),
        _BOTH,
        _BLAS,
        "write it as unfold and a covered product",
        f"{_CONVOLUTION}; {_SEEN}",
    ),
    Refused(("cdist",), _BOTH, "25 rows decide between two formulas", _PRODUCTS, _CDIST),
    Refused(("mkldnn_rnn_layer",), _CPU, _BLAS, "step through an LSTMCell", _NUMERICS),
    Refused(("_cudnn_rnn",), _GPU, _BLAS, "step through an LSTMCell or GRUCell", _NUMERICS),
    Refused(
        (
            "addbmm",
            "_addmm_activation",
            "_scaled_mm",
            "_grouped_mm",
            "_scaled_grouped_mm",
            "_weight_int8pack_mm",
            "_weight_int4pack_mm",
        ),
        _BOTH,
        _BLAS,
        _PRODUCTS,
        _NUMERICS,
    ),
    Refused(
        ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        _BOTH,
        f"a fused layer: {_BLAS}",
        "torch.backends.mha.set_fastpath_enabled(False)",
        _NUMERICS,
    ),
    Refused(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_flash_attention_forward",
            "_flash_attention_backward",
            "_efficient_attention_forward",
            "_efficient_attention_backward",
        ),
        _BOTH,
        f"{_BLAS}, and gradients are added by atomics",
        "call torch.nn.functional.scaled_dot_product_attention inside the context",
        f"{_NUMERICS}; flash-attention's deterministic=False",
    ),
    Refused(
        ("_linalg_det",),
        _CPU,
        f"{_TRANSPOSED}, and the order of its product",
        "take slogdet of contiguous matrices",
        _SEEN,
    ),
    Refused(
        ("_linalg_slogdet",),
        _CPU,
        _TRANSPOSED,
        "call contiguous() on the matrices",
        _SEEN,
        lambda arguments: not arguments["A"].is_contiguous(),
    ),
    Refused(
        ("linalg_matrix_exp",),
        _BOTH,
        "matrices are grouped by their norms, and a group's size decides its products",
        "call it on one matrix at a time",
        _SEEN,
    ),
    Refused(
        ("linalg_multi_dot",),
        _BOTH,
        "the number of rows decides which product comes first",
        "write the products in an order of your own",
        "torch.linalg.multi_dot",
    ),
    # ---- random numbers ----
    Refused(
        ("native_dropout", "bernoulli", "multinomial"),
        _BOTH,
        _DRAWN,
        "set p = 0, or draw numbers for each row from a generator of its own",
        _SEEN,
    ),
    # ---- elements ----
    Refused(("softplus",), _CPU, _ELEMENTS, "compute it in float64", _SEEN),
    Refused(
        ("pow.Tensor_Scalar",),
        _CPU,
        f"with an exponent that is none of -2, -1, 0, 1, 2, 3, {_ELEMENTS}",
        "compute it in float64",
        _SEEN,
        _is_general_power,
    ),
    # Not pow.Tensor_Tensor: torch calls it with numbers, which a kernel in Python cannot pass on.
    Refused(
        (
            *("pow.Scalar", "exp2", "sinh", "cosh", "atanh", "atan2"),
            *("logaddexp", "logaddexp2", "igamma", "elu", "elu_backward", "celu", "mish"),
            *("mish_backward", "softshrink", "glu", "huber_loss_backward"),
        ),
        _CPU,
        f"in fp32, {_ELEMENTS}",
        "compute it in float64",
        _SEEN,
        _is_single,
    ),
    Refused(
        ("rsqrt",),
        _CPU,
        f"in 16 bits, {_ELEMENTS}",
        "compute it in float32",
        _SEEN,
        _is_half,
    ),
)
