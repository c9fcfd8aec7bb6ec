"""What the Triton launcher's states and gradients of logits must be, whatever runs them.

Expected bytes are the CPU backend's, where 2^y is its own or the powers are whole numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch

from cute_kernels import arch
from cute_kernels.logp import config, cpu, exact
from cute_kernels.logp.tensors import Head, Logits, Rows, Upstream
from cute_kernels.runtime import products
from tests.contract import same_bytes

from . import finished_states, policy_cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_DESCRIBE = arch.describe
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


class Case(NamedTuple):
    """Logits [T, n] and what goes with them."""

    logits: torch.Tensor
    place: Logits
    rows: Rows

    def of(self, some) -> Case:
        """Some of the rows."""
        return self._replace(logits=self.logits[some], rows=Rows(*(t[some] for t in self.rows)))


class Shape(NamedTuple):
    """Of a case: columns ``n`` from ``start`` on of a vocabulary of ``vocab``."""

    tokens: int
    n: int
    start: int = 0
    vocab: int | None = None
    softcap: float = 0.0


#: Tails of a unit, of a tile and of the rows; columns of another rank; padding; one row; softcap.
SHAPES = (
    Shape(1, 1),
    Shape(3, 15),
    Shape(9, 17, start=32),
    Shape(9, 1000),
    Shape(9, 300, start=4096, vocab=4096 + 201),
    Shape(8, 64, start=128, vocab=64),
    Shape(10, 250, vocab=233, softcap=30.0),
    Shape(2, 1100, start=16, softcap=5.0),
)


def case(shape: Shape, dtype: torch.dtype = FP32, seed: int = 0) -> Case:
    """Rows of every temperature, masked ones and ones without a target of the vocabulary."""
    tokens, n, start, vocab, softcap = shape
    vocab = start + n if vocab is None else vocab
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, n, generator=random) * 10
    # Bins far apart, and a unit far above the others.
    logits[1::3] *= 40
    logits[2::5, : n // 2] -= 300
    target = torch.randint(0, vocab, (tokens,), generator=random)
    target[0] = min(vocab, start + n) - 1
    target[1:2] = start
    target[3::4], target[4::6] = config.MASKED, config.OUTSIDE
    scale = torch.rand(tokens, generator=random) * 3 + 0.05
    scale[::2] = config.LOG2E
    return Case(logits.to(dtype), Logits(start, vocab, softcap), Rows(target, scale))


def merged(states: torch.Tensor) -> torch.Tensor:
    """One state of parts."""
    return exact.merge(states)


@contextlib.contextmanager
def units(launch: ModuleType, count: int) -> Iterator[None]:
    """While it lasts, the device has so many compute units; a head's products are the CPU's."""
    with (
        mock.patch.object(launch, "most_ctas", lambda device: count),
        mock.patch.object(arch, "describe", _DESCRIBE),
    ):
        yield


def states(launch: ModuleType, shape: Shape, dtype: torch.dtype = FP32) -> None:
    states_bytes(launch, case(shape, dtype))


def states_bytes(launch: ModuleType, given: Case) -> None:
    """Both kinds of state are the CPU backend's."""
    for entropy in (False, True):
        want = cpu.states_of_logits(*given, entropy)[0]
        got = launch.states_of_logits(*given, entropy)
        assert got.shape[1:] == want.shape and got.dtype == torch.int64
        assert same_bytes(merged(got), want)


