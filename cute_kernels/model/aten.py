"""The one table of aten: which ops are exact, elementwise, covered by ops of ours, or refused.

    VIEWS, MOVES  views, copies, look-ups, comparisons and new tensors: no number is computed
    STEPS         functions that IEEE rounds correctly, element by element, or that choose one
    ELEMENTS      functions of one element whose vectors and scalar tails round differently on a CPU
    COVERED       ops that ``ck.batch_invariant`` computes by ops of ours
    REFUSED       ops that ``ck.batch_invariant(strict=True)`` refuses

In-place and ``out=`` variants are in the class of their op.  Bits of an op in no class follow the
batch, as far as is known.  ``ck.patch``, ``ck.audit`` and docs/batch_invariant.md read this table.
Sources: ATen's kernels as of torch 2.13, and the threads that perf/results/gpu_tests.md names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ..gemm import api as gemm
from ..rowwise import api as rowwise
from ..rowwise import op as rowwise_op
from .batch_invariant.checks import of, of_rows
from .batch_invariant.ops import attention, products, rows


class Cause(NamedTuple):
    """Cause that the bits of a family of functions follow.

    Attributes:
        text: In words.
        devices: The types of device on which they do, or may.
        called: Names of its functions in Python code.
        modules: Modules of torch that compute it.
    """

    text: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    called: frozenset[str] = frozenset()
    modules: tuple[type, ...] = ()

    def applies(self, devices: set[str]) -> bool:
        """Whether bits follow the batch on one of these types of device; all, if none is known."""
        return bool(set(self.devices) & devices) or not devices & {"cpu", "cuda"}


class Covered(NamedTuple):
    """One overload of aten.

    Attributes:
        op: ``"sum.dim_IntList"``; the default overload has no suffix.
        kernel: What is called instead, with aten's arguments.
        why_not: With the same arguments: None, or why a call is not covered (`checks`).
        by: What it is made of, for the docs.
        composed: Whether the kernel calls ops of torch that are to be covered again.
    """

    op: str
    kernel: Callable
    why_not: Callable
    by: str
    composed: bool = False


class Refused(NamedTuple):
    """Ops with one reason, for tensors of floating point.

    Attributes:
        ops: Names in aten, of all overloads or of one.
        devices: The device types on which it is known.
        cause: What their bits follow.
        instead: What to do about it.
        source: Who says so.
        when: With the call's arguments by name: whether this call is one; None: each is.
        detail: What these ops add to the cause.
    """

    ops: tuple[str, ...]
    devices: tuple[str, ...]
    cause: Cause
    instead: str
    source: str
    when: Callable[[Mapping[str, object]], bool] | None = None
    detail: str = ""

    @property
    def why(self) -> str:
        """The cause in words."""
        return self.cause.text + self.detail


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- exact ops, and functions of one element -----------------------------------------------------

VIEWS = _names("""
    view _unsafe_view reshape _reshape_alias expand t transpose permute slice select unsqueeze
    squeeze alias detach clone copy empty empty_like empty_strided split split_with_sizes
    unsafe_split as_strided unbind lift_fresh
""")
MOVES = VIEWS | _names("""
    threshold_backward leaky_relu_backward floor_divide isinf isnan isfinite nan_to_num
    where eq ne ge gt le lt equal isin bucketize searchsorted
    bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor
    masked_fill masked_select masked_scatter nonzero one_hot cat stack _to_copy
    _conj complex view_as_real view_as_complex diagonal unfold movedim chunk
    new_empty new_empty_strided new_zeros zeros zeros_like ones ones_like full full_like fill zero
    arange linspace scalar_tensor lift_fresh_copy _local_scalar_dense _assert_async _assert_scalar
    constant_pad_nd index gather index_select embedding slice_backward select_backward
    split_backward unfold_backward new_full new_ones index_copy index_fill scatter flip roll repeat
    tril triu eye any all is_same_size slice_scatter select_scatter diag resize set is_nonzero
    argmax argmin aminmax repeat_interleave view_dtype set_data is_pinned narrow positive
    native_dropout_backward pixel_shuffle
