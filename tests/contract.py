"""The bitwise battery: transforms that must not change a byte, for every op that makes a promise.

A `RowOp` maps rows to rows (batch_invariant); a `SumOp` adds a stream of tokens (split_invariant).
Each transform runs the op on other surroundings and compares raw bytes with the plain run: never
``allclose``, never ``torch.equal``, which equates -0 and +0.  A failure is a JSON report with the
first differing index, both bit patterns and the seed that replays it.

Every transform has a mutant that it kills: tests/test_contract.py.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RowOp:
    """An op whose output row depends on its own input row only.

    ``run(rows [M, K])`` returns [M, N]; everything else it needs is fixed inside it.
    """

    name: str
    run: Callable[[torch.Tensor], torch.Tensor]
    width: int
    dtype: torch.dtype
    device: str = "cpu"

    def rows(self, count: int, seed: int) -> torch.Tensor:
        """Random rows with a wide range of magnitudes: order changes show, zeros would not."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(count, self.width, generator=generator)
        scale = torch.randn(count, 1, generator=generator).exp2()
        return (values * scale).to(self.dtype).to(self.device)


@dataclass(frozen=True)
class SumOp:
    """An op that adds a stream of tokens into an fp32 state, piece by piece.

    ``run(start, pieces)`` adds the token slices in order, each by a call of its own, and returns
    the state; ``start`` is not changed.
    """

    name: str
    run: Callable[[torch.Tensor, list[slice]], torch.Tensor]
    tokens: int
    start: torch.Tensor
    cut: int = 16


class ContractViolation(AssertionError):
    """Bits that should be equal are not; the message is a JSON report."""


