"""The SM90 forward in the simulator: bytes of its order in torch, and float64 within the bound.

Both for every head size, kind of mask, grouping and tail.  ``exact`` arithmetic for the bytes;
``hopper`` (the truncating adder) for the bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import masks
from cute_kernels.sparse_attn.config import HEAD_DIMS, configure_forward
from tests import certified, contract
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import simulated
from tests.sparse_attn.gpu_cases import check
from tests.sparse_attn.simulated_fwd import MASKS, Case, case, chain, dense, run

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_masks_and_lengths test_nan_is_not_hidden test_what_the_compiled_entry_refuses"
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)


FORMS = {"full": "none", "causal": "band", "window": "band"}
#: (Sq, Sk): every tail class, one block and several, more queries than keys and fewer.
LENGTHS = [(1, 1), (63, 129), (129, 63), (383, 383), (1, 383)]


def check_bounds(inputs: Case, *results) -> None:
    allowed, scores = inputs.allowed, reference.Scores(inputs.scale, inputs.softcap)
    operands = inputs.q, inputs.k, inputs.v
    want = reference.attention(*operands, allowed, scale=inputs.scale, softcap=inputs.softcap)
    none = torch.zeros_like(want[0])
    bounds = reference.error_bounds(*operands, none, allowed, scores=scores)
    for result in results:
        for name, got, exact in zip(("out", "lse"), result, want, strict=True):
            check(name, got, exact, getattr(bounds, name))
        empty = result[0].transpose(1, 2)[want[1] == -math.inf]
        assert (contract.bits(empty) == 0).all()


def check_bytes(inputs: Case, out, lse) -> None:
    want, want_lse = chain(inputs)
    assert contract.same_bytes(out, want)
    assert contract.same_bytes(lse, want_lse)


def masks_and_sizes():
    """Each; of wide heads three masks for every commit."""
    for name, dim in itertools.product(MASKS, HEAD_DIMS):
        often = dim <= 128 or name in ("full", "causal", "random")
        yield pytest.param(name, dim, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "head_dim"), list(masks_and_sizes()))
def test_masks_and_lengths(name, head_dim):
    for q_len, kv_len in LENGTHS:
        mask = MASKS[name](q_len, kv_len)
        form = masks.lower(mask).form
        assert form in (FORMS.get(name, "bits"), "none")
        inputs = case(mask, (1, 2, 1, head_dim), seed=q_len)
        out, lse = run(inputs)
        assert ptxsim.report()["fence_warnings"]["count"] == 0
        check_bytes(inputs, out, lse)
        check_bounds(inputs, (out, lse), run(inputs, wgmma_math="hopper"))


@pytest.mark.parametrize(
    ("dtype", "softcap", "width"),
    [
        ("bf16", 3.0, 64),
        ("fp16", 0.0, 64),
        ("bf16", 3.0, 192),
        ("fp16", 3.0, 256),
        *(
            pytest.param(*other, 64, marks=pytest.mark.nightly)
            for other in (("bf16", 0.0), ("bf16", 50.0), ("fp16", 3.0), ("fp16", 50.0))
        ),
    ],
)
def test_dtypes_and_softcap(dtype, softcap, width):
    for name in ("causal", "random"):
        inputs = case(
            MASKS[name](300, 257), (1, 2, 2, width), dtype=dtype, softcap=softcap, spread=4
        )
        out, lse = run(inputs)
        check_bytes(inputs, out, lse)
        check_bounds(inputs, (out, lse))


def test_masks_of_batches_and_heads():
    """Lists of their own per batch and per head, and of one of the two."""
    for shape in ((2, 4), (2, 1), (1, 4)):
        inputs = case(dense(129, 383, *shape), (2, 4, 2, 64), seed=5)
        out, lse = run(inputs)
        check_bytes(inputs, out, lse)
        check_bounds(inputs, (out, lse))


def test_rows_without_keys_see_no_values():
    """An empty row in a visited block gives 0 whatever V holds: 0 times Inf does not come out."""
    allowed = torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[::3] = False
    inputs = case(BlockMask.from_dense(allowed), (1, 1, 1, 64))
    inputs.v[0, 5] = math.inf
    out, lse = run(inputs)
    assert (contract.bits(out[0, ::3]) == 0).all() and (lse[..., ::3] == -math.inf).all()


def test_nan_is_not_hidden():
    """A row whose own Q, or a key that it sees, is NaN is NaN, in O and in LSE."""
    inputs = case(BlockMask.causal(200, 200), (1, 1, 1, 64))
    inputs.q[0, 7], inputs.k[0, 150] = math.nan, math.nan
    out, lse = run(inputs)
    wrong = torch.zeros(200, dtype=torch.bool)
    wrong[7] = wrong[150:] = True
    assert torch.equal(out[0, :, 0].isnan().all(-1), wrong)
    assert torch.equal(lse[0, 0].isnan(), wrong) and not out[0, ~wrong].isnan().any()


def test_what_the_compiled_entry_refuses():
    """The second place of checks: TVM-FFI refuses dims, dtypes and strides that disagree."""
    good = case(BlockMask.causal(200, 200), (1, 2, 1, 64))
    compiled = simulated.kernel(configure_forward("bf16", 64, "band"))
    run(good)
    wrong = {
        "D": {"q": good.q[..., :32]},
        "keys": {"k": good.k[:, :100]},
        "batch": {"k": good.k.expand(2, -1, -1, -1)},
        "KV heads": {"v": good.v.expand(-1, -1, 2, -1)},
        "dtype": {"v": good.v.half()},
    }
    for label, change in wrong.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            run(dataclasses.replace(good, **change), forward=lambda _: compiled)
            pytest.fail(label)
