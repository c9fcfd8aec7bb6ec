"""The sm_90 code of the Triton attention, run in ptxsim.

Its source in Triton's interpreter: triton_interpreted.py, by tests/test_triton_interpreter.py.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels import arch, contracts
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import config, op
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.triton import launch
from ptxsim.skips import requires_core
from tests import contract
from tests.contract import ContractViolation, same_bytes

from . import against_float64, cases, cpu_battery, pack_cases, sequences, wild
from .triton_engines import copy_of, through
from .triton_harness import complaints, simulated

HOPPER = {"wgmma_math": 2}
LATE = HOPPER | {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "cta_order": 1, "seed": 9}
FEW = HOPPER | {"resident_ctas": 1, "cta_order": 2}
#: A group with a mask per head; another at 192, with v of 128.  By night also 128 and 256.
DRAWN = (58, 59)
WIDE = (192, 256)
MORE = tuple(seed for seed in range(64) if seed not in DRAWN)


@pytest.mark.parametrize(
    "device",
    [arch.Device("cuda:0", "hip", "gfx942", 304), arch.Device("cuda:0", "cuda", "sm_80", 108)],
    ids=lambda device: device.arch,
)
def test_an_id_names_the_tiles(monkeypatch, device):
    """Dispatched where SM90's kernels are not; another tile, another id."""
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    monkeypatch.setattr(arch, "describe", lambda _: device)
    name = contracts.contract_id(op.NAME, "cuda:0")
    assert name.startswith(f"block_sparse_attention/triton/{device.arch}/")
    assert contracts.guarantees(op.NAME, "cuda:0") == config.KEPT[arch.TRITON]
    plan = config.TRITON[64]
    other = dataclasses.replace(plan, dq=dataclasses.replace(plan.dq, block_n=32))
    monkeypatch.setitem(config.TRITON, 64, other)
    assert contracts.contract_id(op.NAME, "cuda:0") != name


@pytest.mark.parametrize(
    "seed", [*DRAWN, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in MORE)]
)
@pytest.mark.sim
@requires_core
def test_drawn_cases_against_float64(seed):
    """Values within the rounding bound, and code without atomics, spills or fused sums."""
    case = cases.draw(seed)
    with through(), simulated(**HOPPER) as kernels:
        excess = against_float64.checked(case)
    assert max(excess.values()) <= 1, f"{case}: {excess}"
    assert len(kernels) == 5
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name


def small_battery(launch=launch) -> int:
    """Chunks, padding, batches, heads, neighbours, layouts; a mask of all three forms."""
    op, x = cpu_battery.sequence_op("causal documents"), cpu_battery.sequence()
    one = tuple(t[:1] for t in x)
    with through(launch), simulated(launch, **HOPPER):
        count = sequences.check_chunks(op, one, [[1], [128], [3, 131, 140, 299]])
        count += sequences.check_padding(op, one, [84])
        count += sequences.check_batch(op, x, shuffles=1) + sequences.check_heads(op, x)
        count += sequences.check_neighbours(op, one, [128])
        return count + sequences.check_layout(op, one)


@pytest.mark.sim
@requires_core
def test_sequences():
    assert small_battery() > 28


@pytest.mark.parametrize("mask", cpu_battery.MASKS)
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (64, torch.bfloat16),
        (96, torch.float16),
        (192, torch.bfloat16),
        (256, torch.float16),
    ],
    ids=str,
)
@pytest.mark.nightly
@pytest.mark.sim
@requires_core
def test_every_transform_of_sequences(mask, dim, dtype):
    op = cpu_battery.sequence_op(mask, softcap=4.0)
    with through(), simulated(**HOPPER):
        assert cpu_battery.battery(op, cpu_battery.sequence(dim=dim, dtype=dtype)) > 50


@pytest.mark.nightly
@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("dim", [64, *WIDE])
def test_rows(dim):
    """Queries without positions are rows: the battery of every row op."""
    with through(), simulated(**HOPPER):
        assert contract.check_rows(cpu_battery.rows_op(dim), 150, 5) > 60


@pytest.mark.parametrize("dim", [64, *WIDE])
@pytest.mark.parametrize("rule", pack_cases.RULES, ids=str)
@pytest.mark.nightly
@pytest.mark.sim
@requires_core
def test_packs(rule, dim):
    lengths = [130, 0, 1, 61, 128]
    tensors = pack_cases.drawn(sum(lengths), heads=(4, 2), dim=dim)
    with pack_cases.launched(launch.forward, launch.backward), simulated(**HOPPER):
        out = pack_cases.packed(tensors, lengths, *rule)
        assert pack_cases.differing(out, pack_cases.alone(tensors, lengths, *rule)) == []


@pytest.mark.sim
@requires_core
def test_the_form_of_a_mask_does_not_show():
    """A band, the same band as bits, by batch and by head: three programs, one set of bits."""
    with through(), simulated(**HOPPER) as kernels:
        cpu_battery.same_elements_have_the_same_bits()
    assert len({kernel.hash for kernel in kernels}) >= 2


SIZE, HEADS, KV_HEADS = 300, 2, 1


@functools.cache
def problem(dim: int = 64) -> cases.Inputs:
    return cases.inputs(2, HEADS, KV_HEADS, SIZE, SIZE, dim, seed=9)


