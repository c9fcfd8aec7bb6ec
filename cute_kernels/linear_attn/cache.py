"""Caches of hybrid layers for decoding: a state before the open chunk, and the rows since.

Rows of a chunk need all rows before them in it, so a step goes on from the state before the
open chunk and from its rows: a row has the bytes that it has in one pass, whatever pieces it came
in.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch

from ..arch import CPU, CUTE_SM90
from ..errors import ArgumentValueError, DtypeError, expected
from ..runtime import checking, dispatch
from . import checks, op_delta, op_selective, op_ssd
from .config import DELTA_CHUNK, SSD_CHUNK
from .rings import Pieces, Ring, pieces_of, sequence_of
from .tensors import DeltaRecord, DeltaRule, Sequences

#: The rows that are computed, [1, N, ...]; the states before the open chunks; where its sequences
#: begin and the last one ends -> (rows [1, N, ...], the states behind the last whole chunks).
Scan = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LayerCache:
    """The record of one layer, whatever its rule; see `LinearAttentionCache`, which makes it.

    Attributes:
        state: [slots, heads, ...], fp32, behind the last chunk that is whole whatever is dropped.
        grid: [slots], int64, rows behind which ``state`` is: a multiple of ``chunk``.
        length, conv_length: [slots], int64, rows that the rule and the convolution have seen.
        spare: [slots], int64, rows that may yet be dropped.
        chunk: Rows of a chunk of the rule.
    """

    chunk: int
    _names: tuple[str, ...] = ("state", "grid", "length", "conv_length", "spare")

    def __init__(
        self,
        slots: int,
        state: tuple[int, ...],
        rows: Sequence[tuple[tuple[int, ...], torch.dtype]],
        conv: tuple[int, int],
        drafts: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        """state: Shape of a state.  rows: (shape, dtype) of each operand that is kept."""
        channels, width = conv
        self.drafts, self.width = drafts, width
        self.state = torch.zeros(slots, *state, dtype=torch.float32, device=device)
        self.grid, self.length, self.conv_length, self.spare = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._kept = [Ring(slots, self._ring_rows(drafts), *each, device) for each in rows]
        #: Of as many rows as those: what steps make of them, which a subclass may keep.
        self._derived: list[Ring] = []
        self._conv = Ring(slots, width - 1 + drafts, (channels,), dtype, device)

    @torch.no_grad()
    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The next rows of `causal_conv1d_fn`; x [B, D, T], or a pack with ``cu_seqlens``.

        slots: [sequences], of each one, all different; None: sequence i has slot i.
        """
        from .api import causal_conv1d_fn

        if weight.shape[1] != self.width:
            raise ArgumentValueError(expected("weight", f"width {self.width}", weight.shape[1]))
        self._check("x", x.mT, cu_seqlens, slots)
        pieces = pieces_of(x.mT, cu_seqlens)
        slot = self._slots(pieces, slots)
        start = self.conv_length[slot]
        initial = self._last_inputs(slot).to(x.dtype).mT
        out = causal_conv1d_fn(
            x, weight, bias, initial, activation=activation, cu_seqlens=cu_seqlens
        )
        end = start + pieces.count
        position = start[pieces.sequence] + pieces.place
        keep = pieces.inside & (position >= end[pieces.sequence] - self._conv.rows)
        rows = x.transpose(1, 2).flatten(0, 1)
        self._conv.write(slot[pieces.sequence], position, keep, rows)
        self.conv_length[slot] = end
        return out

    def boundary(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `resume` needs of slots behind whole chunks: their inputs and states.

        Inputs of the convolution [S, taps - 1, D], the last ones; states [S, heads, ...].
        """
        return self._last_inputs(slots), self.state[slots]

    def resume(
        self, slots: torch.Tensor, length: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor
    ) -> None:
        """Let slots go on behind ``length`` rows [S], whole chunks, from what `boundary` gave."""
        for counter in (self.grid, self.length, self.conv_length):
            counter[slots] = length
        self.state[slots] = state.view(len(slots), *self.state.shape[1:])
        position = self._tail(length).flatten()
        rows = inputs.reshape(len(position), -1)
        self._conv.write(slots.repeat_interleave(self.width - 1), position, position >= 0, rows)
        self._goes_on(slots, length)

    def _tail(self, length: torch.Tensor) -> torch.Tensor:
        """Positions [S, taps - 1] of the last inputs of ``length`` [S] rows."""
        return length[:, None] + torch.arange(1 - self.width, 0, device=length.device)

    def _last_inputs(self, slots: torch.Tensor) -> torch.Tensor:
        """The last inputs of the convolution [S, taps - 1, D]; 0 before the first one."""
        position = self._tail(self.conv_length[slots])
        inputs = self._conv.read(slots[:, None], position)
        return torch.where((position < 0)[..., None], 0, inputs)

    def _extend(
        self,
        kept: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor | None],
        cu_seqlens: torch.Tensor | None,
        slots: torch.Tensor | None,
        scan: Scan,
    ) -> torch.Tensor:
        """Append the next rows [B, T, ...], and return what the rule gives for them.

        kept, others: Its operands that later rows read, and those that they do not.
        """
        batch, length = kept[0].shape[:2]
        self._check("rows", kept[0], cu_seqlens, slots)
        pieces = pieces_of(kept[0], cu_seqlens)
        for ring, operand in zip(self._kept, kept, strict=True):
            if torch.promote_types(ring.data.dtype, operand.dtype) != ring.data.dtype:
                want = f"{ring.data.dtype}, that of the cache, or one that it holds"
                raise DtypeError(expected("rows", want, operand.dtype))
        slot = self._slots(pieces, slots)
        base, start = self.grid[slot], self.length[slot]
        self._goes_on(slot, start)
        opened = start - base
        offsets = torch.nn.functional.pad((opened + pieces.count).cumsum(0), (1, 0))

        # Row r of what is computed is at position p from the grid on: an old row, or a new one.
        total = batch * length + len(slot) * (self._kept[0].rows - 1)
        r = torch.arange(total, device=slot.device)
        s = sequence_of(r, offsets)
        p = r - offsets[s]
        old = p < opened[s]
        new = torch.where(old | (r >= offsets[-1]), 0, pieces.first[s] + p - opened[s])

        def rows(ring: Ring, operand: torch.Tensor) -> torch.Tensor:
            after = operand.flatten(0, 1)[new]
            before = ring.read(slot[s], base[s] + p).to(after.dtype)
            return torch.where(old.view(-1, *[1] * (after.dim() - 1)), before, after)[None]

        operands = [rows(*pair) for pair in zip(self._kept, kept, strict=True)]
        operands += [None if t is None else t.flatten(0, 1)[new][None] for t in others]
        out, state = scan(operands, self.state[slot], offsets)
        grid = base + (offsets.diff() - self.drafts).clamp(min=0) // self.chunk * self.chunk
        slot_of_row, position = slot[pieces.sequence], start[pieces.sequence] + pieces.place
        keep = pieces.inside & (position >= grid[pieces.sequence])
        for ring, operand in zip(self._kept, kept, strict=True):
            ring.write(slot_of_row, position, keep, operand.flatten(0, 1))
        self.state[slot], self.grid[slot] = state, grid
        self.length[slot] = start + pieces.count
        self._appended(slot, pieces.count)
        row = offsets[pieces.sequence] + opened[pieces.sequence] + pieces.place
        return out[0][row].unflatten(0, (batch, length))  # 0 of rows behind the pack

    def _goes_on(self, slot: torch.Tensor, start: torch.Tensor) -> None:
        """Let rows from ``start`` on be others than they were."""

    def _appended(self, slot: torch.Tensor, count: torch.Tensor) -> None:
        """Let new rows be dropped, and old ones that still could be, up to ``drafts``."""
        if self.drafts:
            self.spare[slot] = (self.spare[slot] + count).clamp(max=self.drafts)

    def _select(self, slots: torch.Tensor, drafts: int) -> LayerCache:
        new = copy.copy(self)
        new.drafts = drafts
        for name, t in zip(self._names, self._each(), strict=True):
            setattr(new, name, t[slots])
        new.spare = new.spare * 0
        # Rows that could be dropped are still behind the state.
        rows = max(self._ring_rows(drafts), self._kept[0].rows)
        new._kept, new._derived = (
            [ring.select(slots, rows, new.length) for ring in rings]
            for rings in (self._kept, self._derived)
        )
        new._conv = self._conv.select(slots, self.width - 1 + drafts, new.conv_length)
        return new

    def _ring_rows(self, drafts: int) -> int:
        """Rows of a ring: an open chunk, drafts behind it, and the next step's row and drafts."""
        return self.chunk + 2 * drafts

    def _check(
        self,
        name: str,
        rows: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        slots: torch.Tensor | None,
    ) -> None:
        """Check where the sequences of the argument ``name`` [B, T, ...] are, and their slots."""
        count = checks.count_of(cu_seqlens, name, rows)
        if cu_seqlens is not None and checking.readable(cu_seqlens) is not None:
            Sequences(rows.shape[1], 0, cu_seqlens).bounds()
        if slots is not None:
            checks.slots("slots", slots, count, "the cache", self.length)
        elif count > len(self.length):
            want = f"a slot for each of {count} sequences"
            raise ArgumentValueError(expected("slots", want, len(self.length)))

    def _slots(self, pieces: Pieces, slots: torch.Tensor | None) -> torch.Tensor:
        if slots is None:
            return torch.arange(len(pieces.first), device=self.length.device)
        return slots.long()

    def _each(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self._names]

    def _rings(self) -> list[Ring]:
        return [*self._kept, *self._derived, self._conv]


class DeltaRuleCache(LayerCache):
    """The record of a layer of the gated delta rule: a state [HV, K, V], and k, v, g, beta.

    On a GPU it has, of rows before ``made`` [slots], also what steps make of them, and on SM90 the
    state ``rounded``: see `DeltaRecord`.
    """

    chunk = DELTA_CHUNK
    #: Whether gates are by channel: Kimi delta attention.
    channels = False
    _names = (*LayerCache._names, "made", "rounded", "rounded_at")

    def __init__(self, slots: int, heads: tuple[int, int], sizes: tuple[int, int], **others):
        (k_heads, v_heads), (k, v), dtype = heads, sizes, others["dtype"]
        of_g = ((v_heads, k) if self.channels else (v_heads,)), torch.float32
        rows = ((k_heads, k), dtype), ((v_heads, v), dtype), of_g, ((v_heads,), torch.float32)
        super().__init__(slots, (v_heads, k, v), rows, **others)
        self.made, self.rounded_at = (torch.zeros_like(self.length) for _ in range(2))
        on_sm90 = not self.channels and _steps_on_sm90(self.made.device, dtype)
        self.rounded = self.state.new_empty(slots, v_heads, k * v if on_sm90 else 0, dtype=dtype)
        shapes = ((v_heads, v), (v_heads, v), (v_heads, DELTA_CHUNK))
        shapes = () if self.channels or not self.made.is_cuda else shapes
        size = slots, self._kept[0].rows
        self._derived = [Ring(*size, shape, dtype, self.made.device) for shape in shapes]

    def _ring_rows(self, drafts: int) -> int:
        """Rows of a ring in whole chunks, so that the rows of one are neighbours."""
        return -(-super()._ring_rows(drafts) // self.chunk) * self.chunk

    def _goes_on(self, slot: torch.Tensor, start: torch.Tensor) -> None:
        self.made[slot] = torch.minimum(self.made[slot], start)
        self.rounded_at[slot] = 0

    @torch.no_grad()
    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The next rows of `chunk_gated_delta_rule` or `chunk_kda`, whose arguments these are.

        Several rows of a sequence at once are prefill or drafts; `LinearAttentionCache.rollback`
        drops the last ones again.  Nothing is read on the host but a pack's offsets on the CPU.

        Returns:
            o [B, T, HV, V], with the bytes of one pass over the whole sequence.
        """
        checking.operand("g", g, "[B, T, HV, K]" if self.channels else "[B, T, HV]")
        if self._is_step(q, v):
            return self._step(DeltaRule(q, k, v, g, beta, None), scale, cu_seqlens, slots)

        def scan(operands, state, offsets):
            k, v, g, beta, q = operands
            out, state, *_ = op_delta.gated_delta_rule(
                q, k, v, g, beta, state, offsets, scale, True, self.drafts
            )
            return out, state

        return self._extend((k, v, g, beta), (q,), cu_seqlens, slots, scan)

    def _is_step(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether new rows find room beside the old ones: one launch does it all, on a GPU."""
        on_gpu = op_delta.backend(v.device, v.dtype) != CPU and not self.channels
        return on_gpu and q.dtype == self._kept[0].data.dtype and v.shape[1] <= self.drafts + 1

    def _step(
        self,
        operands: DeltaRule,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        checks.delta_rule(operands, cu_seqlens, scale)
        q, v = operands.q, operands.v
        self._check("v", v, cu_seqlens, slots)
        # Rows behind a pack are zeros.
        make = torch.empty_like if cu_seqlens is None else torch.zeros_like
        out = make(v, memory_format=torch.contiguous_format)
        rings, derived = (tuple(r.data for r in each) for each in (self._kept, self._derived))
        record = DeltaRecord(
            (self.state, *rings), derived, self.rounded, self.grid, self.length, self.made,
            self.rounded_at, self._kept[0].rows, self.drafts,
        )  # fmt: skip
        dispatch.launcher("gated_delta_step", v.device, v.dtype)(
            DeltaRule(*(t.flatten(0, 1) for t in operands[:5]), None),
            v.shape[1],
            cu_seqlens,
            slots,
            op_delta.scale_of(q, scale),
            out.flatten(0, 1),
            record,
        )
        if self.drafts:
            pieces = pieces_of(v, cu_seqlens)
            self._appended(self._slots(pieces, slots), pieces.count)
        return out


def _steps_on_sm90(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the SM90 kernel makes the steps of a cache."""
    return dtype == torch.bfloat16 and op_delta.backend(device, dtype) == CUTE_SM90


class KdaCache(DeltaRuleCache):
    """The record of a layer of Kimi delta attention, whose g is [HV, K]."""

    channels = True


class StateSpaceCache(LayerCache):
    """The record of a layer of Mamba-2: a state [H, P, N], and x, dt, B."""

    chunk = SSD_CHUNK

    def __init__(self, slots: int, heads: tuple[int, int], sizes: tuple[int, int], **others):
        (groups, heads), (n, p), dtype = heads, sizes, others["dtype"]
        rows = ((heads, p), dtype), ((heads,), torch.float32), ((groups, n), dtype)
        super().__init__(slots, (heads, p, n), rows, **others)

    @torch.no_grad()
    def mamba_chunk_scan_combined(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        **options: object,
    ) -> torch.Tensor:
        """The next rows of `mamba_chunk_scan_combined`, whose arguments these are.

        As `DeltaRuleCache.gated_delta_rule`.  ``options``: D, z, dt_bias, dt_softplus, dt_limit,
        as in each call.
        """
        D, z, dt_bias = (options.pop(name, None) for name in ("D", "z", "dt_bias"))
        steps = checks.step_options(
            options.pop("dt_softplus", False), options.pop("dt_limit", (0.0, float("inf")))
        )
        if options:
            checking.no_other_arguments("mamba_chunk_scan_combined", options, checks.SSD_NAMES)

        def scan(operands, state, offsets):
            x, dt, B, C, z = operands
            out, state, *_ = op_ssd.ssd_scan(
                x, dt, A, B, C, D, z, dt_bias, state, offsets, None, None, None, *steps, True,
                self.drafts,
            )  # fmt: skip
            return out, state

        return self._extend((x, dt, B), (C, z), cu_seqlens, slots, scan)


class SelectiveScanCache(StateSpaceCache):
    """The record of a layer of Mamba: a channel is a head of P = 1, and each row ends a chunk."""

    chunk = 1

    @torch.no_grad()
    def selective_scan(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        **options: object,
    ) -> torch.Tensor:
        """The next rows of `selective_scan`, whose arguments these are.

        As `DeltaRuleCache.gated_delta_rule`.  ``options``: D, z, delta_bias, delta_softplus, as in
        each call.
        """
        D, z, delta_bias = (options.pop(name, None) for name in ("D", "z", "delta_bias"))
        steps = checks.step_options(
            options.pop("delta_softplus", False), (-math.inf, math.inf), "delta_softplus"
        )
        if options:
            checking.no_other_arguments("selective_scan", options)

        def scan(operands, state, offsets):
            u, delta, B, C, z = (None if t is None else t.movedim(1, -1) for t in operands)
            out, state, *_ = op_selective.selective_scan(
                u[:, :, 0], delta, A, B, C, D, z, delta_bias, state[:, :, 0], offsets, None, None,
                None, *steps, True, self.drafts,
            )  # fmt: skip
            return out.mT, state[:, :, None]

        B, C = (t[:, None] if t.dim() == 3 else t for t in (B, C))
        u, delta, B, C, z = (None if t is None else t.movedim(-1, 1) for t in (u, delta, B, C, z))
        return self._extend((u[..., None], delta, B), (C, z), cu_seqlens, slots, scan).mT


class LinearAttentionCache:
    """Cache of layers of the gated delta rule, of KDA or of Mamba, between calls.

    A layer's record has, for each slot, the state before the open chunk of 64 rows (Mamba-2: 128),
    the rows since (k, v, g, beta; x, dt, B), and the last inputs of its convolution.  A step
    goes on from these: training, prefill in any pieces, single rows and drafts have the same bytes.

    Args:
        layers: Number of layers.
        slots: Sequences at a time.
        heads: (H of q and k, HV of v); of Mamba-2 (G of B and C, H of x).
        sizes: (K, V); of Mamba-2 (N, P).
        conv: (channels, taps) of the convolution: 2 H K + HV V and 4 in Qwen3-Next, 2 G N + H P
            and 4 in Mamba-2.
        drafts: Rows of the last call that `rollback` may drop again.
        dtype: Of q, k, v, or x, B, C, and of the convolution's inputs.
        device: Of the record; as `torch.zeros`.

    Layers have ``causal_conv1d`` and ``gated_delta_rule``, whose g is by channel in `of_kda`;
    those of `of_mamba2` ``mamba_chunk_scan_combined``, and those of `of_mamba` ``selective_scan``:
    a channel is a head of P = 1, and its state is behind the last row that cannot be dropped.

    Memory of a layer and slot: 4 HV K V bytes of state, on SM90 6; 64 + 2 drafts rows, as whole
    chunks, of H K + HV V elements, on a GPU HV (2 V + 64) more, and 8 HV bytes, 4 HV (K + 1) of
    `of_kda`; taps - 1 + drafts rows of the convolution's channels.  Of Mamba-2 4 H P N bytes; 128 +
    2 drafts rows of G N + H P elements and 4 H bytes.

    Guarantees: as `chunk_gated_delta_rule`, `mamba_chunk_scan_combined`, `selective_scan` and
    `causal_conv1d_fn`, whose bytes the rows have.

    Raises:
        ArgumentValueError: a size is below its least value, or too many rows are dropped.

    Example:
        >>> cache = ck.LinearAttentionCache(1, 2, heads=(2, 4), sizes=(16, 16), conv=(128, 4))
        >>> q, k = (torch.nn.functional.normalize(torch.randn(2, 9, 2, 16), dim=-1) for _ in "qk")
        >>> rows = q, k, torch.randn(2, 9, 4, 16), -torch.rand(2, 9, 4), torch.rand(2, 9, 4)
        >>> prefill = cache[0].gated_delta_rule(*(t[:, :8] for t in rows))
        >>> row = cache[0].gated_delta_rule(*(t[:, 8:] for t in rows))
        >>> whole, _ = ck.chunk_gated_delta_rule(*rows)
        >>> bool((torch.cat([prefill, row], 1) == whole).all())
        True
    """

    _record: type[LayerCache] = DeltaRuleCache

    def __init__(
        self,
        layers: int,
        slots: int,
        *,
        heads: tuple[int, int],
        sizes: tuple[int, int],
        conv: tuple[int, int],
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        sizes_of = ("heads", heads), ("sizes", sizes), ("conv", conv)
        numbers = {"layers": layers, "slots": slots, "drafts": drafts} | {
            f"{name}[{i}]": number for name, pair in sizes_of for i, number in enumerate(pair)
        }
        for name, number in numbers.items():
            least = {"drafts": 0, "conv[1]": 2}.get(name, 1)
            if checking.integer(name, number) < least:
                raise ArgumentValueError(expected(name, f"at least {least}", number))
        self.slots = slots
        options = {"conv": conv, "drafts": drafts, "dtype": dtype, "device": device}
        self.layers = [self._record(slots, heads, sizes, **options) for _ in range(layers)]

    @staticmethod
    def of_mamba2(*args: int, **options: object) -> LinearAttentionCache:
        """Make a cache of layers of Mamba-2, by the same arguments."""
        return _Mamba2Cache(*args, **options)

    @staticmethod
    def of_mamba(*args: int, **options: object) -> LinearAttentionCache:
        """Make a cache of layers of Mamba: heads (G, D) and sizes (N, 1), as of Mamba-2."""
        return _MambaCache(*args, **options)

    @staticmethod
    def of_kda(*args: int, **options: object) -> LinearAttentionCache:
        """Make a cache of layers of Kimi delta attention, by the same arguments."""
        return _KdaCache(*args, **options)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def rollback(self, rows: int, slots: torch.Tensor | None = None) -> None:
        """Drop the last ``rows`` rows of slots, all of them by default, in every layer.

        At most ``drafts`` rows can be dropped in all, until a call appends as many again.  On a GPU
        too many end the program, as the check does not wait.
        """
        which = slice(None) if slots is None else slots.long()
        for layer in self.layers:
            if not 0 <= checking.integer("rows", rows) <= layer.drafts:
                raise ArgumentValueError(expected("rows", f"from 0 to {layer.drafts}", rows))
            spare = layer.spare[which]
            want = f"{rows} or more rows that can be dropped in each slot"
            checking.values("rows", spare, lambda spare: spare >= rows, want)
            if spare.is_cuda:
                torch._assert_async((spare >= rows).all(), f"rows: expected {want}")
        for layer in self.layers:
            for counter in (layer.length, layer.conv_length, layer.spare):
                counter[which] -= rows

    def reset(self, slots: torch.Tensor | None = None) -> None:
        """Forget the sequences of slots, all of them by default."""
        which = slice(None) if slots is None else slots.long()
        for layer in self.layers:
            for t in layer._each():
                t[which] = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots ``source`` onto slots ``target``: a prefix, a beam."""
        source, target = source.long(), target.long()
        for layer in self.layers:
            for t in layer._each():
                t[target] = t[source]
            for ring in layer._rings():
                ring.copy(source, target)

    def select(self, slots: torch.Tensor, drafts: int | None = None) -> LinearAttentionCache:
        """Return a cache of slots, in their order; one may come several times.

        drafts: As of the cache, or another number from now on; rows before cannot be dropped.
        """
        new = copy.copy(self)
        slots = slots.to(self.layers[0].length.device).long()
        new.slots = len(slots)
        new.layers = [
            layer._select(slots, layer.drafts if drafts is None else drafts)
            for layer in self.layers
        ]
        return new


class _Mamba2Cache(LinearAttentionCache):
    """Class of `LinearAttentionCache.of_mamba2`."""

    _record = StateSpaceCache


class _MambaCache(LinearAttentionCache):
    """Class of `LinearAttentionCache.of_mamba`."""

    _record = SelectiveScanCache


class _KdaCache(LinearAttentionCache):
    """Class of `LinearAttentionCache.of_kda`."""

    _record = KdaCache
