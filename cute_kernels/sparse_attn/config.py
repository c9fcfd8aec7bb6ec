"""Every constant that the bits of block-sparse attention depend on, and the schedule of "auto"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch

from .. import arch
from ..contracts import BATCH_INVARIANT, RUN_TO_RUN, SCHEDULE_INVARIANT
from ..schedulers.masks.mask import BlockMask
from ..schedulers.model.machines import resolve
from ..schedulers.order.schedule import Schedule
from ..schedulers.version import VERSION
from .triton.plan import TRITON

#: The head sizes that are taken: of q and k -> of v and out.
VALUE_DIMS: Mapping[int, int] = {64: 64, 96: 96, 128: 128, 192: 128, 256: 256}
#: Those of q and k.
HEAD_DIMS = tuple(VALUE_DIMS)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

#: Whose constants "auto" reckons with on a GPU, by head size.
MACHINES = {d: f"cute_sm90_d{128 if d == 96 else d}" for d in HEAD_DIMS}

_KEPT = frozenset({RUN_TO_RUN, BATCH_INVARIANT, SCHEDULE_INVARIANT})
#: ``batch_invariant`` is the forward's: a gradient of k and v is a sum over rows.
KEPT: Mapping[str, frozenset[str]] = dict.fromkeys((arch.CUTE_SM90, arch.TRITON, arch.CPU), _KEPT)


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled forward kernel of SM90; ``form``: see ``masks``."""

    dtype: str
    head_dim: int
    form: str
    softcap: bool = False
    #: Whether a row's sum begins with a sink.
    sinks: bool = False
    #: Whether sequences are read where they lie in a pack.
    packed: bool = False
    #: Warpgroups of 64 query rows each.
    consumers: int = 2

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    @property
    def parts(self) -> int:
        """Pieces of a block of K, and of one of V: two halves where two blocks do not fit."""
        return 2 if self.head_dim == 256 else 1

    @property
    def kv_stages(self) -> int:
        """Parts of K, and of V, in shared memory: as many as fit, up to four for two consumers."""
        if self.consumers == 3:
            return {64: 6, 96: 3}[self.head_dim]
        return {64: 4, 96: 4, 128: 3}.get(self.head_dim, 2)

    @property
    def kernel(self) -> str:
        """Name of the kernel's file."""
        return "fwd_wide" if self.parts > 1 else "fwd_no_overlap" if self.no_overlap else "fwd"

    @property
    def no_overlap(self) -> bool:
        """Whether O += P V of a block ends before S of the next one begins, for want of registers.

        O, S and P of heads of 256 take 224 of 240; those of 96 take 144 of three consumers' 160.
        """
        return self.parts > 1 or (self.consumers == 3 and self.head_dim > 64)

    @property
    def max_skipped_steps(self) -> int | None:
        """Steps that a consumer may hold V of its last block for (``device/block_union``).

        Who awaits V holds that of another block, in another stage.  None: it never does.
        """
        return None if self.no_overlap else self.kv_stages - 2


#: Page sizes of a cache.
PAGE_SIZES = (16, 32, 64, 128, 256)


class _PagedKernel:
    """A kernel that loads pages, ``keys_per_load`` keys at a time: a page, or half of one."""

    @property
    def row_bits(self) -> int:
        """Bits for the number of a load in its page."""
        return 1 if self.keys_per_load == 128 else 0


