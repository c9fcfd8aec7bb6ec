"""ck.apply_rotary_pos_emb on a CPU: the bytes of torch's eager ops and of their autograd."""

from __future__ import annotations

import itertools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentValueError,
    DtypeError,
    ShapeError,
)
from cute_kernels.rowwise import cpu, op
from cute_kernels.runtime.plan_cache import Plan
from tests import plans
from tests.anchors import planted
from tests.contract import same_bytes

from . import rotary_cases as rotary
from .cases import BF16, DTYPES, FP16, FP32, drawn
from .rotary_cases import same_numbers

#: (q's dtype, that of the tables)
MIXES = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] == pair[1] or FP32 in pair]
#: name -> (torch's ops, rotated columns of 16, whether results keep q's dtype)
FORMULAS = {
    "whole": (rotary.whole, 16, False),
    "partial": (rotary.partial, 8, False),
    "partial of all": (rotary.partial, 16, False),
    "keeping q's dtype": (rotary.keeping_dtype, 16, True),
}


def both_passes(function, q, k, cos, sin, seed: int, **options) -> list[torch.Tensor]:
    """Results and gradients, with random gradients of the results."""
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    made = function(*leaves, cos, sin, **options)
    up = [rotary.numbers(*t.shape, dtype=t.dtype, seed=seed + 20) for t in made]
    return [*(t.detach() for t in made), *torch.autograd.grad(made, leaves, up)]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_it_has_the_bytes_of_torchs_ops(mix, name):
    formula, width, keeps = FORMULAS[name]
    for seed in range(4):
        args = rotary.operands(*mix, width, 16, seed)
        options = {"dtype": mix[0]} if keeps else {}
        want = both_passes(formula, *args, seed)
        got = both_passes(ck.apply_rotary_pos_emb, *args, seed, **options)
        assert all(map(same_numbers, got, want))
        assert all(not t.isnan().all() and (t == 0).any() for t in want)


ZEROS = [("(of_sin[1] + 0.0)", "of_sin[1]"), ("(0.0 - of_sin[0])", "-of_sin[0]")]
MUTANTS = {
    "once": [("return v.to(dtype).to(torch.float32)", "return v")],
    "halves of x not padded with zeros": ZEROS,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_other_roundings_are_seen(name):
    args = rotary.operands(BF16, BF16, 16, 16)
    want = both_passes(rotary.whole, *args, 0)
    with planted(cpu, *MUTANTS[name]):
        got = both_passes(ck.apply_rotary_pos_emb, *args, 0)
    assert not all(map(same_numbers, got, want))


@pytest.mark.parametrize(("dim", "shapes"), [(2, (2, 7, 4, 16)), (0, (4, 7, 16))], ids=str)
def test_positions_first_and_no_batch(dim, shapes):
    q, k = (drawn(*shapes, seed=s, dtype=BF16) for s in (1, 2))
    tables = (2, 7, 16) if dim else (7, 16)
    cos, sin = (drawn(*tables, seed=s, dtype=BF16) for s in (3, 4))
    got = ck.apply_rotary_pos_emb(q, k, cos, sin, dim)
    assert all(map(same_bytes, got, rotary.whole(q, k, cos, sin, dim)))


def test_results_lie_as_torchs_do():
    q, k, cos, sin = rotary.operands(BF16, BF16, 16, 16)
    packed = torch.cat((q, q), -1)[..., :16]
    for x in (q, q.contiguous(), packed):
        for result, theirs in zip(
            ck.apply_rotary_pos_emb(x, k, cos, sin), rotary.whole(x, k, cos, sin), strict=True
        ):
            assert result.stride() == theirs.stride() and same_numbers(result, theirs)
    columns = q.mT.contiguous().mT
    result, theirs = ck.apply_rotary_pos_emb(columns, k, cos, sin)[0], rotary.whole(q, k, cos, sin)
    assert result.is_contiguous() and same_numbers(result, theirs[0])


def test_a_gradient_that_is_missing_stays_so():
    q, k, cos, sin = rotary.operands(BF16, BF16, 16, 16)
    want = both_passes(rotary.whole, q, k, cos, sin, 3)[2:]
    up = [rotary.numbers(*t.shape, dtype=t.dtype, seed=23) for t in (q, k)]
    for i in (0, 1):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        made = ck.apply_rotary_pos_emb(*leaves, cos, sin)
        got = torch.autograd.grad(made[i], leaves, up[i], allow_unused=True)
        assert same_numbers(got[i], want[i]) and got[1 - i] is None
    leaf = q.detach().requires_grad_()
    made = ck.apply_rotary_pos_emb(leaf, k, cos, sin)
    assert same_numbers(torch.autograd.grad(made[0], leaf, up[0])[0], want[0])


def test_a_process_that_flushes_subnormals_has_the_same_bytes():
    """The mutant, torch's own ops, has not."""
    q, k, cos, sin = rotary.operands(FP32, FP32, 16, 16)
    up = q.flip(1), k.flip(1)

    def run(function):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        made = function(*leaves, cos, sin)
        return *(t.detach() for t in made), *torch.autograd.grad(made, leaves, up)

    want = run(ck.apply_rotary_pos_emb)
    assert torch.set_flush_denormal(True)
    try:
        got, theirs = run(ck.apply_rotary_pos_emb), run(rotary.whole)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(same_numbers, got, want)) and not all(map(same_numbers, theirs, want))


