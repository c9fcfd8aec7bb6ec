"""Every constant that the bits of mhc depend on, and the configurations of its kernels.

A row of x has K = n C elements, in the order of a layout:

    cn    k = c n + i      (..., C, n), TransformerEngine's
    nc    k = i C + c      (..., n, C), DeepSeek's

What is summed over the channels of a token is cut into fixed chunks of channels, each added from
zero, then the chunks are added in ascending order.  What is summed over tokens is cut into fixed
chunks of tokens in the same way.  Neither follows the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT, SPLIT_INVARIANT
from ..cpu import ieee
from .triton.plan import TRITON

#: Numbers of residual streams that there are kernels for.
STREAMS = (2, 4)
LAYOUTS = ("cn", "nc")
#: How phi is made of bf16 terms; products of a term with a term beyond the precision are dropped.
PRECISIONS = ("bf16x2", "bf16x3")
#: Sinkhorn-Knopp without, or with, an epsilon in every divisor.
FORMS = ("log", "epsilon")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

#: Tokens of a chunk of the sums over tokens: dphi, dnorm_weight, dalpha, dbeta, dbias.
TOKENS = 1024

#: Columns of H, zeros behind the last one in use: 24 of 32 for n = 4, 8 of 8 for n = 2.
WIDTH = {2: 8, 4: 32}

_KEPT = frozenset({RUN_TO_RUN, BATCH_INVARIANT, SPLIT_INVARIANT})
#: Backend -> what it keeps.
KEPT: Mapping[str, frozenset[str]] = {
    arch.CUTE_SM90: _KEPT | {SCHEDULE_INVARIANT},
    arch.TRITON: _KEPT | {SCHEDULE_INVARIANT},
    arch.CPU: _KEPT,
}


def mappings(n: int) -> int:
    """N: columns of H in use, and rows of phi: n of pre, n of post, n² of res."""
    return 2 * n + n * n


def chunk_channels(n: int, precision: str) -> int:
    """Channels of a chunk of the projection: 2048 elements of a row, or 1024 of three terms."""
    return (2048 if precision == "bf16x2" else 1024) // n


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's sums over channels: from zero in chunks of so many, each half onto half."""

    channels: int = 512
    exp2: tuple[float, ...] = ieee.EXP2


CPU = CpuPlan()


