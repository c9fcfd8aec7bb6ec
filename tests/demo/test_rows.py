"""rows.py: a row has the same bytes whatever rows are around it, forward and backward."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.demo import rows
from cute_kernels.errors import ShapeError

WIDTH = 192
WEIGHT = torch.linspace(0.5, 1.5, WIDTH).to(torch.bfloat16)

#: name -> function of x [R, WIDTH].
FUNCTIONS = {
    "rms_norm": lambda x: rows.rms_norm(x, WEIGHT, 1e-6),
    "silu": rows.silu,
    "log_softmax": rows.log_softmax,
}

SLICES = [(first, count) for first in (0, 1, 37) for count in (1, 2, 31, 64, 127, 128, 129)]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.uint8)


def _run(fn, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = fn(x)
    y.backward(dy.to(y.dtype))
    return _bytes(y), _bytes(x.grad)


def _depends_on_rows(fn) -> bool:
    """Whether any slice of the rows gives other bytes than the same rows among all of them."""
    torch.manual_seed(3)
    x = (4 * torch.randn(200, WIDTH)).to(torch.bfloat16)
    dy = torch.randn(200, WIDTH)
    whole = _run(fn, x, dy)
    for first, count in SLICES:
        part = slice(first, first + count)
        for some, all_rows in zip(_run(fn, x[part], dy[part]), whole, strict=True):
            if not bool((some == all_rows[part]).all()):
                return True
    return False


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_computed_alone(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert not _depends_on_rows(FUNCTIONS[name])
    finally:
        torch.set_num_threads(before)


def _sum_order_by_rows(x: torch.Tensor) -> torch.Tensor:
    """A mean whose order of additions follows the number of rows, as a tuned kernel's does."""
    wide = x.float()
    wide = wide.flip(-1) if x.shape[0] % 2 else wide
    return wide * wide.cumsum(-1)[:, -1:]


def _tail_of_the_tensor(x: torch.Tensor) -> torch.Tensor:
    """exp whose last row is a last place off, as the scalar tail of a vector kernel can be."""
    wide = x.float()
    return torch.cat([wide[:-1].exp(), wide[-1:].exp() * (1 + 2.0**-23)])


def test_an_order_that_follows_the_row_count_is_caught_and_fixed_rows_cures_it():
    assert _depends_on_rows(_sum_order_by_rows)
    assert not _depends_on_rows(lambda x: rows.fixed_rows(_sum_order_by_rows, x))


def test_a_tail_inside_the_block_is_caught():
    assert _depends_on_rows(lambda x: rows.fixed_rows(_tail_of_the_tensor, x))


def test_equal_rows_are_equal_at_every_place_of_a_block():
    row = (4 * torch.randn(1, WIDTH)).to(torch.bfloat16)
    count = 2 * rows.block_rows(WIDTH) + 5
    for fn in FUNCTIONS.values():
        out = _bytes(fn(row.expand(count, -1)))
        assert bool((out == out[0]).all())


def test_the_functions_are_what_they_say():
    torch.manual_seed(5)
    x = (3 * torch.randn(70, WIDTH)).to(torch.bfloat16)
    wide = x.double()
    want = {
        "rms_norm": wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * WEIGHT.double(),
        "silu": wide * wide.sigmoid(),
        "log_softmax": wide.log_softmax(-1),
    }
    for name, fn in FUNCTIONS.items():
        got = fn(x)
        # bf16 results are rounded at most twice, 2^-8 each; log_softmax is fp32.
        relative = 2.0**-20 if got.dtype == torch.float32 else 2.0**-7
        error = (got.double() - want[name]).abs()
        assert bool((error <= relative * want[name].abs() + 1e-6).all()), name


@pytest.mark.parametrize("shape", [(3, 100), (3, 0), (3, 32768), (64,), (2, 2, 64)])
def test_shapes_that_torch_would_cut_are_refused(shape):
    with pytest.raises(ShapeError, match=r"x: expected \[R, D\] with D a multiple of 64"):
        rows.fixed_rows(torch.exp, torch.zeros(shape))


def test_a_block_is_work_for_one_thread():
    for width in range(64, 32768, 64):
        count = rows.block_rows(width)
        assert count & (count - 1) == 0
        assert count * width < 32768 <= 2 * count * width
