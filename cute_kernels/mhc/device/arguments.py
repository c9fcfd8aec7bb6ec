"""Arguments of kernels and device functions: typed bundles of tensors and scalars."""

from dataclasses import dataclass

import cutlass
from cutlass import cute


@dataclass(frozen=True)
class ExpandTensors:
    """Tensors of y_j = (f + bias) post_j + Σ_i x_i res[i, j] besides x; all None without it.

    mF: [M, C].  mBias: [C] or None.  mPost: fp32 [M, n].  mRes: fp32 [M, n²].  mY: [M, K].
    """

    mF: cute.Tensor | None
    mBias: cute.Tensor | None
    mPost: cute.Tensor | None
    mRes: cute.Tensor | None
    mY: cute.Tensor | None


@dataclass(frozen=True)
class CollapseTensors:
    """Tensors of out = Σ_i x_i pre_i besides x; both None without it.

    mPre: fp32 [M, n].  mOut: [M, C].
    """

    mPre: cute.Tensor | None
    mOut: cute.Tensor | None


@dataclass(frozen=True)
class Scalars:
    """Scalars of the gates and of Sinkhorn-Knopp.

    pre = σ(z) + pre_eps      post = post_scale σ(z)      z = α H / √(ms + eps) + β
    sinkhorn_eps: of the form "epsilon".
    """

    eps: cutlass.Float32
    pre_eps: cutlass.Float32
    post_scale: cutlass.Float32
    sinkhorn_eps: cutlass.Float32


@dataclass(frozen=True)
class Upstream:
    """Gradients that are added to dx, and their coefficients; None for those that are absent.

    mDy: [M, K].  mRes: fp32 [M, n²].  mDout: [M, C].  mPre: fp32 [M, n].
    """

    mDy: cute.Tensor | None
    mRes: cute.Tensor | None
    mDout: cute.Tensor | None
    mPre: cute.Tensor | None


@dataclass(frozen=True)
class TokenTensors:
    """Global tensors with a row for each token.

    mX, mDx: [M, K].  mDh: fp32 [M, W].  mDms: fp32 [M].  size: K of rows without padding.
    """

    mX: cute.Tensor
    mDh: cute.Tensor
    mDms: cute.Tensor
    upstream: Upstream
    mDx: cute.Tensor
    size: cutlass.Int32


@dataclass(frozen=True)
class VectorInputs:
    """One vector of one token, in registers, unconverted; None for what is absent."""

    x: cute.Tensor
    dy: cute.Tensor | None
    d_out: cute.Tensor | None


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of a token, in registers.

    token:  its index.
    read:   the token that is read: the last one where ``token`` is beyond it.
    factor: (2 / K) dms.
    """

    token: cutlass.Int32
    read: cutlass.Int32
    factor: cutlass.Float32
    res: cute.Tensor | None
    pre: cute.Tensor | None
