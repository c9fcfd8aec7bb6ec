"""The ops of aten that `batch_invariant` covers: what stands in for each, and for which calls.

docs/batch_invariant.md shows this table.  ``out=`` and in-place variants are made of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import attention, products, rows


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


_LINEAR, _MATRIX = "`ck.linear`", "`ck.matmul`"
_BATCH = "`ck.matmul`, matrix by matrix"
_ADDED = "`ck.linear` where a bias [N] is added to a product, else the same sum, added to in fp32"
_SUM = "one tree for each result, a function of how many elements it adds"
_NORM, _RMS = "`ck.layer_norm`", "`ck.rms_norm`"

COVERED = (
    Covered("linear", products.linear, products.why_linear, _LINEAR),
    Covered("mm", products.mm, products.why_two, _MATRIX),
    Covered("addmm", products.addmm, products.why_three, _ADDED),
    Covered("bmm", products.bmm, products.why_two, _BATCH),
    Covered("baddbmm", products.baddbmm, products.why_three, _BATCH),
    Covered("mv", products.mv, products.why_vector, _MATRIX),
    Covered("addmv", products.addmv, products.why_addmv, _MATRIX),
    Covered("dot", products.dot, products.why_vector, _MATRIX),
    Covered("_softmax", rows.softmax, rows.why_softmax, "`ck.softmax`"),
    Covered("_log_softmax", rows.log_softmax, rows.why_softmax, "`ck.log_softmax`"),
    Covered(
        "_softmax_backward_data", rows.softmax_backward, rows.why_softmax_backward, "`ck.softmax`"
    ),
    Covered(
        "_log_softmax_backward_data",
        rows.log_softmax_backward,
        rows.why_softmax_backward,
        "`ck.log_softmax`",
    ),
    Covered("sum", rows.sum_all, rows.why_all, _SUM),
    Covered("sum.dim_IntList", rows.sum_dims, rows.why_dims, _SUM),
    Covered("mean", rows.mean_all, rows.why_all, _SUM),
    Covered("mean.dim", rows.mean_dims, rows.why_dims, _SUM),
    Covered("layer_norm", rows.layer_norm, rows.why_layer_norm, _NORM),
    Covered("native_layer_norm", rows.native_layer_norm, rows.why_layer_norm, _NORM),
    Covered("native_layer_norm_backward", rows.layer_norm_backward, rows.why_layer_backward, _NORM),
    Covered("rms_norm", rows.rms_norm, rows.why_rms_norm, _RMS),
    Covered("_fused_rms_norm", rows.fused_rms_norm, rows.why_rms_norm, _RMS),
    Covered("_fused_rms_norm_backward", rows.fused_rms_norm_backward, rows.why_rms_backward, _RMS),
    Covered("silu", rows.silu, rows.why_element, "`ck.silu`"),
    Covered("silu_backward", rows.silu_backward, rows.why_silu_backward, "`ck.silu`"),
    Covered("gelu", rows.gelu, rows.why_gelu, "`ck.gelu`"),
    Covered("gelu_backward", rows.gelu_backward, rows.why_gelu_backward, "`ck.gelu`"),
    Covered("sigmoid", rows.sigmoid, rows.why_element, "`ck.sigmoid`"),
    Covered("tanh", rows.tanh, rows.why_element, "`ck.tanh`"),
    Covered("embedding", rows.embedding, rows.why_embedding, "`ck.embedding`"),
    Covered(
        "embedding_dense_backward",
        rows.embedding_backward,
        rows.why_embedding_backward,
        "`ck.embedding`",
    ),
    Covered(
        "scaled_dot_product_attention",
        attention.attention,
        attention.why_attention,
        "`ck.block_sparse_attention`, or products and a softmax of this table",
        composed=True,
    ),
)
