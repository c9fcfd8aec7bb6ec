"""Launches the Triton kernels: states and gradients of blocks of logits, outputs, grids.

Logits of hidden states are made block by block, in fp32, by gemm's leaf sums.  Where a block ends
shows in no bit: a logit is a chain of its own, and sums of units are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...runtime import products
from ...runtime.operands import most_ctas
from ...runtime.triton_products import cdiv
from ...schedulers.tiles import leaves
from .. import config
from ..tensors import Head, Logits, Rows, Upstream
from . import kernel as kernels
from . import plan as plans
from .plan import TRITON


def states(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    entropy: bool,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [P, T, C]: the state of each of P parts of the head's rows.

    ``sums``: fp32 [T', V'] or None; it gets the first tokens' logits before bias and softcap.

    Holds `plan.WORKSPACE` bytes of logits at a time.  Runs on the device of ``hidden`` and its
    current stream; a first launch compiles.
    """
    with torch.cuda.device(hidden.device):
        return _states(hidden, head, rows, entropy, most_ctas(hidden.device), sums)


def states_of_logits(
    logits: torch.Tensor, layout: Logits, rows: Rows, entropy: bool
) -> torch.Tensor:
    """int64 [P, T, C] of logits [T, n] of any dtype and strides; they begin at ``place.start``."""
    with torch.cuda.device(logits.device):
        return _states_of_logits(logits, layout, rows, entropy, most_ctas(logits.device))


def gradients(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    upstream: Upstream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, V] of the dtype of ``hidden``, in ``out`` if given: the gradient of the head's logits."""
    with torch.cuda.device(hidden.device):
        return _gradients(hidden, head, rows, upstream, out)


def gradients_of_sums(
    sums: torch.Tensor, head: Head, rows: Rows, upstream: Upstream, out: torch.Tensor
) -> None:
    """``out`` [T, V] = `gradients` of kept sums [T, V], fp32 logits before bias and softcap."""
    with torch.cuda.device(sums.device):
        _launch_gradients(_columns_of(sums, head), rows, upstream, out)


def gradients_of_sums_as_sm90(
    sums: torch.Tensor, head: Head, rows: Rows, upstream: Upstream, out: torch.Tensor
) -> None:
    """`gradients_of_sums` with the bytes of the SM90 kernel (kernel_grad_sm90.py)."""
    with torch.cuda.device(sums.device):
        _launch_gradients(_columns_of(sums, head), rows, upstream, out, as_sm90=True)


def finish(
    parts: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log p, lse2, entropy or None) of states [P, T, C], with the bytes of `exact.finish`."""
    with torch.cuda.device(parts.device):
        return _finish(parts, rows)


def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` = ``gradient`` times fp32 ``factor`` [], contiguous; they may be one tensor.

    The host does not wait.  In place a factor of 1 reads and writes nothing.
    """
    with torch.cuda.device(gradient.device):
        _scale(gradient, factor, out, most_ctas(gradient.device))


def gradients_of_logits(
    logits: torch.Tensor, layout: Logits, rows: Rows, upstream: Upstream, dtype: torch.dtype
) -> torch.Tensor:
    """dlogits [T, n], contiguous, in ``dtype``, of logits [T, n] of any dtype and strides.

    Exactly 0 in rows without a target, and in columns that are padding of the vocabulary.
    """
    with torch.cuda.device(logits.device):
        return _gradients_of_logits(logits, layout, rows, upstream, dtype)


class _Columns(NamedTuple):
    """Columns of logits before bias and softcap, and where they lie."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    place: Logits


def _columns_of(sums: torch.Tensor, head: Head) -> _Columns:
    return _Columns(sums, head.bias, Logits(head.start, head.vocab, head.softcap))


def _states(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    entropy: bool,
    units: int,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Parts are of the blocks: part p of one block is added to part p of the next."""
    blocks = _Blocks(hidden, head)
    parts = _parts(min(len(hidden), plans.BLOCK_ROWS), blocks.width, units)
    out = _empty_states(hidden, parts, entropy)
    for some, columns in blocks:
        block = blocks.columns(some, columns)
        _launch_states(block, Rows(*(t[some] for t in rows)), out[:, some], entropy)
        if sums is not None:
            kept = sums[some, columns]
            kept.copy_(block.logits[: len(kept)])
    return out


