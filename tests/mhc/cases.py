"""Drawn problems of mhc: one seeded generator each, so that no test draws what another left."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from cute_kernels.mhc import Options
from cute_kernels.mhc.config import WIDTH, mappings
from cute_kernels.mhc.tensors import Expand, Gates, Mapping, Sinkhorn, Streams
from tests.oracles import mhc as reference
from tests.oracles.error_bounds import Near

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
#: Of (x, phi).
DTYPES = ((FP32, FP32), (BF16, BF16), (BF16, FP32))

#: (batch, sequence, C) that TransformerEngine tests (tests/pytorch/test_mhc.py of d0067d0).
TE_SHAPES = (
    (8, 32, 32), (8, 128, 1024), (4, 128, 1024), (2, 2048, 3072), (1, 2048, 3072), (13, 1, 2048),
    (7, 1, 4096), (8, 1, 3072), (8, 128, 5129), (8, 512, 8000), (4, 1024, 8192), (2, 4096, 8192),
    (8, 128, 16384),
)  # fmt: skip
#: Small ones, chosen here.
SMALL_SHAPES = (
    (2, 64, 96), (4, 128, 128), (1, 200, 256), (8, 1, 1024), (3, 17, 1280), (1, 1, 16384),
)  # fmt: skip
#: Elements of x [s b, 4 C] that a test on two processor cores has time for.
CPU_ELEMENTS = 2**18
CHANNELS = (1280, 2560, 4096, 5120, 5129, 7168)
TOKENS = (1, 13, 48, 137, 512, 4096)


class Case(NamedTuple):
    """Case of m tokens of n streams of c channels; ``spread``: deviation of Sinkhorn's logits."""

    seed: int
    m: int
    c: int
    n: int = 4
    layout: str = "cn"
    dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32)
    norm_weight: bool = False
    bias: bool = False
    spread: float = 1.0
    options: Options = Options()

    @property
    def streams(self) -> Streams:
        """Shape of the streams, as the parts of mhc take them."""
        return Streams(self.n, self.layout)


class Inputs(NamedTuple):
    """Tensors of a case, as the functions of api.py take them."""

    x: torch.Tensor
    phi: torch.Tensor
    norm_weight: torch.Tensor | None
    alpha: torch.Tensor
    beta: torch.Tensor
    f: torch.Tensor
    bias: torch.Tensor | None
    pre: torch.Tensor
    post: torch.Tensor
    res: torch.Tensor
    z: torch.Tensor
    h: torch.Tensor
    ms: torch.Tensor


class Upstream(NamedTuple):
    """Random cotangents of a case's results."""

    y: torch.Tensor
    out: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    res: torch.Tensor
    h: torch.Tensor
    ms: torch.Tensor


