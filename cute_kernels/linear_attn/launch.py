"""Launch linear attention on SM90, and the catalogue of its kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from ..compile import cache
from ..compile.kernel import Entry, Expect, Kernel
from .config import DELTA_BLOCK, DELTA_CHUNK, DELTA_GPU_SIZES, DTYPE_NAMES
from .device.walks import BLOCK, ROWS, DeltaConfig, DeltaGradientConfig, DeltaStepConfig
from .tensors import DeltaGradients, DeltaRecord, DeltaRule, DeltaSaved, Last, Sequences
from .triton import delta, delta_backward
from .triton.delta_step import advance

assert (ROWS, BLOCK) == (DELTA_CHUNK, DELTA_BLOCK)
#: Bytes that TMA's addresses and strides are multiples of.
_ALIGN = 16


def delta_rule(
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    out: torch.Tensor,
    last: Last | None,
    saved: DeltaSaved,
) -> None:
    """SM90 implementation of `cpu_delta.delta_rule`: one kernel goes through the chunks."""
    operands = addressable(operands)
    q, k, v, _, beta, initial = operands
    scores = torch.empty_like(saved.inner)
    delta.inside_chunks(operands, sequences, scale, saved, scores)
    chosen = DeltaConfig(k.shape[2], DTYPE_NAMES[beta.dtype], initial is not None, last is not None)
    offsets, slots = _offsets(sequences, q.device)
    kernel(chosen)(
        q, k, v, saved.inner, scores, saved.decay, beta, out, saved.u, saved.states, initial,
        None if last is None else last.states, offsets, scale, -1 if last is None else last.lag,
        slots,
    )  # fmt: skip


def delta_rule_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    gradients: DeltaGradients,
) -> None:
    """SM90 implementation of `cpu_delta.delta_rule_backward`: likewise."""
    d_out = d_out if _is_addressable(d_out) and d_out.stride(2) == 1 else _copied(d_out)
    if d_final is not None and not _is_addressable(d_final):
        d_final = _copied(d_final)
    slopes, operands = (d_out, d_final), addressable(operands)
    delta_backward.go_back(slopes, operands, sequences, scale, saved, gradients, _chain, False)


def _chain(
    links: delta_backward.Links,
    beta: torch.Tensor,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    _: object,
) -> None:
    q, k = links.q, links.k
    chosen = DeltaGradientConfig(
        k.shape[2], DTYPE_NAMES[beta.dtype], links.d_initial is not None, links.d_final is not None
    )
    offsets, slots = _offsets(sequences, q.device)
    kernel(chosen)(
        links.d_out, q, k, links.du, saved.inner, saved.decay, beta, links.dr, links.d_states,
        links.d_final, links.d_initial, offsets, scale, slots,
    )  # fmt: skip


def delta_step(
    operands: DeltaRule,
    length: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    record: DeltaRecord,
) -> None:
    """SM90 implementation of `triton.delta_step.delta_step`."""
    q, k, v, g, beta, _ = addressable(operands)
    state = record.tensors[0]
    count = len(v) // length if offsets is None else len(offsets) - 1
    scratch = state, record.rounded
    if record.drafts:
        scratch = tuple(t.new_empty((count, *t.shape[1:])) for t in scratch)
    offsets, slots = (t if t is None else t.long() for t in (offsets, slots))
    chosen = DeltaStepConfig(k.shape[2], v.shape[2], DTYPE_NAMES[beta.dtype])
    counters = record.grid, record.length, record.made, record.rounded_at
    kernel(chosen)(
        q, k, v, g, beta, out, state, record.rounded, *scratch,
        *record.tensors[1:], *record.derived,
        record.grid if offsets is None else offsets, record.grid if slots is None else slots,
        *counters, scale, count, 0 if offsets is not None else length, int(slots is not None),
        record.drafts, record.rows,
    )  # fmt: skip
    advance(count, length, offsets, slots, record, rounded=True)


def addressable(operands: DeltaRule) -> DeltaRule:
    """The operands as TMA takes them: addresses and strides in whole 16 bytes."""
    operands = delta.loadable(operands)
    copies = {
        name: _copied(t)
        for name in ("q", "k", "v", "initial")
        if (t := getattr(operands, name)) is not None and not _is_addressable(t)
    }
    return operands._replace(**copies)


def _copied(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _is_addressable(t: torch.Tensor) -> bool:
    whole = _ALIGN // t.element_size()
    return not t.data_ptr() % _ALIGN and not any(step % whole for step in t.stride()[:2])


def _offsets(sequences: Sequences, device: torch.device) -> tuple[torch.Tensor, int]:
    """(Offsets int32 of sequences, slots of each one of a batch or 0)."""
    if sequences.offsets is not None:
        return sequences.offsets.int(), 0
    length = sequences.length
    ends = torch.arange(0, sequences.rows + 1, length, dtype=torch.int32, device=device)
    return ends, -(-length // DELTA_CHUNK)


@functools.cache
def kernel(chosen: DeltaConfig) -> Callable:
    """The compiled kernel of a configuration."""
    return cache.get(entry(chosen), "sm_90a")


#: Class of a configuration -> the end of its kernel's name.
_KERNELS = {
    DeltaConfig: "delta_sm90",
    DeltaGradientConfig: "delta_bwd_sm90",
    DeltaStepConfig: "delta_step_sm90",
}


def entry(chosen: DeltaConfig) -> Kernel:
    """The cache and catalogue entry of one configuration."""
    return Kernel.in_file(__package__, _KERNELS[type(chosen)], chosen)


def configs() -> Iterator[DeltaConfig]:
    """Every configuration that can be chosen."""
    states, betas = (False, True), ("bf16", "fp32")
    for options in itertools.product(DELTA_GPU_SIZES, betas, states, states):
        yield DeltaConfig(*options)
        yield DeltaGradientConfig(*options)
    for options in itertools.product(DELTA_GPU_SIZES, DELTA_GPU_SIZES, betas):
        yield DeltaStepConfig(*options)


def catalogue() -> Iterator[Entry]:
    """Every kernel, and what its machine code must be."""
    for chosen in configs():
        products = tuple(sorted({"64x64x16", f"64x{chosen.keys}x16"}))
        if isinstance(chosen, DeltaStepConfig):
            products = ("16816",)  # of mma.sync
        yield Entry(entry(chosen), "A", Expect(products, 255, 227 * 1024))