class _PagedHeads(_PagedKernel):
    """One that has all columns of a head of ``head_dim``."""

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM."""
        return 2 if self.head_dim <= 128 else 1


@dataclass(frozen=True)
class PagedConfig(_PagedHeads):
    """One compiled kernel over paged caches."""

    dtype: str
    head_dim: int
    keys_per_load: int
    softcap: bool = False

    @property
    def k_stages(self) -> int:
        """Blocks of K in shared memory."""
        return {64: 3, 96: 2, 128: 2, 192: 2, 256: 1}[self.head_dim]

    @property
    def v_stages(self) -> int:
        """Blocks of V in shared memory."""
        return {64: 3, 96: 2, 128: 1, 192: 2, 256: 2}[self.head_dim]


@dataclass(frozen=True)
class PagedScoresConfig(_PagedHeads):
    """One compiled kernel of the scores of long contexts."""

    dtype: str
    head_dim: int
    keys_per_load: int
    softcap: bool = False

    @property
    def k_stages(self) -> int:
        """Blocks of K in shared memory."""
        return {64: 6, 96: 4, 128: 3, 192: 4, 256: 3}[self.head_dim]


#: Columns of V and O that a CTA may have, by head size of V: the first where few units leave SMs.
LONG_COLUMNS: Mapping[int, tuple[int, int]] = {
    64: (16, 32),
    96: (16, 32),
    128: (16, 64),
    256: (32, 64),
}


@dataclass(frozen=True)
class PagedValuesConfig(_PagedKernel):
    """One compiled kernel of the values of long contexts; ``columns``: of V, by a CTA."""

    dtype: str
    value_dim: int
    columns: int
    keys_per_load: int

    @property
    def v_stages(self) -> int:
        """Batches of four blocks of V in shared memory."""
        return {16: 6, 32: 4, 64: 2}[self.columns]

    @property
    def by_tma(self) -> bool:
        """Whether TMA loads V: its rows are 128 bytes long."""
        return self.columns == 64

    @property
    def v_ahead(self) -> int:
        """Batches of V whose copies are in flight, where TMA does not load it."""
        return self.v_stages - 2

    @property
    def merged(self) -> int:
        """Blocks that may be multiplied as one batch of WGMMA, as far as registers go."""
        return 2 if self.columns == 64 else 4

    @property
    def score_stages(self) -> int:
        """Blocks of scores in shared memory, of each of the warps that weigh."""
        return 2 if self.columns == 16 else 1


@dataclass(frozen=True)
class BufferScoresConfig(PagedScoresConfig):
    """`PagedScoresConfig` over a key buffer; ``kv_ranges``: whether these say where keys lie."""

    keys_per_load: int = 128
    kv_ranges: bool = False


@dataclass(frozen=True)
class BufferValuesConfig(PagedValuesConfig):
    """`PagedValuesConfig` over a key buffer; ``kv_ranges``: whether these say where keys lie."""

    keys_per_load: int = 128
    kv_ranges: bool = False


@dataclass(frozen=True)
class PreConfig:
    """One compiled kernel before a backward; ``dlse``: whether lse has a gradient.

    turns: at each tile of rows; zeros: whether dQ needs them; pdl: see ``BackwardConfig``.
    """

    dtype: str
    head_dim: int
    tile_m: int
    dlse: bool = False
    packed: bool = False
    turns: int = 1
    zeros: bool = True
    pdl: bool = True


@dataclass(frozen=True)
class PostConfig:
    """One compiled kernel after a backward.

    visited: whether tiles without a visit hold nothing and are zeros; pdl: see ``BackwardConfig``.
    """

    dtype: str
    head_dim: int
    tile_m: int
    packed: bool = False
    visited: bool = False
    pdl: bool = True


@dataclass(frozen=True)
class VarlenTablesConfig:
    """One compiled kernel of the tables of a varlen batch; ``tickets``: for a backward."""

    #: The type of begins and ends.
    offsets: str
    tickets: bool


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled backward kernel of SM90; ``form``: see ``masks``.

    keys: of a ticket's block that a CTA has at a time; with 64 there are two tickets in its place.
    stages, do_stages: of Q and of dO.  dq_stages: buffers of a tile of dQ; 0: one of half a tile,
    which both halves take in turns.
    """

    dtype: str
    head_dim: int
    form: str
    ordered: bool
    tile_m: int
    softcap: bool = False
    packed: bool = False
    keys: int = 128
    stages: int = 2
    do_stages: int = 2
    #: With two stages of dS the consumers meet once a visit.
    ds_stages: int = 2
    dq_stages: int = 2
    #: Whether the visit of rank 0 stores its tile of dQ in place of adding it to zeros.
    first_stores: bool = False
    #: Whether Q and dO of a ticket's first visit are asked for before its K and V.
    rows_first: bool = True
    #: Whether dP is asked for right behind S, before dQ of the visit before is handed over.
    dp_first: bool = False
    #: Programmatic dependent launch: a kernel's CTAs come to SMs that the kernel before it leaves.
    pdl: bool = True

    @property
    def parts(self) -> int:
        """Tickets in place of one of the schedule."""
        return 128 // self.keys

    @property
    def kernel(self) -> str:
        """Name of the kernel's file."""
        return "bwd_wide" if self.parts > 1 else "bwd"

    @property
    def turns(self) -> int:
        """Turns at a tile of rows: one, or one for each half of its columns."""
        return 2 if self.dq_stages == 0 else 1