def with_odd_logits(shape: Shape) -> Case:
    """NaN, infinities, numbers beyond the clamp, zeros of both signs and nothing but -inf."""
    given = case(shape._replace(tokens=16))
    z, n = given.logits, shape.n
    z[0, n // 2], z[1, n - 1], z[2, 0] = torch.nan, torch.inf, -torch.inf
    z[3], z[4], z[5, : n // 2] = -torch.inf, torch.nan, -torch.inf
    z[6], z[7, n // 3], z[8] = -0.0, 1e30, -1e30
    z[9, n // 2], z[10], z[11] = -1e30, 5e5, -5e5
    z[12, n // 2], z[13, 0] = 3e38, -3e38
    z[14], z[15, n // 2] = 1e-40, -torch.nan
    return given


def odd_logits(launch: ModuleType) -> None:
    states_bytes(launch, with_odd_logits(Shape(16, 160)))
    states_bytes(launch, with_odd_logits(Shape(16, 150, softcap=20.0)))


def beyond_the_clamp(launch: ModuleType) -> None:
    """A row is lost where a unit's sum is none that 16 values of at most 2^0.6 have."""
    z = torch.full((9, 40), 2.0**21)
    for row, above in enumerate((0, 1, 6, 20, 50, 100, 126, 1000, 2**21)):
        z[row, 17] += above
    rows = Rows(torch.zeros(9, dtype=torch.int64), torch.ones(9))
    top = merged(launch.states_of_logits(z, Logits(0, 40, 0.0), rows, True))[:, config.TOP]
    assert (top[:2] == 2**17).all() and (top[2:] == config.LOST).all()


def whole_powers(n: int = 1040, tokens: int = 12, seed: int = 3) -> Case:
    """Logits whose every 2^(y - M) is a power of two in any arithmetic, down to 2^-26 in a unit.

    Then the bits of a unit's sum tell its order, and those of the state that the order is kept.
    """
    random = torch.Generator().manual_seed(seed)
    below = torch.randint(-26, -18, (tokens, n), generator=random).float()
    few = torch.randint(-4, 1, (tokens, n), generator=random).float()
    z = torch.where(torch.rand(tokens, n, generator=random) < 0.2, few, below)
    z += torch.randint(-40, 1, (tokens, -(-n // 16)), generator=random).repeat_interleave(16, 1)[
        :, :n
    ]
    target = torch.randint(0, n, (tokens,), generator=random)
    return Case(z, Logits(0, n, 0.0), Rows(target, torch.ones(tokens)))


def order(launch: ModuleType) -> None:
    """Read back from sums of powers of two."""
    states_bytes(launch, whole_powers())


def parts(launch: ModuleType) -> None:
    """Devices of any size, which cut the columns into other parts, come to the same bytes."""
    given = case(Shape(9, 1008), seed=5)
    counts, found = set(), []
    for count in (1, 2, 132):
        with units(launch, count):
            made = launch.states_of_logits(*given, True)
        counts.add(len(made))
        found.append(merged(made))
    assert len(counts) == 3 and all(same_bytes(one, found[0]) for one in found)


def rows_alone(launch: ModuleType, n: int, dtype: torch.dtype = FP32) -> None:
    """One row, few rows and rows in another order, beside NaN: the bytes of all at once."""
    given = case(Shape(17, n), dtype, seed=6)
    whole = merged(launch.states_of_logits(*given, True))
    upstream = upstream_of(given, True)
    gradient = launch.gradients_of_logits(*given, upstream, FP32)
    tokens = len(given.logits)
    for some in ([0], [16], [3, 4], list(range(9)), list(range(tokens - 1, -1, -1))):
        part = given.of(some)
        assert same_bytes(merged(launch.states_of_logits(*part, True)), whole[some])
        of_some = Upstream(*(t[some] for t in upstream))
        assert same_bytes(launch.gradients_of_logits(*part, of_some, FP32), gradient[some])
    noisy = given._replace(logits=given.logits.clone())
    noisy.logits[1::2] = torch.nan
    assert same_bytes(merged(launch.states_of_logits(*noisy, True))[::2], whole[::2])
    assert same_bytes(launch.gradients_of_logits(*noisy, upstream, FP32)[::2], gradient[::2])


def column_major(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


def padded(t: torch.Tensor) -> torch.Tensor:
    """A row stride that is odd, NaN between rows and before the first."""
    room = t.new_full((len(t) + 1, t.shape[1] + 3), torch.nan)
    return room[1:, 2:-1].copy_(t)


def spread(t: torch.Tensor) -> torch.Tensor:
    """Every third column and every second row of something else."""
    room = t.new_full((2 * len(t), 3 * t.shape[1]), torch.nan)
    return room[::2, 1::3].copy_(t)


def repeated(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous()


LAYOUTS = (column_major, padded, spread, repeated)


def layouts(launch: ModuleType, dtype: torch.dtype) -> None:
    """Strides and addresses do not show."""
    given = case(Shape(9, 144), dtype, seed=7)
    upstream = upstream_of(given, True)
    whole = merged(launch.states_of_logits(*given, True))
    gradient = launch.gradients_of_logits(*given, upstream, dtype)
    for layout in LAYOUTS:
        other = given._replace(logits=layout(given.logits))
        assert same_bytes(merged(launch.states_of_logits(*other, True)), whole), layout
        made = launch.gradients_of_logits(*other, upstream, dtype)
        assert made.is_contiguous() and same_bytes(made, gradient), layout


def upstream_of(given: Case, entropy: bool, seed: int = 8) -> Upstream:
    """What a gradient would be asked for with; the CPU's log-sum, NaN where there is none."""
    random = torch.Generator().manual_seed(seed)
    tokens = len(given.logits)
    state = cpu.states_of_logits(*given, True)
    _, lse2, h = exact.finish(state, given.rows)
    of_logp, of_entropy = (torch.randn(tokens, generator=random) for _ in range(2))
    return Upstream(lse2, of_logp, *((of_entropy, h) if entropy else (None, None)))


def gradients(launch: ModuleType, shape: Shape, dtype: torch.dtype = FP32) -> None:
    """The CPU backend's; exactly +0 without a target and in padding."""
    given = case(shape, dtype)
    for entropy in (False, True):
        upstream = upstream_of(given, entropy)
        want = cpu.gradients_of_logits(*given, upstream, dtype)
        got = launch.gradients_of_logits(*given, upstream, dtype)
        assert same_bytes(got, want)
        nothing = got[given.rows.target < 0]
        assert same_bytes(nothing, torch.zeros_like(nothing))
        behind = got[:, max(0, given.place.vocab - given.place.start) :]
        assert same_bytes(behind, torch.zeros_like(behind))


def masked_nan(launch: ModuleType) -> None:
    """NaN in masked rows and in padding harms nothing, in logits and in what came down."""
    given = case(Shape(9, 60, start=16, vocab=16 + 50), seed=9)
    upstream = upstream_of(given, True)
    want = launch.gradients_of_logits(*given, upstream, FP32)
    states = merged(launch.states_of_logits(*given, True))
    masked = given.rows.target < 0
    assert masked.any() and not masked.all()
    given.logits[masked], given.logits[:, 50:] = torch.nan, torch.nan
    for t in upstream:
        t[masked] = torch.nan
    got = launch.gradients_of_logits(*given, upstream, FP32)
    assert same_bytes(got, want) and not got.isnan().any()
    got = merged(launch.states_of_logits(*given, True))
    assert same_bytes(got[~masked], states[~masked])
    assert (got[masked][:, config.TOP] == config.LOST).all()
    assert (states[:, config.CHOSEN] == 0)[masked].all() and (
        got[masked][:, config.CHOSEN] == 0
    ).all()


class Hidden(NamedTuple):
    """Hidden states and a head."""

    hidden: torch.Tensor
    head: Head
    rows: Rows


def hidden(dtype: torch.dtype, order: str, *, bias: bool, tokens: int = 9) -> Hidden:
    """A rank's 213 rows of a vocabulary, of which 13 are padding; D = 40.

    Logits grow along the vocabulary, so that later blocks and parts raise the highest bin.
    """
    random = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, 40, generator=random) * 2
    weight = torch.randn(213, 40, generator=random) * torch.linspace(0.1, 4, 213)[:, None]
    b = torch.randn(213, generator=random).to(dtype) if bias else None
    target = torch.randint(0, 264, (tokens,), generator=random)
    target[2], target[3] = config.MASKED, config.OUTSIDE
    rows = Rows(target, torch.rand(tokens, generator=random) + 0.2)
    softcap = 0.0 if order == "chain" else 15.0
    return Hidden(x.to(dtype), Head(weight.to(dtype), b, 64, 264, softcap, order), rows)


def heads(launch: ModuleType, dtype: torch.dtype, order: str, bias: bool) -> None:
    """States and gradients of a head are those of its logits, cut anywhere."""
    given = hidden(dtype, order, bias=bias)
    sums = products.sums(given.hidden, given.head.weight, given.head.order)
    logits = cpu._biased(sums, given.head)
    place = Logits(given.head.start, given.head.vocab, given.head.softcap)
    by_logits = Case(logits, place, given.rows)
    for entropy in (False, True):
        want = cpu.states_of_logits(*by_logits, entropy)[0]
        assert same_bytes(merged(launch.states(*given, entropy)), want)
        upstream = upstream_of(by_logits, entropy)
        want = cpu.gradients_of_logits(*by_logits, upstream, given.hidden.dtype)
        assert same_bytes(launch.gradients(*given, upstream), want)


def near_float64(launch: ModuleType, softcap: float) -> None:
    """Log-probabilities, entropies and gradients within bounds, with a device's own 2^y."""
    given = case(Shape(9, 300, vocab=281, softcap=softcap))
    given = given._replace(logits=given.logits.clamp(-60, 60))
    target, logits = given.rows.target, given.logits.double()[:, :281]
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    y = (capped * given.rows.scale.double()[:, None] * config.LN2).log_softmax(1)
    known = target >= 0
    logp = y.gather(1, torch.where(known, target, 0)[:, None])[:, 0]
    entropy = -(y.exp() * y).sum(1)
    got, lse2, h = exact.finish(launch.states_of_logits(*given, True), given.rows)
    of_logp = given.rows.scale * config.LN2
    gradient = launch.gradients_of_logits(*given, Upstream(lse2, of_logp, None, None), FP32)
    size = 1 + given.logits.double().abs().amax(1) * given.rows.scale
    assert ((got - logp).abs() <= 2.0**-21 * size)[known].all()
    assert ((h - entropy).abs() <= 2.0**-19 * size)[known].all()
    hit = torch.arange(281) == target[:, None]
    want = (hit.double() - y.exp()) * of_logp.double()[:, None]
    if softcap:
        want = want * (1 - torch.tanh(logits / softcap) ** 2)
    error = (gradient[:, :281] - torch.where(known[:, None], want, 0.0)).abs()
    assert (error <= 2.0**-18 * size[:, None] * of_logp[:, None]).all()
    assert not gradient[:, 281:].any()


def far_rows(launch: ModuleType) -> None:
    """A row stride of 2²⁸: row 8 begins 2³¹ elements from the first."""
    given = case(Shape(9, 32), BF16)
    far = torch.empty(8 * 2**28 + 32, dtype=BF16).as_strided((9, 32), (2**28, 1))
    far.copy_(given.logits)
    states = [launch.states_of_logits(t, *given[1:], True) for t in (given.logits, far)]
    assert same_bytes(*map(merged, states))


def finished(launch: ModuleType, entropy: bool, *counts: int) -> None:
    """States of so many parts: exact.finish's bytes; a device chooses those of NaN.

    Shards of ranks are gathered, and a caller may give columns of a wider tensor.
    """
    for count in counts:
        states, rows = finished_states.drawn(count, entropy)
        for parts in (states, states.repeat_interleave(2, 0)[::2]):
            results = zip(launch.finish(parts, rows), exact.finish(states, rows), strict=True)
            for got, want in results:
                assert (got is None) == (want is None)
                if want is not None:
                    known = ~want.isnan()
                    assert torch.equal(got.isnan(), ~known), count
                    assert same_bytes(got[known], want[known]), count


#: Elements of whole vectors, and of a last block of some.
SCALED = ((64, 80), (63, 131))


def scaled(launch: ModuleType, dtype: torch.dtype) -> None:
    """The CPU's bytes, in place and not."""
    for shape, in_place in itertools.product(SCALED, (False, True)):
        x = policy_cases.values(dtype, shape)
        want, given = torch.empty_like(x), x.clone()
        cpu.scale(x, torch.tensor(0.3), want)
        out = x if in_place else torch.empty_like(x)
        with units(launch, 1):
            launch.scale(x, torch.tensor(0.3), out)
        assert same_bytes(out, want) and same_bytes(x, want if in_place else given)


def scaled_by_one(launch: ModuleType) -> None:
    """In place every byte stays: NaN with its payload, which a product would replace."""
    given = policy_cases.values(BF16, SCALED[0])
    given.view(torch.int16)[1] = 0x7FA5
    x, copied = given.clone(), torch.empty_like(given)
    launch.scale(x, torch.tensor(1.0), x)
    assert same_bytes(x, given)
    launch.scale(given, torch.tensor(1.0), copied)
    assert same_bytes(copied[2:], given[2:]) and copied[1].isnan().all()
