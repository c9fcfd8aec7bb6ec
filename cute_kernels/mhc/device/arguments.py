"""Arguments of kernels and device functions: typed bundles of tensors and scalars."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...compile import fake
from ..config import WIDTH, ProjectBackwardConfig, ProjectBackwardWgmmaConfig, mappings
from .vector import ACCESS


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
class BackwardTensors:
    """Tensors of a projection's backward with a row for each token; None for those absent.

    mX, mDy, mDx: [M, K].  mDout: [M, C].  mDh [M, W], mDms [M], mRes [M, n²], mPre [M, n]: fp32.
    size: K of rows without padding.
    """

    mX: cute.Tensor
    mDh: cute.Tensor
    mDms: cute.Tensor
    mDy: cute.Tensor | None
    mRes: cute.Tensor | None
    mDout: cute.Tensor | None
    mPre: cute.Tensor | None
    mDx: cute.Tensor
    size: cutlass.Int32


@dataclass(frozen=True)
class VectorInputs:
    """One vector of one token, in registers, unconverted; None for what is absent."""

    x: cute.Tensor
    dy: cute.Tensor | None
    d_out: cute.Tensor | None


class FakeRows:
    """Fake tensors of M tokens, n streams and C channels to compile against, aligned for vectors.

    A tensor that is not ``there`` is None.
    """

    def __init__(self, dtype: str, n: int):
        self.element, self.n = fake.DTYPES[dtype], n
        self.m, self.k, self.c = (fake.size() for _ in range(3))

    def streams(self, there: bool = True):
        """[M, K]."""
        return fake.compact(self.element, (self.m, self.k), ACCESS) if there else None

    def channels(self, there: bool = True):
        """[M, C]."""
        return fake.compact(self.element, (self.m, self.c), ACCESS) if there else None

    def bias(self, there: bool):
        """[C]."""
        return fake.compact(self.element, (self.c,), ACCESS) if there else None

    def tokens(self, columns: int, there: bool = True):
        """[M, columns] of coefficients, fp32, of any row stride."""
        return fake.rows("fp32", self.m, columns) if there else None

    def compact(self, columns: int, there: bool = True, align: int = ACCESS):
        """[M, columns], fp32."""
        return fake.compact(cutlass.Float32, (self.m, columns), align) if there else None

    def expand(self, bias: bool) -> tuple:
        """Tensors of `ExpandTensors`."""
        coefficients = self.tokens(self.n), self.tokens(self.n**2)
        return self.channels(), self.bias(bias), *coefficients, self.streams()


class FakeTmaRows(FakeRows):
    """Fake tensors whose rows TMA addresses, at any multiple of 16 bytes."""

    def streams(self, there: bool = True):
        """[M, K]."""
        return fake.matrix("bf16", self.m, self.k, "k") if there else None

    def channels(self, there: bool = True):
        """[M, C]."""
        return fake.matrix("bf16", self.m, self.c, "k") if there else None


def backward_fakes(
    config: ProjectBackwardConfig | ProjectBackwardWgmmaConfig, rows: FakeRows
) -> tuple:
    """Fakes of x, dH, dms, psi, dy, res, dout, pre, dx and parts of a projection's backward."""
    n = config.n
    columns = mappings(n)
    return (
        rows.streams(),
        rows.compact(WIDTH[n]),
        fake.vector("fp32", rows.m),
        fake.compact(cutlass.Float32, (columns, rows.k), 4),
        rows.streams(bool(config.dy)),
        rows.compact(n * n, config.dy == "res"),
        rows.channels(config.d_out),
        rows.compact(n, config.d_out),
        rows.streams(),
        fake.compact(cutlass.Float32, (fake.size(), columns, rows.k), 4),
    )
