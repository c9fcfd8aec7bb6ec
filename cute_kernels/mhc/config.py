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


def vector_channels(n: int, layout: str) -> int:
    """Channels of a vector of the streams: eight elements of a row that are neighbours."""
    return 8 // n if layout == "cn" else 8


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's sums over channels: from zero in chunks of so many, each half onto half."""

    channels: int = 512
    exp2: tuple[float, ...] = ieee.EXP2


CPU = CpuPlan()


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
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

    expand: whether the streams are made of x on the way, ``bias``: with one.
    """

    dtype: str
    n: int
    layout: str
    precision: str
    expand: bool = False
    bias: bool = False
    warps: int = 12
    blocks: int = 1


@dataclass(frozen=True)
class CombineConfig:
    """One compiled SM90 kernel of expand_combine (``bias``: with one), or of aggregate.

    collapse: whether an expand_combine collapses its streams as well.
    """

    dtype: str
    n: int
    layout: str
    expand: bool
    bias: bool = False
    collapse: bool = False
    threads: int = 256
    ahead: int = 4


#: Sites that one kernel of multilayer_recompute takes, at most.
MOST_SITES = 4


@dataclass(frozen=True)
class RecomputeConfig:
    """One compiled SM90 kernel of multilayer_recompute: 2 to `MOST_SITES` sites, all with a bias or
    none."""

    dtype: str
    n: int
    layout: str
    sites: int
    bias: bool
    threads: int = 128


@dataclass(frozen=True)
class ReduceConfig:
    """One compiled SM90 kernel of the sums over channels of a backward.

    x, dy, d_out, f, bias: which of them are read.  dx: whether it is made.
    tokens: of one CTA, whose dbias it adds.
    """

    dtype: str
    n: int
    layout: str
    x: bool
    dy: bool
    d_out: bool
    f: bool
    bias: bool
    dx: bool
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
    precision: str
    dy: str
    d_out: bool
    warps: int = 2
    blocks: int = 5


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

    Each with its cost of an element in full rounds, relative, on an H200.
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
    """

    n: int
    source: str
    gate: bool
    sinkhorn: bool
    form: str = "log"
    backward: bool = False
    iterations: int = 0


@dataclass(frozen=True)
class SumConfig:
    """One compiled SM90 kernel of sums over tokens: of dpsi (``norm``: with a norm_weight), or of
    parts of vectors."""

    weights: bool
    norm: bool = False