@dataclass(frozen=True)
class CpuPlan:
    """The CPU backend's blocks, and how dK and dV add the query heads of one KV head.

    ``group``: with a mask that heads share, in each visit; else per head, then over heads.
    """

    block: tuple[int, int] = (128, 128)
    group: str = "query heads ascending, in each visit or of each head's sum"


CPU = CpuPlan()


#: The form of the kernels of varlen batches, and the types of their offsets.
VARLEN_FORM = "band"
OFFSETS = ("int32", "int64")
#: Sequences of one CTA of the kernel of varlen tables.
SEQUENCES = 256
#: Key blocks of a query block, in the mean, up to which rank 0 stores a tile of 64 rows of dQ.
FEW_KEY_BLOCKS = 32
#: A number of few key blocks, and one of many: all that `configure` tells apart.
FEW_AND_MANY = 0.0, FEW_KEY_BLOCKS + 1.0


def in_flight(group: int) -> int:
    """Heads of a sequence whose columns alternate in launch order; it changes no bit.

    4 query heads, or those of one KV head: rows of more leave L2 (docs/notes/attention_sm90.md).
    """
    return max(1, 4 // group)


def configure_forward(
    dtype: str,
    head_dim: int,
    form: str,
    softcap: bool = False,
    sinks: bool = False,
    packed: bool = False,
) -> ForwardConfig:
    """Three consumers of heads below 128: their exponentials take as long as products."""
    consumers = 3 if head_dim < 128 else 2
    return ForwardConfig(dtype, head_dim, form, softcap, sinks, packed, consumers)


def configure(
    dtype: str,
    head_dim: int,
    form: str,
    ordered: bool,
    softcap: bool = False,
    packed: bool = False,
    key_blocks: float = 0.0,
) -> BackwardConfig:
    """Tiles of 128 rows for D = 64, of 64 above: with more, accumulators would spill.

    So would dK and dV of 128 keys above 128.  At D = 256 one stage of dO and one half of dQ fit.
    Above 128 dQ begins as zeros: two tickets and two threads add it.

    key_blocks: that a query block sees, in the mean; 0 where that is not known.  Bits do not
    depend on it.
    """
    tile_m = 128 if head_dim == 64 else 64
    return BackwardConfig(
        *(dtype, head_dim, form, ordered, tile_m, softcap, packed),
        keys=128 if head_dim <= 128 else 64,
        do_stages=1 if head_dim == 256 else 2,
        ds_stages=2 if head_dim <= 128 else 1,
        dq_stages={192: 1, 256: 0}.get(head_dim, 2),
        first_stores=ordered and pays_to_store_first(head_dim, key_blocks),
        # No gain above 0.2%, and 0.5% lost on full masks at D = 128, in the same measurement; wide
        # heads were not measured.
        rows_first=head_dim > 128,
    )


def backwards(dtype: str, head_dim: int, forms: Iterable[str]) -> Iterator[BackwardConfig]:
    """Every backward of a head size that `configure` can return; some of them twice."""
    flags = False, True
    for form, softcap, ordered, packed in itertools.product(forms, flags, flags, flags):
        if packed and not (ordered and form == VARLEN_FORM):
            continue
        for key_blocks in FEW_AND_MANY[: 1 if packed else 2]:
            yield configure(dtype, head_dim, form, ordered, softcap, packed, key_blocks)


def pays_to_store_first(head_dim: int, key_blocks: float) -> bool:
    """Whether ``first_stores`` saves more around a backward than it costs in its visits.

    At D = 128 it saves 70 us of zeros of 67M elements and costs 40 to 70 ns a visit: 11% faster at
    4.5 key blocks a query block, 3% at 9, even at 32, 2% slower at 64.  At D = 64 it never loses.
    Measured on an H200 (2026-11-28, 7840202): docs/notes/attention_sm90.md, "Which options pay".
    """
    return head_dim == 64 or (head_dim <= 128 and key_blocks <= FEW_KEY_BLOCKS)


def score_scale(scale: float | None, head_dim: int) -> float:
    """The factor of scores of a call; None is 1 / sqrt(head_dim)."""
    return head_dim**-0.5 if scale is None else scale


def factors(scale: float, softcap: float = 0.0) -> tuple[float, float]:
    """(c, inner) of an SM90 call, ``softcap`` 0 for none; ``softmax.cap`` takes exp2(S inner)."""
    log2_e = 1.0 / math.log(2.0)
    if softcap:
        return softcap * log2_e, 2.0 * log2_e * scale / softcap
    return scale * log2_e, 0.0


def schedule_heads(mask_heads: int, batch: int, heads: int, kv_heads: int) -> int:
    """The heads of a schedule: batch x KV heads, or query heads if they have masks of their own."""
    return batch * (kv_heads if mask_heads == 1 else heads)


def auto(mask: BlockMask, heads: int, head_dim: int, device_type: str, group: int = 1) -> Schedule:
    """The schedule that ``schedule="auto"`` means; the same one on every call.

    mask: in blocks of 128 x 128; heads: see ``schedule_heads``; group: query heads to each of them.
    On a GPU the fastest that ``schedulers.selection`` finds; on a CPU, which has no SMs to keep
    busy, shortest columns first.
    """
    if device_type == "cpu":
        from ..schedulers.order.kinds import spt

        return spt(mask, heads=heads)
    from ..schedulers.model.selection import select

    return select(mask, heads=heads, machine=MACHINES[head_dim], group=group).schedule


def contract_facts(backend: str, device: arch.Device) -> dict[str, object]:
    """Constants that a contract id covers: the orders, the roundings and the instruction family."""
    common: dict[str, object] = {
        "forward": "key blocks ascending, online softmax in base 2, P in the input dtype",
        "backward": "dK, dV by visits, dQ by ranks; dS in the input dtype; one rounding from fp32",
        "schedules": VERSION,
        "packs": "each sequence as alone under spt: key blocks descending, query blocks ascending",
    }
    if backend == arch.CUTE_SM90:
        return common | {
            "family": "wgmma.k16.f32, ex2.approx.ftz",
            "block": [128, 128],
            "row sums": "4 lanes, each its columns ascending, then a butterfly",
            "delta": "8 products a thread, 24 for Dv = 96, then a butterfly over the row's threads",
            "keys of a dq product": {
                str(d): configure("bf16", d, "none", True).keys for d in HEAD_DIMS
            },
            "dq tile rows": {str(d): configure("bf16", d, "none", True).tile_m for d in HEAD_DIMS},
            "group": "query heads one after another, ascending",
            "auto": _machines(),
        }
    if backend == arch.TRITON:
        return common | {
            "family": "tl.dot",
            "plans": {str(dim): asdict(plan) for dim, plan in TRITON.items()},
            "group": "query heads ascending, in each visit; one after another under masks by head",
            "auto": _machines(),
        }
    return common | {"family": "blas", "blocks": asdict(CPU), "threads": device.threads}


def _machines() -> dict[str, object]:
    """Facts that decide "auto" on a GPU, and with it the order of its gradients."""
    return {name: asdict(resolve(name)) for name in MACHINES.values()}