def plan(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers."""
    common: dict[str, object] = {
        "tokens of a chunk": TOKENS,
        "channels of a chunk": {
            f"{n} {p}": chunk_channels(n, p) for n in STREAMS for p in PRECISIONS
        },
        "gates' slopes": "the gate of z times the gate of -z",
        "sinkhorn": "one normalisation of rows and columns from logits, then of the matrix",
    }
    if backend == arch.CPU:
        return common | {"cpu": asdict(CPU), "threads": device.threads}
    if backend == arch.TRITON:
        return common | asdict(TRITON)
    return common | {"squares": "octets from zero, four lanes of them"}


# ``blocks`` of a configuration: CTAs of an SM that its registers leave room for.  Without it ptxas
# may leave room for more and spill.


@dataclass(frozen=True)
class ProjectConfig:
    """One compiled SM90 kernel of the projection.

    wide: see mhc/device/unit.py.  expand: whether the streams are made of x on the way, ``bias``:
    with one, ``collapse``: and collapsed.
    """

    dtype: str
    n: int
    layout: str
    wide: bool
    precision: str
    expand: bool = False
    bias: bool = False
    collapse: bool = False
    warps: int = 12
    blocks: int = 1


@dataclass(frozen=True)
class ProjectWgmmaConfig:
    """One compiled SM90 kernel of the projection of bf16 streams, by TMA and WGMMA.

    weighted: whether there is a norm_weight.  warpgroups: consumers, of 64 tokens each.
    expand, bias, collapse: see `ProjectConfig`.
    x_stages, psi_stages: panels of 64 elements in the rings.  burst: panels loaded at once.
    """

    n: int
    layout: str
    precision: str
    weighted: bool
    warpgroups: int = 4
    x_stages: int = 4
    psi_stages: int = 4
    burst: int = 2
    expand: bool = False
    bias: bool = False
    collapse: bool = False


def project_config(
    dtype: str,
    n: int,
    layout: str,
    wide: bool,
    precision: str,
    expand: bool = False,
    bias: bool = False,
    collapse: bool = False,
) -> ProjectConfig:
    """Configuration of the projection on ``mma.sync``, with warps that do not spill."""
    few = expand or dtype == "fp32" or layout == "nc"
    warps = 8 if few else 12
    return ProjectConfig(dtype, n, layout, wide, precision, expand, bias, collapse, warps)


def project_by_tma(dtype: str, layout: str, wide: bool, expand: bool, channels: int) -> bool:
    """Whether the projection can run on TMA and WGMMA; the bytes do not depend on it.

    An octet of y needs all streams of its channels, and TMA rows of f of a multiple of 16 bytes.
    """
    return dtype == "bf16" and wide and (not expand or (layout == "cn" and channels % 8 == 0))


def project_wgmma_config(
    n: int,
    layout: str,
    precision: str,
    weighted: bool,
    expand: bool = False,
    bias: bool = False,
    collapse: bool = False,
) -> ProjectWgmmaConfig:
    """Configuration of the projection on TMA and WGMMA, with registers for coefficients of y."""
    if not expand:
        return ProjectWgmmaConfig(n, layout, precision, weighted)
    sizes = (2, 4, 4, 2) if precision == "bf16x3" else (2, 6, 4, 2)
    return ProjectWgmmaConfig(n, layout, precision, weighted, *sizes, True, bias, collapse)


@dataclass(frozen=True)
class CombineConfig:
    """One compiled SM90 kernel of expand_combine (``bias``: with one), or of aggregate.

    packed: whether a token's coefficients are loaded 16 bytes at a time.  ahead: vectors in flight.
    """

    dtype: str
    n: int
    layout: str
    wide: bool
    expand: bool
    bias: bool = False
    packed: bool = False
    threads: int = 256
    ahead: int = 4
    blocks: int = 4


#: Vectors in flight of a thread, of which `combine_config` takes what divides a row best.
AHEAD = (5, 4)


def combine_config(
    dtype: str,
    n: int,
    layout: str,
    wide: bool,
    expand: bool,
    bias: bool,
    packed: bool,
    channels: int,
) -> CombineConfig:
    """Configuration with registers for its vectors; no bit depends on it."""
    if not (packed and wide and layout == "cn"):
        # A vector in "nc" is n times as long.
        few = expand and (layout == "nc" or dtype == "fp32")
        ahead, blocks = 1 if layout == "nc" else 4, 2 if few else 4
        return CombineConfig(
            dtype, n, layout, wide, expand, bias, False, ahead=ahead, blocks=blocks
        )
    threads = 128
    vectors = -(-channels * n // 8 // threads)
    ahead = min(AHEAD, key=lambda count: vectors % count)
    blocks = 8 if not expand else 6 if dtype == "bf16" else 4
    return CombineConfig(dtype, n, layout, wide, expand, bias, True, threads, ahead, blocks)


@dataclass(frozen=True)
class ReduceConfig:
    """One compiled SM90 kernel of the sums over channels of a backward.

    x, dy, d_out, f, bias: which of them are read.  dx: whether it is made.
    packed: whether a token's coefficients are loaded 16 bytes at a time.
    tokens: of one CTA, whose dbias it adds.
    """

    dtype: str
    n: int
    layout: str
    wide: bool
    x: bool
    dy: bool
    d_out: bool
    f: bool
    bias: bool
    dx: bool
    packed: bool = False
    threads: int = 128
    tokens: int = 8
    blocks: int = 1


@dataclass(frozen=True)
class ProjectBackwardConfig:
    """One compiled SM90 kernel of dx and dpsi of a projection.

    dy: ``""`` (none), ``"add"`` (to dx), or ``"res"`` (mixed by res).  d_out: whether there is one.
    """

    dtype: str
    n: int
    layout: str
    wide: bool
    precision: str
    dy: str
    d_out: bool
    warps: int = 2
    blocks: int = 5


def project_backward_config(
    dtype: str, n: int, layout: str, wide: bool, precision: str, dy: str, d_out: bool
) -> ProjectBackwardConfig:
    """Configuration of a projection's backward on ``mma.sync``, with enough registers."""
    plain = dtype == "bf16" and precision == "bf16x2" and dy != "res"
    blocks = 5 if plain else 4
    return ProjectBackwardConfig(dtype, n, layout, wide, precision, dy, d_out, blocks=blocks)


def by_tma(
    dtype: str, n: int, layout: str, wide: bool, precision: str, dy: str, d_out: bool, channels: int
) -> bool:
    """Whether the backward of a projection can run on TMA and WGMMA; the bytes do not depend on it.

    TMA needs rows of a multiple of 16 bytes.
    """
    rows = channels % 8 == 0 or not d_out
    return (dtype, layout, wide, precision) == ("bf16", "cn", True, "bf16x2") and rows


@dataclass(frozen=True)
class ProjectBackwardWgmmaConfig:
    """One compiled SM90 kernel of dx and dpsi of a projection, of bf16 streams in "cn" by TMA.

    dy, d_out: see `ProjectBackwardConfig`.  slab: elements of a row that a CTA has.
    stages: tiles of 64 tokens in its ring.
    """

    n: int
    dy: str
    d_out: bool
    slab: int
    stages: int
    blocks: int


def wgmma_configs(n: int, dy: str, d_out: bool) -> dict[ProjectBackwardWgmmaConfig, int]:
    """Configurations of the backward of a projection on TMA and WGMMA.

    Each with its cost of an element in full rounds, in any unit, as an H200 had it.
    """
    kinds = {(128, 2, 2): 165, (64, 2, 3): 173}
    if not (dy or d_out):
        kinds = {(128, 2, 3): 106, (64, 2, 5): 115, (128, 3, 2): 117}
    return {ProjectBackwardWgmmaConfig(n, dy, d_out, *kind): cost for kind, cost in kinds.items()}


def project_backward_wgmma_config(
    n: int, dy: str, d_out: bool, chunks: int, k: int, sms: int
) -> ProjectBackwardWgmmaConfig:
    """Configuration whose CTAs fill rounds of ``sms`` SMs at the least cost.

    No bit depends on it.
    """
    costs = wgmma_configs(n, dy, d_out)

    def total(chosen: ProjectBackwardWgmmaConfig) -> int:
        resident = sms * chosen.blocks
        rounds = -(-chunks * -(-k // chosen.slab) // resident)
        return rounds * resident * chosen.slab * costs[chosen]

    return min(costs, key=total)


@dataclass(frozen=True)
class CoefficientsConfig:
    """One compiled SM90 kernel of tokens' coefficients, or of their gradients.

    source: ``"chunks"``, sums over chunks; ``"h"``, H and ms; ``"z"``, logits of Sinkhorn.
    gate, sinkhorn: what is made of it.  iterations: whose sums a backward keeps in shared memory.
    packed: whether a forward loads a token's H, or logits, 16 bytes at a time.
    """

    n: int
    source: str
    gate: bool
    sinkhorn: bool
    form: str = "log"
    backward: bool = False
    iterations: int = 0
    packed: bool = False


@dataclass(frozen=True)
class SumConfig:
    """One compiled SM90 kernel of sums over tokens: of dpsi (``norm``: with a norm_weight), or of
    parts of vectors."""

    weights: bool
    norm: bool = False