""")
STEPS = _names("""
    add sub mul div neg rsub abs sqrt reciprocal square sign floor ceil round trunc relu clamp
    clamp_min clamp_max minimum maximum hardtanh leaky_relu lerp fmod remainder sgn max min amax
    amin
""")
ELEMENTS = _names("""
    exp exp2 expm1 log log1p log2 log10 sin cos tan sinh cosh asin acos atan atan2 tanh sigmoid silu
    gelu mish softplus log_sigmoid_forward elu celu selu erf erfc erfinv logit pow rsqrt xlogy
    sigmoid_backward tanh_backward silu_backward gelu_backward softplus_backward elu_backward
    mish_backward log_sigmoid_backward hardsigmoid hardswish glu addcmul addcdiv polar logaddexp
    glu_backward
""")
#: Products and convolutions, whose results are not computed in an observation.
PRODUCTS = _names("""
    mm bmm addmm baddbmm addbmm mv addmv dot linear convolution convolution_backward _grouped_mm
    _scaled_mm embedding_dense_backward
""")
#: Ops of torch and of ours that reduce the last dimension of their first argument.
_LAST = _names("""
    mm bmm mv dot linear matmul batched_product row_sum softmax log_softmax norm topk sort
    moe_select
""")
#: Functions of elements that are rounded more than once where the numbers are complex.
_COMPLEX = _names("mul div reciprocal square abs sgn")
_PUTS = _names("index_put _index_put_impl _unsafe_index_put")
_POWERS = (-2, -1, 0, 1, 2, 3)


def is_exact(name: str, args: tuple, operands: list[torch.Tensor], devices: set[str]) -> bool:
    """Whether an op has the same bits in every batch, on these types of device.

    operands: tensors among arguments and results.
    """
    floats = [t for t in operands if t.is_floating_point() or t.is_complex()]
    if not floats or not any(t.numel() for t in floats):
        return True
    op = name.removesuffix("_")
    if op in _COMPLEX and any(t.is_complex() for t in floats):
        # Two products and a sum, which a CPU contracts in vectors and not behind them.
        return devices == {"cuda"}
    if op in MOVES | STEPS:
        return True
    if op in ("sum", "mean") and isinstance(args[0], torch.Tensor) and reduced_width(op, args) <= 2:
        return True
    if op in ("cumsum", "sum") and _counts(args[0]):
        return True
    if op in _PUTS:
        # A mask, or one index, names each place once, so that accumulation adds two numbers.
        once = all(t is None or t.dtype == torch.bool or t.numel() == 1 for t in args[1])
        return once or len(args) < 4 or not args[3]
    if op in ELEMENTS:
        if devices == {"cuda"}:
            return True
        if op == "rsqrt":
            return all(t.element_size() > 2 for t in floats)
        if op == "pow":
            return len(args) > 1 and not isinstance(args[1], torch.Tensor) and args[1] in _POWERS
    return False


def computes(name: str) -> bool:
    """Whether an op is a step of a formula: not a copy, a view, a look-up or a new tensor."""
    return name.removesuffix("_") not in MOVES


def reduced_width(name: str, args: tuple) -> int:
    """Return how many elements one result of a covered reduction reads; 1: elementwise."""
    first = args[0]
    if name in ("sum", "mean"):
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
        dims = [dims] if isinstance(dims, int) else dims
        sizes = first.shape if not dims else [first.shape[d] for d in dims] if first.dim() else []
        return math.prod(sizes)
    if name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        dim = args[2] if name.endswith("_data") else args[1]
        return first.shape[dim] if first.dim() else 1
    if name in ("addmm", "baddbmm", "addmv"):
        return args[1].shape[-1]
    if name == "moe_weights_backward":
        return args[2].shape[-1]
    if name in _LAST and isinstance(first, torch.Tensor) and first.dim():
        return first.shape[-1]
    return 1


def _counts(t: torch.Tensor) -> bool:
    """Whether a tensor [B, T], or smaller, holds whole numbers, as a mask of floats does."""
    small = t.dim() <= 2 and 0 < t.numel() < 1 << 12
    return small and not t.requires_grad and bool(((t == 0) | (t == 1)).all() & t.any())


# ---- causes --------------------------------------------------------------------------------------

_CPU, _GPU, _BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")

SUMS = Cause(
    "a sum along a row: CUDA adds with 512 to 32 lanes a row, by the number of rows",
    called=_names("""
        mean sum var std var_mean norm vector_norm logsumexp normalize cosine_similarity prod nansum
        layer_norm rms_norm avg_pool1d avg_pool2d adaptive_avg_pool1d interpolate
    """),
    modules=(
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(nn.CosineSimilarity, nn.PairwiseDistance),
    ),
)
SCAN = Cause("a scan, cut by the shape", called=_names("cumsum cumprod logcumsumexp"))
PRODUCT = Cause(
    "a product: cuBLAS and the CPU's BLAS choose kernel and split by the rows",
    called=_names("""
        matmul bmm mm addmm baddbmm addbmm mv einsum linear tensordot bilinear dot outer
    """),
    modules=(nn.Bilinear,),
)
SOFTMAX = Cause(
    "softmax: on CUDA the path depends on 16-byte alignment; on a CPU on vector tails",
    called=_names("softmax log_softmax gumbel_softmax"),
    modules=(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d),
)
ATOMICS = Cause(
    "atomic additions on CUDA, in the order of arrival",
    _GPU,
    _names("""
        index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ bincount
        index_reduce index_put_ put_ embedding embedding_bag
    """),
    (nn.EmbeddingBag,),
)
CONVOLUTION = Cause(
    "a convolution: cuDNN and oneDNN choose algorithms by the shape of the batch",
    called=_names("conv1d conv2d conv3d conv_transpose1d"),
    modules=(nn.modules.conv._ConvNd,),
)
ATTENTION = Cause(
    "torch's attention: splits of the keys follow the shape of the batch",
    called=_names("scaled_dot_product_attention flex_attention multi_head_attention_forward"),
    modules=(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder),
)
ELEMENTWISE = Cause(
    "an elementwise function: on a CPU vectors and their scalar tail round differently",
    _CPU,
    _names("""
        exp exp2 expm1 log log1p log2 tanh sigmoid silu gelu mish softplus logsigmoid sin cos erf
        elu selu celu glu
    """),
    (nn.Mish, nn.Softplus, nn.LogSigmoid, nn.ELU, nn.SELU, nn.CELU, nn.GLU),
)
BATCH = Cause(
    "statistics over the batch, or over several rows",
    called=_names("group_norm batch_norm instance_norm"),
    modules=(nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm),
)
RECURRENT = Cause(
    "products and gates of cuDNN or oneDNN, chosen by the shape of the batch",
    modules=(nn.RNNBase, nn.RNNCellBase),
)
LOSS = Cause(
    "the loss by torch: log-probabilities from logits, and their sum over the batch",
    called=_names("cross_entropy nll_loss kl_div mse_loss loss_function"),
    modules=(nn.AdaptiveLogSoftmaxWithLoss, nn.modules.loss._Loss),
)
DRAWN = Cause(
    "random numbers by the place in the batch",
    called=_names("""
        uniform_ exponential_ normal_ bernoulli_ rand_like randn_like multinomial
    """),
)
STRIDES = Cause("strides decide whether a matrix or its transpose is factorised")

_CAUSES = (SUMS, SCAN, PRODUCT, SOFTMAX, ATOMICS, CONVOLUTION, ATTENTION, ELEMENTWISE, BATCH)
_CAUSES += (RECURRENT, LOSS)
#: Names that a forward may call -> the cause.
CALLED = {name: cause for cause in _CAUSES for name in cause.called}
#: Functions that draw numbers by the place in the batch.
DRAWS = dict.fromkeys(DRAWN.called, DRAWN)


def of_module(module: nn.Module) -> Cause | None:
    """Return the cause for one of torch's own modules, or None."""
    return next((cause for cause in _CAUSES if isinstance(module, cause.modules)), None)