@dataclass
class Report:
    """Result of one comparison; ``text()`` is the JSON that a person or a tool replays from."""

    op: str
    transform: str
    case: str
    seed: int
    differing: int = 0
    elements: int = 0
    index: list[int] = field(default_factory=list)
    got_bits: str = ""
    want_bits: str = ""

    def text(self) -> str:
        return json.dumps(vars(self), indent=1)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The raw bit patterns of a tensor, as integers of its element size."""
    return t.detach().contiguous().cpu().view(_BITS[t.element_size()])


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every byte agree."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((bits(a) == bits(b)).all())


def require_same(
    got: torch.Tensor, want: torch.Tensor, *, op: str, transform: str, case: str, seed: int
) -> None:
    """Raises ContractViolation with the lowest differing index unless every byte agrees."""
    report = Report(op, transform, case, seed, elements=want.numel())
    if got.shape != want.shape or got.dtype != want.dtype:
        report.got_bits = f"{got.dtype} {list(got.shape)}"
        report.want_bits = f"{want.dtype} {list(want.shape)}"
        raise ContractViolation(report.text())
    left, right = bits(got), bits(want)
    differs = (left != right).flatten()
    report.differing = int(differs.sum())
    if not report.differing:
        return
    flat = int(differs.nonzero()[0])
    mask = (1 << (8 * want.element_size())) - 1
    digits = 2 * want.element_size()
    report.index = [int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape)]
    report.got_bits = f"0x{int(left.flatten()[flat]) & mask:0{digits}x}"
    report.want_bits = f"0x{int(right.flatten()[flat]) & mask:0{digits}x}"
    raise ContractViolation(report.text())


# ---- batch invariance: transforms of the rows around a row --------------------------------------

#: (label, rows given to the op, the base rows that its output must equal)
Variant = tuple[str, torch.Tensor, torch.Tensor]


def population(op: RowOp, rows: torch.Tensor, sizes: Iterable[int]) -> Iterator[Variant]:
    """T1: any number of rows."""
    for m in sizes:
        yield f"first {m} rows", rows[:m], torch.arange(m)


def position(op: RowOp, rows: torch.Tensor, seed: int) -> Iterator[Variant]:
    """T2: any place in the batch: reversed, rotated, shuffled, one row everywhere."""
    m = len(rows)
    generator = torch.Generator().manual_seed(seed)
    orders = {
        "reversed": torch.arange(m - 1, -1, -1),
        "rotated by 1": torch.arange(m).roll(1),
        "rotated by 17": torch.arange(m).roll(17),
        "shuffled": torch.randperm(m, generator=generator),
        "one row everywhere": torch.full((m,), m // 2),
    }
    for label, order in orders.items():
        yield label, rows[order], order


def neighbours(op: RowOp, rows: torch.Tensor, seed: int) -> Iterator[Variant]:
    """T3: any content around a row: NaN, Inf, cancelling and tiny magnitudes."""
    huge = 2.0 ** (14 if op.dtype == torch.float16 else 100)
    fills = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "2^k": huge, "2^-k": 1 / huge}
    for label, value in fills.items():
        for keep in sorted({0, len(rows) // 2, len(rows) - 1}):
            changed = torch.full_like(rows, value)
            changed[::2] *= -1
            changed[keep] = rows[keep]
            want = torch.full((len(rows),), -1)
            want[keep] = keep
            yield f"{label} around row {keep}", changed, want


def padding(op: RowOp, rows: torch.Tensor, seed: int) -> Iterator[Variant]:
    """T4: padding rows before, after and between, of zeros and of NaN."""
    m = len(rows)
    for label, value in (("zeros", 0.0), ("nan", math.nan)):
        for before, after in ((0, 1), (1, 0), (0, 63), (37, 0), (5, 130)):
            pad = torch.full((before + after, op.width), value, dtype=op.dtype, device=op.device)
            padded = torch.cat([pad[:before], rows, pad[before:]])
            none = torch.full((before + after,), -1)
            want = torch.cat([none[:before], torch.arange(m), none[before:]])
            yield f"{before}+{after} rows of {label}", padded, want


def layout(op: RowOp, rows: torch.Tensor, seed: int) -> Iterator[Variant]:
    """Row stride, pointer alignment, column-major and gathered storage."""
    m, k = rows.shape
    every = torch.arange(m)

    def view(shape: tuple[int, int], cut) -> torch.Tensor:
        holder = torch.full(shape, math.nan, dtype=op.dtype, device=op.device)
        target = cut(holder)
        target.copy_(rows)
        return target

    yield "row stride + 8", view((m, k + 8), lambda t: t[:, :k]), every
    yield "row stride + 1", view((m, k + 1), lambda t: t[:, :k]), every
    yield "offset by 1 element", view((m, k + 1), lambda t: t[:, 1:]), every
    yield "offset by 8 elements", view((m, k + 8), lambda t: t[:, 8:]), every
    yield "every other row", view((2 * m, k), lambda t: t[::2]), every
    yield "column-major", view((k, m), lambda t: t.mT), every
    yield "column-major, padded", view((k, m + 8), lambda t: t.mT[:m]), every
    yield "every other column", view((m, 2 * k), lambda t: t[:, ::2]), every
    yield "expanded", rows[m // 2].expand(m, k), torch.full((m,), m // 2)


TRANSFORMS: dict[str, Callable[[RowOp, torch.Tensor, int], Iterator[Variant]]] = {
    "T2 position": position,
    "T3 neighbour content": neighbours,
    "T4 padding": padding,
    "layout": layout,
}


def check_rows(op: RowOp, rows: int, seed: int, sizes: Iterable[int] | None = None) -> int:
    """Every row transform on one op; returns the number of comparisons."""
    inputs = op.rows(rows, seed)
    base = op.run(inputs)
    count = check_population(op, rows, seed, boundary_sizes(rows) if sizes is None else sizes)
    count += check_chunks(op, inputs, base, seed) + check_repeat(op, rows, seed)
    return count + sum(check_transform(op, name, inputs, base, seed) for name in TRANSFORMS)


def check_transform(
    op: RowOp, transform: str, inputs: torch.Tensor, base: torch.Tensor, seed: int
) -> int:
    """One of TRANSFORMS."""
    return _check_variants(op, transform, TRANSFORMS[transform](op, inputs, seed), base, seed)


def check_population(op: RowOp, rows: int, seed: int, sizes: Iterable[int]) -> int:
    """T1: the first m rows alone have the bits they have among all ``rows``."""
    inputs = op.rows(rows, seed)
    variants = population(op, inputs, sizes)
    return _check_variants(op, "T1 population", variants, op.run(inputs), seed)


def _check_variants(
    op: RowOp, transform: str, variants: Iterable[Variant], base: torch.Tensor, seed: int
) -> int:
    count = 0
    for case, changed, want in variants:
        got = op.run(changed)
        kept = want >= 0
        got, wanted = got[kept.to(got.device)], base[want[kept].to(base.device)]
        require_same(got, wanted, op=op.name, transform=transform, case=case, seed=seed)
        count += 1
    return count


def check_chunks(op: RowOp, inputs: torch.Tensor, base: torch.Tensor, seed: int) -> int:
    """T5: chunked prefill: the rows cut anywhere, each chunk by a call of its own."""
    generator = torch.Generator().manual_seed(seed)
    m = len(inputs)
    drawn = torch.randperm(m - 1, generator=generator)[:3].add(1).sort().values.tolist()
    cuts = {"halves": [m // 2], "1 + rest": [1], "rest + 1": [m - 1], "drawn": drawn}
    for label, at in cuts.items():
        edges = [0, *at, m]
        got = torch.cat([op.run(inputs[i:j]) for i, j in itertools.pairwise(edges) if j > i])
        case = f"{label} at {at}"
        require_same(got, base, op=op.name, transform="T5 chunks", case=case, seed=seed)
    return len(cuts)


def check_repeat(op: RowOp, rows: int, seed: int, times: int = 5) -> int:
    """Check run_to_run: the same call again, with other work between."""
    inputs = op.rows(rows, seed)
    base = op.run(inputs)
    for i in range(times):
        op.run(op.rows(1 + i, seed + i + 1))
        case = f"repeat {i}"
        require_same(op.run(inputs), base, op=op.name, transform="repeat", case=case, seed=seed)
    return times


def boundary_sizes(rows: int) -> list[int]:
    """Counts of rows at and around every tile size a kernel might use."""
    near = {1, 2, 3, rows}
    for power in (8, 16, 32, 64, 128, 256):
        near |= {power - 1, power, power + 1}
    return sorted(m for m in near if 1 <= m <= rows)


# ---- split invariance ---------------------------------------------------------------------------


def splits(tokens: int, cut: int, seed: int) -> dict[str, list[slice]]:
    """The token stream in 1, 2, 4, 8 and drawn ragged pieces, cut at multiples of ``cut``."""
    blocks = -(-tokens // cut)
    out = {}
    for pieces in (2, 4, 8):
        if pieces <= blocks:
            out[f"{pieces} pieces"] = [round(i * blocks / pieces) for i in range(1, pieces)]
    generator = torch.Generator().manual_seed(seed)
    for draw in range(3):
        count = int(torch.randint(1, min(7, blocks), (1,), generator=generator))
        at = torch.randperm(blocks - 1, generator=generator)[:count].add(1).sort().values
        out[f"ragged {draw}"] = at.tolist()
    out["every block"] = list(range(1, blocks))
    return {label: _slices(at, cut, tokens) for label, at in out.items()}


def _slices(at: list[int], cut: int, tokens: int) -> list[slice]:
    edges = [0, *(i * cut for i in at), tokens]
    return [slice(i, j) for i, j in itertools.pairwise(edges)]


def check_splits(op: SumOp, seed: int) -> int:
    """Check split_invariant: any cut of the stream into consecutive micro-batches."""
    want = op.run(op.start, [slice(0, op.tokens)])
    out = splits(op.tokens, op.cut, seed)
    for label, pieces in out.items():
        got = op.run(op.start, pieces)
        transform = "micro-batch split"
        require_same(got, want, op=op.name, transform=transform, case=label, seed=seed)
    return len(out)


# ---- a fresh process ----------------------------------------------------------------------------


def check_fresh_process(op: RowOp, rows: int, seed: int, make: str) -> None:
    """Check the bits of a process of its own; ``make``: ``"module:function"``, gives the op."""
    module, function = make.split(":")
    code = (
        f"import sys, torch; from {module} import {function}; op = {function}(); "
        f"torch.save(op.run(op.rows({rows}, {seed})).cpu(), sys.argv[1])"
    )
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "out.pt")
        environment = os.environ | {"PYTHONHASHSEED": "random"}
        subprocess.run([sys.executable, "-c", code, target], cwd=ROOT, env=environment, check=True)
        got = torch.load(target)
    want = op.run(op.rows(rows, seed)).cpu()
    require_same(got, want, op=op.name, transform="fresh process", case=make, seed=seed)


# ---- accuracy -----------------------------------------------------------------------------------


def half_ulp(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of ``dtype`` at float64 values ``y``."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(y.abs().clamp_min(info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(y, info.eps / 2), exponent)


def check_accuracy(
    got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, max_misrounded: float
) -> None:
    """|got - exact| <= ½ulp + T(1 + 2⁻⁷) everywhere, and few results misrounded (reliability.md 5).

    ``max_misrounded`` is the largest allowed share of results that are not the correctly rounded
    ``exact``; a dropped k or a bf16 partial raises it tenfold where an atol sees nothing.
    """
    error = (got.double() - exact).abs()
    limit = half_ulp(exact, got.dtype) + bound * (1 + 2.0**-7)
    worst = (error / limit).max().item()
    assert worst <= 1, f"error is {worst:.3g} times the bound"
    share = (bits(got) != bits(exact.to(got.dtype))).double().mean().item()
    assert share <= max_misrounded, f"{share:.2%} misrounded, at most {max_misrounded:.2%} allowed"
