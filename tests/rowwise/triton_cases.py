"""What the Triton kernels of rowwise must give, whatever runs them: an interpreter or ptxsim.

Where the arithmetic is the CPU backend's, expected bytes are its bytes; elsewhere the bound is that
of fp32, with a device's own 2^y.
"""

from __future__ import annotations

import torch

from cute_kernels.rowwise import config, cpu
from tests.contract import half_ulp, same_bytes
from tests.oracles import rowwise as reference

from . import rotary_cases
from .cases import BF16, FP32, drawn, indices, spread

#: Units in the last place of fp32.
ULPS = 2.0 * 4


def near(
    got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | float, ulps: float = ULPS
) -> None:
    """Within so many halves of a unit of fp32, of the result and of the terms of a sum, and half
    a unit of the result's dtype."""
    exact = exact.double()
    room = torch.full_like(exact, 2.0**-126) + exact.abs() + terms
    limit = half_ulp(room, FP32) * ulps + half_ulp(exact, got.dtype)
    worst = ((got.double() - exact).abs() / limit).max().item()
    assert worst <= 1, f"{worst:.3g} times the bound"


def activations(launch, kind: str, dtype: torch.dtype = FP32) -> None:
    """Values and slopes; gelu_tanh's of fp32 where 2 u is small, as its docstring says."""
    x, dy, up = spread(3, 700, dtype=dtype), drawn(3, 700, seed=1), drawn(3, 700, seed=2)
    # Beyond these, CUDA's 2^y flushes what would be subnormal.
    most = {"gelu_tanh": 4, "gelu": 12}.get(kind, 80)
    x = x.clamp(-most, most)
    x[0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    dy, up = dy.to(dtype), up.to(dtype)
    value, slope = reference.value(kind, x), reference.slope(kind, x)
    far = {"gelu_tanh": 8.0, "gelu": 2.0}.get(kind, 1.0)
    near(launch.activation(x, kind), value, 0.0, ULPS * far)
    terms = (1 + x.double().abs()) * dy.double().abs()
    near(launch.activation_backward(dy, x, kind), slope * dy.double(), terms)
    if kind in config.GATES:
        near(launch.gated(x, up, kind, False), value * up.double(), 0.0, ULPS * far)
        d_gate, d_up = launch.gated_backward(dy, x, up, kind, False)
        near(d_gate, slope * dy.double() * up.double(), terms * up.double().abs())
        near(d_up, value * dy.double(), 0.0, ULPS * far)


def gated_in_steps(launch) -> None:
    """The bytes of two launches and torch's products between them."""
    for dtype in (BF16, FP32):
        gate, up, dy = (
            spread(3, 700, dtype=dtype),
            *(drawn(3, 700, seed=s, dtype=dtype) for s in (1, 2)),
        )
        for kind in config.GATES:
            value = launch.activation(gate, kind)
            assert same_bytes(launch.gated(gate, up, kind, True), value * up)
            want = launch.activation_backward(dy * up, gate, kind), dy * value
            assert all(map(same_bytes, launch.gated_backward(dy, gate, up, kind, True), want))


def gated_rows(launch) -> None:
    """The bytes of `gated_in_steps` of the halves of each row; more columns than a program has."""
    for dtype, shape in ((BF16, (3, 2060)), (FP32, (2, 2, 34)), (BF16, (1, 2048))):
        x = 4 * drawn(*shape, seed=3, dtype=dtype)
        gate, up = (half.contiguous() for half in x.chunk(2, -1))
        for kind in config.GATES:
            got = launch.gated_rows(x, kind)
            assert same_bytes(got, launch.gated(gate, up, kind, True))


def softmax(launch, width: int, dtype: torch.dtype = FP32) -> None:
    x, dy = drawn(3, width, seed=width, dtype=dtype) * 3, drawn(3, width, seed=1, dtype=dtype)
    # x - max is rounded to fp32: a part of its size, of the result.
    size = x.double().abs().amax() * 2 + 8
    y = launch.softmax(x, dtype)
    near(y, x.double().softmax(1), 0.0, ULPS * size)
    near(launch.log_softmax(x, FP32), x.double().log_softmax(1), size)
    terms = dy.double().abs().sum(1, keepdim=True)
    near(launch.softmax_backward(dy, y, FP32), reference.softmax_gradient(dy, y), terms)
    got = launch.log_softmax_backward(dy.float(), x.float())
    near(got, reference.log_softmax_gradient(dy, x), terms * size)


def masked_rows(launch) -> None:
    """-inf is left out; a row of it, of NaN or of +inf is NaN, and its neighbours are not."""
    x = drawn(5, 1030)
    x[0, 5:] = -torch.inf
    x[1] = -torch.inf
    x[2, 1029], x[3, 3] = torch.inf, torch.nan
    for log in (False, True):
        got = (launch.log_softmax if log else launch.softmax)(x, FP32)
        assert got[1:4].isnan().all() and not got[[0, 4]].isnan().any()
        want = x[:1, :5].double()
        near(got[:1, :5], want.log_softmax(1) if log else want.softmax(1), 8.0)
        assert (got[0, 5:] == (-torch.inf if log else 0.0)).all()


def odd_numbers(launch) -> None:
    """As torch has them."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38, 104.0, -1000.0])
    for kind in config.KINDS:
        got, want = launch.activation(x, kind), cpu.activation(x, kind)
        assert same_bytes(got.isnan(), want.isnan()), kind
        assert same_bytes(got.nan_to_num(0.0), want.nan_to_num(0.0)), kind


def rows_alone(launch) -> None:
    """One row, some rows, another layout: the bytes of all rows."""
    for width in (5, 1030):
        x, dy = drawn(6, width), drawn(6, width, seed=1)
        every = results(launch, x, dy)
        for rows in (slice(2, 3), slice(1, 5)):
            for one, all_rows in zip(results(launch, x[rows], dy[rows]), every, strict=True):
                assert same_bytes(one, all_rows[rows])
        for one, other in zip(results(launch, column(x), column(dy)), every, strict=True):
            assert same_bytes(one, other)


def column(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


def results(launch, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = launch.softmax(x, FP32)
    return [
        y,
        launch.log_softmax(x, BF16),
        launch.softmax_backward(dy, y, FP32),
        launch.log_softmax_backward(dy, x),
        launch.activation(x, "silu"),
        *launch.gated_backward(dy, x, x, "gelu", False),
    ]


def lanes(launch) -> None:
    """The order of a row's sum, read back: with y = dy = x the gradient is x (x - Σ x²)."""
    for width in (3, 40, 1030, 2500):
        x = drawn(2, width, seed=3)
        products = [[(v * v).item() for v in row] for row in x]
        totals = [reference_sum(row) for row in products]
        want = torch.stack([row * (row - total) for row, total in zip(x, totals, strict=True)])
        assert same_bytes(launch.softmax_backward(x, x, FP32), want), width


def reference_sum(row: list[float]) -> torch.Tensor:
    """`reference.lane_sum` in fp32."""
    numbers = [torch.tensor(v, dtype=FP32) for v in row]
    count = config.lanes(len(numbers))
    found = [torch.zeros((), dtype=FP32) for _ in range(count)]
    for i, v in enumerate(numbers):
        found[i % count] = found[i % count] + v
    while len(found) > 1:
        half = len(found) // 2
        found = [a + b for a, b in zip(found[:half], found[half:], strict=True)]
    return found[0]


def tables(launch) -> None:
    """Byte for byte: fp64 in IEEE operations on both."""
    positions = torch.cat([indices(2**20, 20), torch.arange(20)])
    inverse = 1.0 / 10000.0 ** (torch.arange(0, 50, 2) / 50)
    for dtype, scaling in ((FP32, 1.0), (BF16, 1.25)):
        got = launch.rotary_table(positions, inverse, scaling, dtype)
        want = cpu.rotary_table(positions, inverse, scaling, dtype)
        assert all(map(same_bytes, got, want))


def rotary(launch) -> None:
    """Whole and partial, both ways, of strides: two products of fp32 and their sum."""
    for width, columns in ((16, 16), (12, 20), (64, 300)):
        x = drawn(2, 5, 3, columns).transpose(1, 2)
        cos, sin = (drawn(2, 1, 5, width, seed=s).expand(2, 3, 5, width) for s in (1, 2))
        x1, x2 = x[..., : width // 2], x[..., width // 2 : width]
        (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
        for back in (False, True):
            turned = (
                (x1 * c1 + x2 * s2, x2 * c2 - x1 * s1)
                if back
                else (x1 * c1 - x2 * s1, x2 * c2 + x1 * s2)
            )
            want = torch.cat([*turned, x[..., width:]], -1)
            assert same_bytes(launch.rotary(x, cos, sin, back), want)


def rotary_pair(launch) -> None:
    """The CPU's bytes, zeros, infinities and subnormals among them: dtypes, tails, layouts."""
    mixes = (BF16, BF16, 16, 16), (FP32, FP32, 12, 20), (BF16, FP32, 600, 600)
    for dtype, tables, width, columns in mixes:
        q, k, cos, sin = rotary_cases.operands(dtype, tables, width, columns)
        calls = [(q, k, cos, sin, 1), (q.mT.contiguous().mT, k.contiguous(), cos, sin, 1)]
        calls += [
            (q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2),
            (q[0], k[0], cos[0], sin[0], 0),
        ]
        for args in calls[: 4 if dtype == BF16 == tables else 1]:
            for back, out in ((False, FP32), (True, dtype)):
                got, want = (module.rotary_pair(*args, out, back) for module in (launch, cpu))
                assert all(map(rotary_cases.same_numbers, got, want))
                assert [t.stride() for t in got] == [t.stride() for t in want]
    got = launch.rotary_pair(q, k[:, :0], cos, sin, 1, FP32, False)
    assert rotary_cases.same_numbers(got[0], cpu.rotary_pair(q, k, cos, sin, 1, FP32, False)[0])


def embedding(launch, dtype: torch.dtype = FP32) -> None:
    """The CPU's bytes: one chain, tokens ascending, for hot entries and for those of one token."""
    ids, dy = indices(20, 60, seed=1), spread(60, 300, dtype=dtype)
    ids[indices(60, 30, seed=2)] = 7
    for padding in (7, -1):
        state = drawn(25, 300, seed=3)
        want, got = state.clone(), state.clone()
        cpu.embedding_gradient(dy, ids, padding, want)
        launch.embedding_gradient(dy, ids, padding, got)
        assert same_bytes(got, want)
    other = column(state)
    launch.embedding_gradient(column(dy), ids, -1, other)
    assert same_bytes(other.contiguous(), want)
    want, got = (torch.zeros(25, 300, dtype=dtype) for _ in range(2))
    cpu.embedding_gradient(dy, ids, -1, want)
    launch.embedding_gradient(dy, ids, -1, got)
    assert same_bytes(got, want)


def cuts(launch) -> None:
    """A stream cut at any token leaves the bytes of one shot."""
    ids, dy = indices(4, 30, seed=1), drawn(30, 40)
    want = drawn(5, 40, seed=3)
    begun = want.clone()
    launch.embedding_gradient(dy, ids, -1, want)
    for cut in (1, 7, 16, 29):
        got = begun.clone()
        for piece in (slice(0, cut), slice(cut, None)):
            launch.embedding_gradient(dy[piece], ids[piece], -1, got)
        assert same_bytes(got, want)


def squares(launch) -> None:
    """The CPU's bytes."""
    for count in (1, 1000, 70_000):
        x = spread(count)
        assert same_bytes(launch.square_sum(x), cpu.square_sum(x))
    sums = spread(77, seed=1).double() * 0.1
    assert same_bytes(launch.add_sums(sums), cpu.add_sums(sums))
    for x in (drawn(3, 700, seed=2), column(drawn(3, 700, seed=2))):
        got, want, factor = x.clone(), x.clone(), torch.tensor(0.3)
        launch.scale_(got, factor)
        cpu.scale_(want, factor)
        assert same_bytes(got, want)


#: Of softmax: width and dtype.
WIDTHS = ((7, FP32), *((width, BF16) for width in (1030, 1, 1024, 2500)))
#: Those that take a launcher alone.
CHECKS = {
    check.__name__: check
    for check in (
        masked_rows, odd_numbers, rows_alone, lanes, tables, rotary, rotary_pair, embedding, cuts,
        squares, gated_in_steps, gated_rows,
    )
}  # fmt: skip