# ---- cached plans --------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Plans of CPU tensors are cached; yields the (entry, options) that were planned and run."""
    planned, runs = [], []

    def plan(entry, device, dtype, *call):
        planned.append((entry, call[-3:]))

        def launch(*args):
            runs.append(entry)
            return cpu.rotary_pair(*args)  # a launcher without a planner, as on AMD

        return Plan(launch)

    with plans.cached(monkeypatch, plan):
        yield planned, runs


def test_a_known_call_has_the_bytes_of_the_first(launched):
    planned, runs = launched
    args, other = (rotary.operands(BF16, BF16, 16, 16, s) for s in (0, 5))
    first, later = (both_passes(ck.apply_rotary_pos_emb, *args, 0) for _ in range(2))
    third = both_passes(ck.apply_rotary_pos_emb, *other, 0)
    assert all(map(same_bytes, first, later)) and len(planned) == 2 and len(runs) == 6
    assert all(map(same_numbers, third, both_passes(rotary.whole, *other, 0)))


def test_other_options_are_another_call(launched):
    planned, _ = launched
    q = drawn(2, 2, 2, 16, dtype=BF16)
    bf16, fp32 = ([drawn(2, 2, 16, seed=s, dtype=t) for s in (1, 2)] for t in (BF16, FP32))
    for dim, dtype, tables in [*itertools.product((1, 2), (None, FP32, BF16), (bf16, fp32))] * 2:
        got = ck.apply_rotary_pos_emb(q, q, *tables, dim, dtype=dtype)
        want = rotary.whole(q, q, *tables, dim)
        result = dtype or tables[0].dtype
        assert all(same_bytes(a, b.to(result)) for a, b in zip(got, want, strict=True))
    assert len(planned) == 12


def test_bad_calls_are_refused_behind_known_ones(launched):
    args = rotary.operands(BF16, BF16, 16, 16)
    ck.apply_rotary_pos_emb(*args), ck.apply_rotary_pos_emb(*args)
    with pytest.raises(ShapeError, match="sin"):
        ck.apply_rotary_pos_emb(*args[:3], args[3][..., :8])
    with pytest.raises(DtypeError, match="dtype"):
        ck.apply_rotary_pos_emb(*args, dtype=FP16)
    for i, name in ((2, "cos"), (3, "sin")):
        learned = [t.clone().requires_grad_() if j == i else t for j, t in enumerate(args)]
        with pytest.raises(ArgumentValueError, match=f"^{name}: expected requires_grad=False"):
            ck.apply_rotary_pos_emb(*learned)
        # In a model the author's formula runs, which has a gradient of its tables.
        assert op.rotate_if_taken(*learned, 1, None) is None


def test_what_a_model_calls_is_none_where_torch_takes_it():
    q, k, cos, sin = rotary.operands(BF16, BF16, 16, 16)
    assert op.rotate_if_taken(q, k, cos, sin, 1, None) is not None
    for call in (
        (q[:1], k[:1], cos, sin, 1, None),
        (q, k, cos.requires_grad_(), sin, 1, None),
        (q, k, cos.detach().to(FP16), sin.to(FP16), 1, None),
        (q.double(), k.double(), cos.detach(), sin, 1, None),
    ):
        assert op.rotate_if_taken(*call) is None