def _states_of_logits(
    logits: torch.Tensor, layout: Logits, rows: Rows, entropy: bool, units: int
) -> torch.Tensor:
    out = _empty_states(logits, _parts(*logits.shape, units), entropy)
    _launch_states(_Columns(logits, None, layout), rows, out, entropy)
    return out


def _gradients(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    upstream: Upstream,
    out: torch.Tensor | None = None,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    """``interpret`` rounds outside the kernel, for Triton's interpreter on a CPU."""
    dtype = torch.float32 if interpret else hidden.dtype
    if out is None:
        out = torch.empty(len(hidden), len(head.weight), dtype=dtype, device=hidden.device)
    blocks = _Blocks(hidden, head)
    for some, columns in blocks:
        of_some = Upstream(*(None if t is None else t[some] for t in upstream))
        _launch_gradients(
            blocks.columns(some, columns), Rows(*(t[some] for t in rows)), of_some,
            out[some, columns],
        )  # fmt: skip
    return out.to(hidden.dtype)


def _gradients_of_logits(
    logits: torch.Tensor,
    layout: Logits,
    rows: Rows,
    upstream: Upstream,
    dtype: torch.dtype,
    *,
    interpret: bool = False,
) -> torch.Tensor:
    out_dtype = torch.float32 if interpret else dtype
    out = torch.empty(logits.shape, dtype=out_dtype, device=logits.device)
    _launch_gradients(_Columns(logits, None, layout), rows, upstream, out)
    return out.to(dtype)


class _Blocks:
    """Blocks (rows, columns) of a head's logits that fit the workspace, a row's one after another.

    In the order ``tree`` a block's leaves lie beside it.
    """

    def __init__(self, hidden: torch.Tensor, head: Head):
        count = 1 if head.order == "chain" else leaves.count(hidden.shape[1])
        self.hidden, self.head = hidden, head
        self.height = min(len(hidden), plans.BLOCK_ROWS)
        bytes_of_column = 4 * self.height * (count + (count > 1))
        fitting = plans.WORKSPACE // bytes_of_column // config.UNIT * config.UNIT
        self.width = min(len(head.weight), fitting)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for top in range(0, len(self.hidden), self.height):
            rows = slice(top, min(top + self.height, len(self.hidden)))
            for first in range(0, len(self.head.weight), self.width):
                yield rows, slice(first, min(first + self.width, len(self.head.weight)))

    def columns(self, rows: slice, columns: slice) -> _Columns:
        """One block's logits, fp32; the caller holds one at a time."""
        head = self.head.block(columns)
        return _columns_of(products.sums(self.hidden[rows], head.weight, head.order), head)


def _parts(tokens: int, width: int, units: int) -> int:
    """Number of vocabulary parts that fill the compute units; no bit depends on it."""
    rows, columns = TRITON.tile(tokens, True)
    wanted = cdiv(units * TRITON.programs, cdiv(tokens, rows))
    return max(1, min(wanted, cdiv(width, columns)))


def _empty_states(like: torch.Tensor, parts: int, entropy: bool) -> torch.Tensor:
    """[parts, T, C] of no columns."""
    shape = parts, len(like), config.columns_of_state(entropy)
    out = torch.zeros(shape, dtype=torch.int64, device=like.device)
    out[..., config.TOP] = config.EMPTY
    return out


def _launch_states(columns: _Columns, rows: Rows, out: torch.Tensor, entropy: bool) -> None:
    """Adds columns [T, n] to states [P, T, C], which a row of parts is cut over."""
    logits, bias, layout = columns
    t, n = logits.shape
    tile_rows, tile_columns = TRITON.tile(t, _wide(logits))
    tiles = cdiv(n, tile_columns)
    share = cdiv(tiles, len(out))
    parts = cdiv(tiles, share)
    kernels.states_kernel[(cdiv(t, tile_rows) * parts,)](
        *(logits, bias, *rows, out),
        *(t, n, layout.start, _valid(layout, n), parts, share),
        *(*logits.stride(), 0 if bias is None else bias.stride(0), out.stride(0)),
        *_cap(layout),
        ALIGN_N=_alignment(logits),
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        SOFTCAP=layout.softcap != 0,
        ENTROPY=entropy,
        STATE=out.shape[2],
        **_options(),
    )


def _launch_gradients(
    columns: _Columns,
    rows: Rows,
    upstream: Upstream,
    out: torch.Tensor,
    as_sm90: bool = False,
) -> None:
    """out [T, n], its last stride 1; ``as_sm90``: with the bytes of the SM90 kernel."""
    logits, bias, layout = columns
    t, n = logits.shape
    tile_rows, tile_columns = TRITON.tile(t, True)
    tiles = cdiv(n, tile_columns)
    kernels.gradients_kernel[(cdiv(t, tile_rows) * tiles,)](
        *(logits, bias, *rows),
        *(upstream.lse2, upstream.of_logp, upstream.of_entropy, upstream.entropy, out),
        *(t, n, layout.start, _valid(layout, n), tiles),
        *(*logits.stride(), 0 if bias is None else bias.stride(0), out.stride(0)),
        *(_cap_as_sm90(layout) if as_sm90 else (*_cap(layout), 0.0)),
        ALIGN_N=_alignment(logits),
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        SOFTCAP=layout.softcap != 0,
        AS_SM90=as_sm90,
        **_options(),
    )


def _finish(
    parts: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    parts = parts.contiguous()
    tokens, columns = parts.shape[1:]
    entropy = columns > config.WEIGHTED
    logp, lse2 = torch.empty_like(rows.scale), torch.empty_like(rows.scale)
    entropies = torch.empty_like(rows.scale) if entropy else None
    kernels.finish_kernel[(cdiv(tokens, TRITON.finished_rows),)](
        *(parts, *rows, logp, lse2, entropies),
        *(tokens, len(parts), parts.stride(0)),
        ROWS=TRITON.finished_rows,
        PARTS=TRITON.finished_parts,
        ENTROPY=entropy,
        STATE=columns,
        **_options(),
    )
    return logp, lse2, entropies


def _scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, units: int) -> None:
    elements = gradient.numel()
    blocks = cdiv(elements, TRITON.scaled_elements)
    kernels.scale_kernel[(min(blocks, 2 * TRITON.programs * units),)](
        *(gradient, factor, out, elements, blocks),
        ALIGN_N=16 if elements % 16 == 0 else 1,
        IN_PLACE=out.data_ptr() == gradient.data_ptr(),
        ELEMENTS=TRITON.scaled_elements,
        **_options(),
    )


def _valid(layout: Logits, n: int) -> int:
    """Columns that are entries of the vocabulary."""
    return min(n, max(0, layout.vocab - layout.start))


def _cap(layout: Logits) -> tuple[float, float]:
    """Factor that makes z into 2 log2(e) z / softcap, and softcap."""
    return (2.0 * config.LOG2E / layout.softcap if layout.softcap else 0.0), layout.softcap


def _cap_as_sm90(layout: Logits) -> tuple[float, float, float]:
    """Factor, softcap, and 1 / softcap, each divided in fp32 as the SM90 kernel does."""
    if not layout.softcap:
        return 0.0, 0.0, 0.0
    softcap, two_log2e = torch.tensor(
        [layout.softcap, 2.0 * config.LOG2E], dtype=torch.float32, device="cpu"
    )
    return (two_log2e / softcap).item(), layout.softcap, (1.0 / softcap).item()


def _alignment(logits: torch.Tensor) -> int:
    """A known factor of the columns; it widens loads only."""
    return 16 if logits.shape[1] % 16 == 0 and logits.stride(1) == 1 else 1


def _wide(logits: torch.Tensor) -> bool:
    """Whether Triton knows that rows begin, and end, at multiples of 16 bytes."""
    begins = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0
    return begins and _alignment(logits) == 16


def _options() -> dict[str, int | bool]:
    """The compiler options that every launch names."""
    return {"num_warps": TRITON.num_warps, "enable_fp_fusion": TRITON.fp_fusion}