# ---- covered -------------------------------------------------------------------------------------

_LINEAR, _MATRIX = "`ck.linear`", "`ck.matmul`"
_BATCH = "`ck.matmul`, matrix by matrix"
_ADDED = "`ck.linear` where a bias [N] is added to a product, else the same sum, added to in fp32"
_SUM = "one tree for each result, a function of how many elements it adds"
_NORM, _RMS, _LOOK_UP = "`ck.layer_norm`", "`ck.rms_norm`", "`ck.embedding`"
_MEAN = functools.partial(rows.total, mean=True)

COVERED = (
    Covered("linear", lambda x, w, bias=None: gemm.linear(x, w, bias), products.why_linear,
            _LINEAR),
    Covered("mm", lambda a, b: gemm.matmul(a, b), of(0, 1), _MATRIX),
    Covered("addmm", products.addmm, of(1, 2, 0), _ADDED),
    Covered("bmm", products.bmm, of(0, 1), _BATCH),
    Covered("baddbmm", products.baddbmm, of(1, 2, 0), _BATCH),
    Covered("mv", lambda a, v: gemm.matmul(a, v.unsqueeze(-1)).squeeze(-1), products.why_vector,
            _MATRIX),
    Covered("addmv", products.addmv, products.why_addmv, _MATRIX),
    Covered("dot", lambda a, b: gemm.matmul(a.unsqueeze(0), b.unsqueeze(-1)).view(()),
            products.why_vector, _MATRIX),
    Covered("_softmax", rows.softmax, rows.why_softmax, "`ck.softmax`"),
    Covered("_log_softmax", rows.log_softmax, rows.why_softmax, "`ck.log_softmax`"),
    Covered("_softmax_backward_data", rows.softmax_backward, rows.why_dy_softmax, "`ck.softmax`"),
    Covered("_log_softmax_backward_data", rows.log_softmax_backward, rows.why_dy_softmax,
            "`ck.log_softmax`"),
    Covered("sum", rows.total, rows.why_total, _SUM),
    Covered("sum.dim_IntList", rows.total, rows.why_total, _SUM),
    Covered("mean", _MEAN, rows.why_total, _SUM),
    Covered("mean.dim", _MEAN, rows.why_total, _SUM),
    Covered("layer_norm", rows.layer_norm, of_rows(1, 0, 2, 3), _NORM),
    Covered("native_layer_norm", rows.native_layer_norm, of_rows(1, 0, 2, 3), _NORM),
    Covered("native_layer_norm_backward", rows.layer_norm_backward, of_rows(2, 1, 0, 5, 6), _NORM),
    Covered("rms_norm", rows.rms_norm, of_rows(1, 0, 2), _RMS),
    Covered("_fused_rms_norm", rows.fused_rms_norm, of_rows(1, 0, 2), _RMS),
    Covered("_fused_rms_norm_backward", rows.fused_rms_norm_backward, of_rows(2, 1, 0, 4), _RMS),
    Covered("silu", lambda x: rowwise.silu(x), of(0), "`ck.silu`"),
    Covered("silu_backward", lambda dy, x: rowwise_op.activation_backward(dy, x, "silu"),
            of(0, 1), "`ck.silu`"),
    Covered("gelu", rowwise.gelu, of(0), "`ck.gelu`"),
    Covered("gelu_backward", rows.gelu_backward, of(0, 1), "`ck.gelu`"),
    Covered("sigmoid", rowwise.sigmoid, of(0), "`ck.sigmoid`"),
    Covered("tanh", rowwise.tanh, of(0), "`ck.tanh`"),
    Covered("embedding", rows.embedding, rows.why_embedding, _LOOK_UP),
    Covered("embedding_dense_backward", rows.embedding_backward, rows.why_dy_embedding, _LOOK_UP),
    Covered("scaled_dot_product_attention", attention.attention, attention.why_attention,
            "`ck.block_sparse_attention`, or products and a softmax of this table", composed=True),
)  # fmt: skip
#: Names of the ops that an override stands in for, as a dispatch mode sees them.
COVERED_NAMES = frozenset(row.op.split(".")[0] for row in COVERED) - {"embedding"}

