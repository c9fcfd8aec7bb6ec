"""The SM90 forward of form "spans": one launch has the bytes of one attention for each run.

Keys that a row does not see are NaN, their values huge: junk of other sequences, padding, and slots
of a static cache that are not filled yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ptxsim
from cute_kernels.sparse_attn import launch, pack_gqa
from cute_kernels.sparse_attn.config import HEAD_DIMS, VALUE_DIMS
from cute_kernels.sparse_attn.kv_ranges import ranges
from cute_kernels.sparse_attn.tensors import shape_of_out
from ptxsim import modes
from tests import certified, contract
from tests.sparse_attn import mutated, simulated

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_one_launch_is_many test_heads_of_other_groups_are_noticed"
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

SCALE = 0.2


class Given(NamedTuple):
    """q [B, T, Hq, D], k and v [B, S, Hkv, D], spans int32 [B, 1, T, 4]."""

    q: Tensor
    k: Tensor
    v: Tensor
    spans: Tensor
    softcap: float = 0.0


def given(table: Tensor, columns: int, heads=(2, 1), dim=64, dtype=torch.bfloat16, **options):
    """Random operands for spans [B, T, 4]; junk where nobody looks."""
    generator = torch.Generator().manual_seed(len(table) + columns)
    batch, rows, _ = table.shape

    def drawn(length, heads, dim=dim):
        return torch.randn(batch, length, heads, dim, generator=generator).to(dtype)

    q, k = drawn(rows, heads[0]), drawn(columns, heads[1])
    v = drawn(columns, heads[1], VALUE_DIMS[dim])
    column = torch.arange(columns)
    visible = ((table[..., 2:3] <= column) & (column < table[..., 3:])).any(1)
    k[~visible] = math.nan
    v[~visible] = 3e38 if dtype == torch.bfloat16 else 6e4
    return Given(q, k, v, table[:, None].to(torch.int32), **options)


def at_once(one: Given, **options) -> tuple[Tensor, Tensor]:
    with simulated.simulated(**options):
        return launch.forward(*one[:3], one.spans, SCALE, one.softcap)


def by_runs(one: Given) -> tuple[Tensor, Tensor]:
    """As `sequence_op` does it for spans on the CPU."""
    out = one.q.new_zeros(shape_of_out(one.q, one.v))
    lse = torch.full((len(out), *out.shape[2:0:-1]), -math.inf)
    with simulated.simulated():
        for run in ranges.runs_of(one.spans, "cpu"):
            cut = run.cut_queries(one.q), run.cut_keys(one.k), run.cut_keys(one.v)
            part = launch.forward(*cut, run.lowered, SCALE, one.softcap)
            out[run.batch, run.queries], lse[run.batch, :, run.queries] = part
    return out, lse


def rows_of(begin: int, position: int, first: Tensor, end: Tensor) -> Tensor:
    """The spans [T, 4] of one sequence."""
    return torch.stack(
        [torch.full_like(first, begin), torch.full_like(first, position), first, end], 1
    )


def causal(rows: int, begin: int, length: int, position: int = 0, window: int | None = None):
    """The last ``rows`` of a sequence of ``length`` keys that lies at ``begin``."""
    end = begin + torch.arange(length - rows, length) + 1
    first = torch.full_like(end, begin)
    if window is not None:
        first = torch.maximum(first, end - window)
    return rows_of(begin, position, first, end)


def drawn_rows(rows: int, columns: int, begin: int, position: int) -> Tensor:
    """Any run of keys for each row, and none for some."""
    ends = torch.randint(
        begin, columns + 1, (rows, 2), generator=torch.Generator().manual_seed(rows)
    )
    first, end = ends.amin(1), ends.amax(1)
    return rows_of(begin, position, first, torch.where(torch.arange(rows) % 5 == 3, first, end))


def tables() -> dict[str, tuple[Tensor, int]]:
    """Spans [B, T, 4], and how many columns the buffer has."""
    decode = [
        causal(1, begin, length) for begin, length in ((0, 700), (131, 440), (299, 1), (5, 123))
    ]
    chunk = [causal(130, begin, 130 + more) for begin, more in ((0, 200), (77, 0), (128, 256))]
    window = [causal(200, begin, 300, 640 + begin, window=150) for begin in (0, 30)]
    # As behind the end of a sequence, among rows that see all of it, or all but the first key.
    every = rows_of(3, 0, torch.full((130,), 3), torch.full((130,), 400))
    every[::7, 3] = 3
    every[5::7, 2] = 4
    return {
        "all keys or none": (every[None], 450),
        "decode": (torch.stack(decode), 900),
        "chunk": (torch.stack(chunk), 600),
        "window behind dropped keys": (torch.stack(window), 333),
        "any run": (
            torch.stack([drawn_rows(300, 500, *index) for index in ((0, 0), (60, 200))]),
            500,
        ),
        "nothing": (torch.stack([rows_of(7, 0, *torch.full((2, 40), 9)) for _ in range(2)]), 50),
    }


TABLES = tables()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", TABLES)
def test_one_launch_is_many(name, dim):
    one = given(*TABLES[name], dim=dim)
    got = at_once(one)
    assert ptxsim.report()["fence_warnings"]["count"] == 0
    assert all(map(contract.same_bytes, got, by_runs(one)))
    assert got[0].isfinite().all() and not got[1].isnan().any()


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"softcap": 3.0}, {"heads": (6, 2)}], ids=str
)
def test_dtypes_softcap_and_groups(options):
    one = given(*TABLES["chunk"], **options)
    assert all(map(contract.same_bytes, at_once(one), by_runs(one)))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (20, 1)], ids=str)
def test_a_step_of_decoding_reads_keys_once_a_group(dim, heads, monkeypatch):
    """The heads of a group are rows: a CTA for each KV head, and the bytes of a CTA for each."""
    called, true_bind = [], launch.bind

    def bind(device, kernel, flatten=()):
        run = true_bind(device, kernel, flatten)
        return lambda *args: (called.append(args), run(*args))

    monkeypatch.setattr(launch, "bind", bind)
    one = given(*TABLES["decode"], dim=dim, heads=heads)
    got = at_once(one)
    ((rows, *_),) = called
    assert rows.shape == (4, heads[0] // heads[1], heads[1], dim)
    assert rows.untyped_storage().data_ptr() == one.q.untyped_storage().data_ptr()
    assert all(map(contract.same_bytes, got, by_runs(one)))


def test_heads_of_other_groups_are_noticed(monkeypatch):
    """Mutant: consecutive query heads have KV heads in turn."""
    one = given(*TABLES["decode"], heads=(8, 2))
    want = by_runs(one)[0]
    in_turn = lambda packed, t: t[:, 0].unflatten(1, (-1, packed.kv_heads))  # noqa: E731
    monkeypatch.setattr(pack_gqa.PackedGqa, "pack", in_turn)
    assert not contract.same_bytes(at_once(one)[0], want)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_modes_of_the_simulator(dim):
    one = given(*TABLES["any run"], dim=dim)
    modes.run_modes(lambda: at_once(one))


#: Module -> label -> (its text, a defect).
TEXTS = {
    "sparse_attn.device.kv_ranges": {
        "a key's block follows its column": ("span[BEGIN] - span[POSITION] % BLOCK", "span[BEGIN]"),
        "blocks are those of the buffer": ("span[BEGIN] - span[POSITION]", "0 * span[POSITION]"),
        "a block whose last key is not seen": ("key + (BLOCK - 1)", "key + (BLOCK - 2)"),
        "one of a thread's rows is asked": ("min(last[0], last[1])", "max(last[0], last[1])"),
        "a block whose first key is not seen": (" > key)", " > key + 1)"),
        "the row that sees least says how far": ('_sync(most, "max")', '_sync(most, "min")'),
        "a lane of a warp says how far": ('cute.arch.warp_redux_sync(most, "max")', "most"),
        "a block too few": ("(most + BLOCK - 1) // BLOCK", "most // BLOCK"),
        "the rows of the other half": ("row + 8 * half, column", "row + 8 - 8 * half, column"),
        "a key too many": ("(both[0][1] - 1, both[1][1] - 1)", "(both[0][1], both[1][1])"),
    },
    "sparse_attn.device.forward_loads": {
        "values of other columns": ("(0, None), moved[::-1]", "(0, None), (0, 0)"),
    },
}
MUTANTS = {k: (module, *text) for module, texts in TEXTS.items() for k, text in texts.items()}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_killed(tmp_path, mutant):
    kernel = mutated.kernels(tmp_path, *MUTANTS[mutant])
    for name in ("all keys or none", "any run", "decode", "window behind dropped keys"):
        one = given(*TABLES[name])
        try:
            got = at_once(one, forward=kernel)
        except ptxsim.PtxsimError:
            return
        if not all(map(contract.same_bytes, got, by_runs(one))):
            return
    raise AssertionError("nothing differs")