def generator(seed: int) -> torch.Generator:
    """Generator on torch's default device: the global one is never drawn from, nor seeded."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """One tensor of N(0, 1)."""
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def draw(seed: int) -> Case:
    """A case of sizes around chunks, with every option."""
    drawn = random.Random(seed)
    n, layout = drawn.choice([2, 4]), drawn.choice(["cn", "nc"])
    form = drawn.choice(["log", "epsilon"])
    precision = drawn.choice(["bf16x2", "bf16x3"])
    options = Options(
        layout=layout,
        precision=precision,
        eps=drawn.choice([Options().eps, 1e-6, 1e-20]),
        pre_eps=drawn.choice([0.0, 1e-6]),
        post_scale=drawn.choice([2.0, 1.0]),
        iterations=drawn.choice([1, 2, 10, 20]),
        form=form,
    )
    return Case(
        seed,
        drawn.choice([1, 2, 3, 13, 48]),
        drawn.choice([1, 7, 32, 97, 256, 511, 512, 513, 1025]),
        n,
        layout,
        drawn.choice(DTYPES),
        drawn.random() < 0.5,
        drawn.random() < 0.5,
        drawn.choice([1.0, 3.0]),
        options,
    )


def inputs_of(case: Case) -> Inputs:
    """Its tensors: x of N(0, 1), rows of other magnitudes too; logits of N(0, spread²)."""
    g = generator(case.seed)
    m, c, n = case.m, case.c, case.n
    of_x, of_phi = case.dtypes
    size, k = mappings(n), n * c

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    x = drawn(m, *((c, n) if case.layout == "cn" else (n, c)))
    x = (x * drawn(m, 1, 1).exp2()).to(of_x)
    # H / r is then of N(0, 1).
    phi = (drawn(size, k) / k**0.5).to(of_phi)
    norm_weight = (1 + 0.3 * drawn(k)).to(of_phi)
    alpha = torch.tensor([1.3, -0.7, case.spread]) * (1 + 0.1 * drawn(3))
    beta = 0.5 * drawn(1, size)
    f, bias = drawn(m, c).to(of_x), drawn(c).to(of_x)
    pre, post = drawn(m, n).sigmoid(), 2 * drawn(m, n).sigmoid()
    res = drawn(m, n, n).softmax(1)
    ms = drawn(m).exp2()
    # H / r is of N(0, 1), as that of the projection.
    h, z = drawn(m, WIDTH[n]) * ms.sqrt()[:, None], case.spread * drawn(m, n, n)
    norm_weight, bias = norm_weight if case.norm_weight else None, bias if case.bias else None
    alpha, beta = alpha.to(of_phi), beta.to(of_phi)
    return Inputs(x, phi, norm_weight, alpha, beta, f, bias, pre, post, res, z, h, ms)


def upstream_of(case: Case, x: Inputs) -> Upstream:
    """Random ones: of P.sum() Sinkhorn's gradient is zero."""
    g = generator(case.seed + 1_000_003)
    dtype = x.x.dtype
    like = [(x.x.shape, dtype), (x.f.shape, dtype)]
    like += [(t.shape, FP32) for t in (x.pre, x.post, x.res)]
    like += [((case.m, mappings(case.n)), FP32), ((case.m,), FP32)]
    return Upstream(*(torch.randn(*shape, generator=g).to(d) for shape, d in like))


# ---- for the oracle ------------------------------------------------------------------------------


def rows(t: torch.Tensor) -> torch.Tensor:
    """[M, ...] as float64 rows."""
    return t.detach().reshape(len(t), -1).double()


def mapping_of(case: Case, x: Inputs) -> Mapping:
    """Mapping of the case, in float64."""
    weight = None if x.norm_weight is None else x.norm_weight.double()
    return Mapping(x.phi.detach().double(), weight, case.options.precision)


def gates_of(case: Case, x: Inputs) -> Gates:
    """Gates of the case, in float64."""
    o = case.options
    alpha, beta = x.alpha.detach().double(), x.beta.detach().double().view(-1)
    return Gates(alpha, beta, o.eps, o.pre_eps, o.post_scale)


def form_of(options: Options) -> Sinkhorn:
    """Form of Sinkhorn-Knopp of the case."""
    return Sinkhorn(options.iterations, options.form, options.form_eps)


def site_of(case: Case, x: Inputs) -> reference.Site:
    """Site of the case, in float64."""
    gates, form = gates_of(case, x), form_of(case.options)
    return reference.Site(case.streams, mapping_of(case, x), gates, form)


def expand_of(x: Inputs) -> Expand:
    """Expand operands of the case, in float64."""
    bias = None if x.bias is None else x.bias.double()
    return Expand(x.f.double(), bias, x.post.double(), rows(x.res))


def share(got: torch.Tensor, want: Near) -> float:
    """The largest |error| / bound, with the rounding to the dtype of ``got`` in the bound."""
    value, bound = want.stored(got.dtype)
    assert bound.isfinite().all(), "a bound that says nothing"
    error = (got.detach().double().reshape(value.shape) - value).abs()
    return (error / bound).nan_to_num(nan=1e9).max().item() if error.numel() else 0.0


def shares(got: dict[str, torch.Tensor], want: dict[str, Near | None]) -> dict[str, float]:
    """`share` of each by name."""
    assert got.keys() <= want.keys()
    return {name: share(t, want[name]) for name, t in got.items() if t is not None}