# ---- refused -------------------------------------------------------------------------------------

_DOCS = "torch.use_deterministic_algorithms"
_NUMERICS = "torch's docs, Numerical accuracy: batched computations"
_REDUCE = "ATen/native/cuda/Reduce.cuh, setReduceConfig"
_SEEN = "seen on a CPU: tests/model/batch_invariant/test_refused.py"

_SORTED = "sort, and add in an order of your own, or keep it out of what must not change"
_ROWS = "use the covered sum or mean, or ck.layer_norm and ck.rms_norm"
_PRODUCTS = "use a covered product (linear, mm, bmm)"
_OUTSIDE = "call it outside the context, if its bits may follow the batch"
_WIDE = "compute it in float64"


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


def _refused(ops: str, *columns: object, **options: object) -> Refused:
    return Refused(tuple(ops.split()), *columns, **options)


#: docs/batch_invariant.md shows this table.
REFUSED = (
    # ---- atomics ----
    _refused("index_add scatter_add scatter_reduce", _GPU, ATOMICS, _SORTED, _DOCS,
             detail="; the gradients of index_select, gather and repeat_interleave are such sums"),
    _refused("index_put _index_put_impl _unsafe_index_put put", _GPU, ATOMICS, _SORTED,
             f"{_DOCS}; pytorch #88621", lambda call: call.get("accumulate", False),
             ", with accumulate=True; the gradient of indexing by tensors is such a sum"),
    _refused("histc", _GPU, ATOMICS, _OUTSIDE, _DOCS),
    _refused("bincount", _GPU, ATOMICS, _OUTSIDE, _DOCS,
             lambda call: call.get("weights") is not None, ", with weights"),
    _refused("grid_sampler_2d_backward grid_sampler_3d_backward", _GPU, ATOMICS, _OUTSIDE, _DOCS),
    _refused("""upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
             upsample_trilinear3d_backward""",
             _GPU, ATOMICS, "upsample by mode='nearest'", _DOCS),
    _refused("""reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
             replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward""",
             _GPU, ATOMICS, "pad with a constant", _DOCS),
    _refused("""_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool3d_backward
             adaptive_max_pool2d_backward max_pool3d_with_indices_backward max_unpool2d max_unpool3d
             fractional_max_pool2d_backward fractional_max_pool3d_backward""",
             _GPU, ATOMICS, _OUTSIDE, _DOCS),
    _refused("nll_loss2d_forward _ctc_loss_backward",
             _GPU, ATOMICS, "of an nll_loss flatten to [N, C] first", _DOCS),
    _refused("_embedding_bag_dense_backward", _GPU, ATOMICS, "use embedding and sum", _DOCS),
    _refused("cumsum", _GPU, SCAN, _OUTSIDE, _DOCS),
    # ---- sums whose order follows the shape ----
    _refused("var std var_mean std_mean logsumexp", _GPU, SUMS, _ROWS, _REDUCE),
    _refused("norm linalg_vector_norm prod nansum", _BOTH, SUMS,
             f"{_ROWS}; on a CPU call contiguous() first, and reduce the last dimensions",
             f"{_REDUCE}; {_SEEN}", _is_scattered,
             "; on a CPU, of rows that are not contiguous, strides decide the order"),
    _refused("""native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm
             miopen_batch_norm""",
             _BOTH, BATCH, "put the module into eval mode", _SEEN,
             lambda call: call.get("training", True), ", in training"),
    # ---- products of libraries ----
    _refused("convolution convolution_backward _convolution mkldnn_convolution", _BOTH, CONVOLUTION,
             "write it as unfold and a covered product",
             f"torch's docs, Reproducibility: CUDA convolution benchmarking; {_SEEN}"),
    _refused("cdist", _BOTH, PRODUCT, _PRODUCTS, "torch.cdist, compute_mode",
             detail="; 25 rows decide whether it is one"),
    _refused("mkldnn_rnn_layer", _CPU, RECURRENT, "step through an LSTMCell", _NUMERICS),
    _refused("_cudnn_rnn", _GPU, RECURRENT, "step through an LSTMCell or GRUCell", _NUMERICS),
    _refused("""addbmm _addmm_activation _scaled_mm _grouped_mm _scaled_grouped_mm
             _weight_int8pack_mm _weight_int4pack_mm""",
             _BOTH, PRODUCT, _PRODUCTS, _NUMERICS),
    _refused("_native_multi_head_attention _transformer_encoder_layer_fwd", _BOTH, ATTENTION,
             "torch.backends.mha.set_fastpath_enabled(False)", _NUMERICS,
             detail="; a fused layer, with products of cuBLAS or a CPU's BLAS"),
    _refused("""_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
             _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
             _scaled_dot_product_efficient_attention
             _scaled_dot_product_efficient_attention_backward
             _scaled_dot_product_flash_attention_for_cpu
             _scaled_dot_product_flash_attention_for_cpu_backward
             _flash_attention_forward _flash_attention_backward
             _efficient_attention_forward _efficient_attention_backward""",
             _BOTH, ATTENTION,
             "call torch.nn.functional.scaled_dot_product_attention inside the context",
             f"{_NUMERICS}; flash-attention's deterministic=False",
             detail=", and gradients are added by atomics"),
    _refused("_linalg_det", _CPU, STRIDES, "take slogdet of contiguous matrices", _SEEN,
             detail=", and the order of its product"),
    _refused("_linalg_slogdet", _CPU, STRIDES, "call contiguous() on the matrices", _SEEN,
             lambda call: not call["A"].is_contiguous()),
    _refused("linalg_matrix_exp", _BOTH, PRODUCT, "call it on one matrix at a time", _SEEN,
             detail="; matrices of like norms are grouped, and the size of a group decides"),
    _refused("linalg_multi_dot", _BOTH, PRODUCT, "write the products in an order of your own",
             "torch.linalg.multi_dot", detail="; the number of rows decides which comes first"),
    # ---- random numbers ----
    _refused("native_dropout bernoulli multinomial", _BOTH, DRAWN,
             "set p = 0, or draw numbers for each row from a generator of its own", _SEEN),
    # ---- elements ----
    _refused("softplus", _CPU, ELEMENTWISE, _WIDE, _SEEN),
    # Products are rounded alike anywhere.
    _refused("pow.Tensor_Scalar", _CPU, ELEMENTWISE, _WIDE, _SEEN,
             lambda call: call.get("exponent") not in _POWERS,
             "; exponents -2, -1, 0, 1, 2 and 3 are products"),
    # Not pow.Tensor_Tensor: torch calls it with numbers, which a kernel in Python cannot pass on.
    _refused("""pow.Scalar exp2 sinh cosh atanh atan2 logaddexp logaddexp2 igamma elu elu_backward
             celu mish mish_backward softshrink glu huber_loss_backward""",
             _CPU, ELEMENTWISE, _WIDE, _SEEN, _is_single, ", in fp32"),
    _refused("rsqrt", _CPU, ELEMENTWISE, "compute it in float32", _SEEN,
             lambda call: call["self"].element_size() == 2, ", in 16 bits"),
)  # fmt: skip
