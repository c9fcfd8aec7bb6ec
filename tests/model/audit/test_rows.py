"""Where rows lie, and that a digest sees every byte of one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cute_kernels.model.audit import details
from cute_kernels.model.audit.probe import GRIDS
from cute_kernels.model.observe import rows
from tests.contract import same_bytes

B, T = 4, 6
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


#: How a tensor lies -> what of it a token has, from x [B, T, 2, 3].
LAYOUTS = {
    "B T D": lambda x: x.flatten(2),
    "B T H D": lambda x: x,
    "B H T D": lambda x: x.transpose(1, 2),
    "T B D": lambda x: x.transpose(0, 1).flatten(2),
    "BT D": lambda x: x.flatten(2).flatten(0, 1),
    "BT H D": lambda x: x.flatten(0, 1),
    "1 BT D": lambda x: x.flatten(2).flatten(0, 1)[None],
    "H BT D": lambda x: x.flatten(0, 1).transpose(0, 1),
    "B D T": lambda x: x.flatten(2).transpose(1, 2),
    "B T": lambda x: x[..., 0, 0],
}


def values(b: int, t: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(b * 100 + t)
    return torch.randn(b, t, 2, 3, generator=generator)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_every_layout(name):
    lie = LAYOUTS[name]
    layout = rows.infer(*(tuple(lie(values(*g)).shape) for g in GRIDS), GRIDS)
    x = values(B, T)
    where = torch.tensor([0, 5, 7, 23, 11])
    got = rows.rows(lie(x), layout, (B, T), where)
    want = x.flatten(2)[where // T, where % T]
    want = want[:, :1] if name == "B T" else want
    assert same_bytes(got.view(torch.float32), want.contiguous())
    # One sequence, one token: the dimensions stay where they are.
    one = rows.rows(lie(x[:1, :1]), layout, (1, 1), torch.tensor([0]))
    assert same_bytes(one, got[:1])


def test_rows_that_sequences_share_and_what_has_none():
    layout = rows.infer((1, 5, 8), (1, 7, 8), GRIDS)
    x = torch.randn(1, T, 8)
    got = rows.rows(x, layout, (B, T), torch.tensor([2, T + 2, 3 * T + 5]))
    assert same_bytes(got.view(torch.float32), x[0, [2, 2, 5]])
    assert rows.infer((5, 8), (7, 8), GRIDS) == rows.Layout(0, None, False, (8,))
    for first, second in (
        ((3, 1, 5, 5), (2, 1, 7, 7)),  # weights of attention
        ((3, 8), (2, 8)),  # one row for a sequence
        ((64, 8), (64, 8)),  # a table
        ((3, 5, 10), (2, 7, 14)),  # a row that grows
        ((3, 5, 8), (2, 7, 8, 1)),
        ((), ()),
    ):
        assert rows.infer(first, second, GRIDS) is None
    layout = rows.infer((3, 5, 8), (2, 7, 8), GRIDS)
    for shape in ((B, T + 1, 8), (B + 1, T, 8), (B, T, 9), (B, T)):
        assert rows.rows(torch.randn(shape), layout, (B, T), torch.arange(3)) is None


def bits_of(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33])
def test_a_digest_sees_every_bit(dtype, width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-(2**31), 2**31, (5, width), generator=generator)
    data = bits_of(x.to(dtype) if dtype.is_floating_point else x if dtype == torch.int64 else x > 0)
    base = rows.digest(data, dtype)
    assert len({tuple(row) for row in base.tolist()}) == len(data.unique(dim=0))
    seen = {tuple(base[2].tolist())}
    for byte in range(data.shape[1]):
        for bit in range(8):
            changed = data.clone()
            changed[2, byte] ^= 1 << bit
            after = rows.digest(changed, dtype)
            assert (after[[0, 1, 3, 4]] == base[[0, 1, 3, 4]]).all()
            seen.add(tuple(after[2].tolist()))
    assert len(seen) == 1 + 8 * data.shape[1]


def test_each_half_of_a_digest_tells_rows_apart():
    """Swapped, repeated and permuted lanes: what a plain sum would not see."""
    x = torch.randint(0, 1 << 62, (1, 6), generator=torch.Generator().manual_seed(1))
    turned = [
        x[:, torch.randperm(6, generator=torch.Generator().manual_seed(i))] for i in range(40)
    ]
    different = {tuple(t[0].tolist()): t for t in (x, *turned)}
    pile = torch.cat([*different.values(), torch.zeros(1, 6, dtype=torch.int64)])
    digests = rows.digest(pile.view(torch.uint8), torch.int64)
    for half in (0, 1):
        assert len(digests[:, half].unique()) == len(pile) > 30


def test_a_digest_is_of_the_row_not_of_its_place_or_its_batch(monkeypatch):
    x = bits_of(torch.randn(300, 33))
    whole = rows.digest(x, torch.float32)
    assert (rows.digest(x[137:138], torch.float32) == whole[137]).all()
    monkeypatch.setattr(rows, "_LANES", 17 * 7)  # a few rows at a time
    assert (rows.digest(x, torch.float32) == whole).all()
    assert (rows.digest(x, torch.int32) != whole).all()
    assert rows.digest(x[:0], torch.int64).shape == (0, 2)
    assert len(rows.digest(x[:3, :0], torch.int64).unique(dim=0)) == 1


@dataclass
class Made:
    hidden: torch.Tensor
    attention_mask: torch.Tensor
    more: tuple


def test_tensors_in_nested_results():
    a, b, c, d = (torch.randn(2) for _ in range(4))
    results = Made(a, b, (c, {"x": d, "past_key_values": a}, "text", None))
    tensors = dict(rows.tensors([results, b]))
    assert list(tensors) == ["0.hidden", "0.more.0", "0.more.1.x", "1"]
    assert tensors["0.more.1.x"] is d


def test_the_first_place_of_a_gradient_is_an_index_of_it():
    want = torch.randn(3, 5, 2)
    got = want.clone()
    got[1, 3, 1] = -got[1, 3, 1]
    got[2] += 1.0
    count = details.of_gradient("w", want, got)
    assert count.first == (1, 3, 1) and int(count.want, 16) ^ int(count.got, 16) == 1 << 31
    differs = want.contiguous().view(torch.uint8) != got.view(torch.uint8)
    assert count.bytes == int(differs.sum())
    assert details.of_gradient("w", want, want.clone()).first is None
    other = details.of_gradient("w", want, want.double())
    assert other.bytes == 8 * want.numel() and other.first == (0, 0, 0)