def gradients(schedule, x: cases.Inputs | None = None, mask: BlockMask | None = None):
    """dq, dk, dv through the op."""
    x = x or problem()
    mask = mask or BlockMask.causal(SIZE, SIZE)
    out, lse = block_sparse_attention(*x.leaves(), mask, schedule=schedule, return_lse=True)
    return torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))


def permuted(**options) -> Schedule:
    options = {"order": [2, 0, 1]} | options
    return kinds.permutation(BlockMask.causal(SIZE, SIZE), heads=2 * KV_HEADS, **options)


def equal(one, two) -> list[bool]:
    return [same_bytes(a, b) for a, b in zip(one, two, strict=True)]


@pytest.mark.parametrize(
    "dim", [64, *(pytest.param(dim, marks=pytest.mark.nightly) for dim in WIDE)]
)
@pytest.mark.sim
@requires_core
def test_gradients_follow_the_schedule_and_nothing_else(dim):
    """Late copies, random warps, one CTA at a time, interleaved and backward tickets: equal bytes.

    Other ranks change dQ alone, other visits dK and dV alone.
    """
    schedule, flight, x = permuted(), permuted(heads_in_flight=2), problem(dim)
    with through():
        with simulated(**HOPPER):
            want = gradients(schedule, x)
            assert (flight.order != schedule.order).any()
            assert all(equal(gradients(flight, x), want))
            assert equal(gradients(permuted(order=[0, 1, 2]), x), want) == [False, True, True]
            assert equal(gradients(permuted(walk="descending"), x), want) == [True, False, False]
        for options in (LATE, FEW):
            with simulated(**options):
                assert all(equal(gradients(schedule, x), want)), options


@pytest.mark.parametrize(
    "dim", [64, *(pytest.param(dim, marks=pytest.mark.nightly) for dim in WIDE)]
)
@pytest.mark.sim
@requires_core
def test_gradients_of_a_batch_and_of_other_layouts(dim):
    """Alone, beside NaN, with heads before tokens, misaligned: the bytes of the plain run."""
    x = problem(dim)
    with through(), simulated(**HOPPER):
        want = gradients("spt", x)
        for place in (0, 1):
            alone = cases.Inputs(*(part(t, place) for t in vars(x).values()))
            assert all(equal(gradients("spt", alone), (t[place : place + 1] for t in want)))
            noisy = cases.Inputs(*(beside_nan(t, place) for t in vars(x).values()))
            assert all(equal((t[place] for t in gradients("spt", noisy)), (t[place] for t in want)))
        for view in (heads_first, shifted):
            other = cases.Inputs(*(view(t) for t in vars(x).values()))
            assert all(equal(gradients("spt", other), want)), view.__name__


def part(t: torch.Tensor, place: int) -> torch.Tensor:
    return t.detach()[place : place + 1].requires_grad_(t.requires_grad)


def beside_nan(t: torch.Tensor, place: int) -> torch.Tensor:
    new = torch.full_like(t.detach(), torch.nan)
    new[place] = t.detach()[place]
    return new.requires_grad_(t.requires_grad)


def heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """Odd strides, an odd address, NaN between."""
    room = t.new_full((*t.shape[:-1], t.shape[-1] + 1), torch.nan)
    return room[..., 1:].copy_(t.detach()).detach().requires_grad_(t.requires_grad)


@pytest.mark.sim
@requires_core
def test_nan_in_masked_rows_reaches_the_blocks_that_are_visited():
    x = cases.inputs(1, 1, 1, wild.SIZE, wild.SIZE, 64)

    def gradients(q, k, v, dout):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with through(), simulated(**HOPPER):
            return torch.autograd.grad(block_sparse_attention(*leaves, wild.mask()), leaves, dout)

    wild.check(gradients, (*x.leaves(), x.dout), wild.REACHES)


@pytest.mark.sim
@requires_core
def test_an_operand_is_copied_only_if_rows_cannot_be_loaded():
    plain = problem().q.detach()
    fused = torch.zeros(2, SIZE, 3, HEADS, 64, dtype=torch.bfloat16)[:, :, 1]
    for t in (plain, fused, plain[:1].expand(2, -1, -1, -1), plain[:, ::2]):
        assert launch._loadable(t, False) is t
    for t in (shifted(plain), plain.transpose(2, 3).contiguous().transpose(2, 3), plain[..., 1:33]):
        assert launch._loadable(t, False).is_contiguous()


@pytest.mark.sim
@requires_core
def test_sinks_that_are_not_contiguous():
    x = [t.detach() for t in cases.inputs(1, 2, 1, 40, 40, 64).leaves()]
    sinks = torch.tensor([[1.0, 9.0], [2.0, 8.0]])
    with through(), simulated(**HOPPER):
        want = block_sparse_attention(*x, sinks=sinks[:, 0].clone(), return_lse=True)
        out = block_sparse_attention(*x, sinks=sinks[:, 0], return_lse=True)
    assert all(map(same_bytes, out, want))


@pytest.mark.sim
@requires_core
def test_a_row_that_follows_its_neighbours_is_killed(tmp_path):
    mutant = copy_of(
        tmp_path,
        (
            "tl.max(s, axis=1) * factor",
            "tl.max(tl.max(s, axis=1), axis=0) * factor",
        ),
    )
    with pytest.raises(ContractViolation):
        small_battery(mutant)
