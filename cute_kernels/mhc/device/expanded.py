"""Octets of y = expand_combine of x, in the layout "cn", made where they are projected."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from . import staged, unit
from .arguments import CollapseTensors, ExpandTensors
from .unit import Vector

OCTET = 8


@dataclass(frozen=True)
class TokenCoefficients:
    """Coefficients of one token, in registers; ``pre``: None without a collapse.

    token:  its index.  inside: whether there is such a token.
    """

    token: cutlass.Int32
    inside: cutlass.Boolean
    post: cute.Tensor
    res: cute.Tensor
    pre: cute.Tensor | None


@dataclass(frozen=True)
class Expansion:
    """y_j = (f + bias) post_j + Σ_i x_i res[i, j], and out = Σ_i y_i pre_i of the rounded y."""

    n: int

    @property
    def vector(self) -> Vector:
        """An octet of a row: a few channels of all streams."""
        return Vector(cutlass.BFloat16, self.n, "cn", OCTET // self.n, True)

    @cute.jit
    def coefficients(
        self,
        expand: ExpandTensors,
        collapse: CollapseTensors,
        token: cutlass.Int32,
        end: cutlass.Int32,
    ) -> TokenCoefficients:
        """Load the coefficients of a token; those of the last one before ``end`` beyond that."""
        n, read = self.n, cutlass.min(token, end - 1)
        pre = None
        if cutlass.const_expr(collapse.mPre is not None):
            pre = unit.coefficients(collapse.mPre, read, n)
        post = unit.coefficients(expand.mPost, read, n)
        res = unit.coefficients(expand.mRes, read, n * n)
        return TokenCoefficients(token, token < end, post, res, pre)

    @cute.jit
    def replace(
        self,
        octet: cute.Tensor,
        sF: cute.Tensor,
        token: TokenCoefficients,
        expand: ExpandTensors,
        collapse: CollapseTensors,
        c: cutlass.Int32,
        total: cutlass.Int32,
    ):
        """Replace an octet of x at channel c by y; store it, and its collapse."""
        vector = self.vector
        inside = c < total
        # An octet beyond the last channel reads the first of the bias, and becomes 0.
        channel = cutlass.Int64(c if inside else 0)
        bias = None
        if cutlass.const_expr(expand.mBias is not None):
            bias = vector.load_channels(expand.mBias, cutlass.Int64(0), channel, total)
        x, f = unit.to_fp32(octet), staged.read(sF)
        y = unit.rounded(unit.expanded(vector, x, f, bias, token.post, token.res), cutlass.BFloat16)
        for p in cutlass.range_constexpr(OCTET):
            octet[p] = y[p] if inside else cutlass.BFloat16(0.0)
        if inside & token.inside:
            base = cutlass.Int64(token.token) * total
            vector.store(y, expand.mY, base * self.n, channel, total, False)
            if cutlass.const_expr(collapse.mOut is not None):
                out = unit.collapsed(vector, unit.to_fp32(y), token.pre)
                vector.store_channels(out, collapse.mOut, base, channel, total, False)
