"""Bad inputs, in one table: each names the argument, what was expected and what came.

Nothing runs before the checks are through: the backend is taken away.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from cute_kernels import arch, errors
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    DtypeError,
    MaskError,
    MaskTypeError,
    ScheduleError,
    ShapeError,
)
from cute_kernels.runtime import checking
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import checks, cpu
from cute_kernels.sparse_attn.api import block_sparse_attention

B, S, H, HKV, D = 2, 300, 4, 2, 64
COLUMNS = 3
BF16 = torch.bfloat16


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, device=device).to(dtype)
    return torch.ones(shape, dtype=dtype, device=device)


def q(**options):
    return t(B, S, H, D, **options)


def kv(**options):
    return t(B, S, HKV, D, **options)


def att(*args, **options):
    return lambda: block_sparse_attention(*args, **options)


def of_dims(dim: int, value_dim: int, key_dim: int = 0):
    """Of head sizes of q and v, and of k if it is not q's."""
    return att(t(1, 2, 1, dim), t(1, 2, 1, key_dim or dim), t(1, 2, 1, value_dim))


def masked(mask, **options):
    return lambda: block_sparse_attention(
        q(), kv(), kv(), mask() if callable(mask) else mask, **options
    )


def ordered(schedule, mask=None):
    """A schedule (or a function that makes it) on a causal mask."""

    def call():
        value = schedule() if callable(schedule) else schedule
        block_sparse_attention(q(), kv(), kv(), mask or causal(), schedule=value)

    return call


def causal() -> BlockMask:
    return BlockMask.causal(S, S)


def good(**options) -> Schedule:
    return kinds.left_to_right(causal(), heads=B * HKV, **options)


def changed(**arrays) -> Schedule:
    """A right schedule with one array replaced."""
    return dataclasses.replace(good(), **arrays)


def edited(name: str, place, value) -> Schedule:
    array = getattr(good(), name).copy()
    array[place] = value
    return changed(**{name: array})


def swapped(name: str, i: int, j: int) -> Schedule:
    array = getattr(good(), name).copy()
    array[[i, j]] = array[[j, i]]
    return changed(**{name: array})


def bits_by_batch() -> BlockMask:
    generator = torch.Generator().manual_seed(1)
    return BlockMask.from_dense(torch.rand(B, 1, S, S, generator=generator) < 0.5)


def shared_lists() -> Schedule:
    """One set of lists for two batches whose masks have equal blocks and other bits."""
    mask = bits_by_batch()
    return kinds.left_to_right(mask.dense_blocks()[0, 0], heads=B * HKV)


def on_a_full_mask() -> Schedule:
    full = np.full((S // 128 + 1, COLUMNS), 2, np.uint8)
    return kinds.permutation(full, order=range(COLUMNS), heads=B * HKV)


def crossed() -> Schedule:
    """Row 1 is written from the last column to the first, and column 0 visits it first: it waits
    for column 2, which first waits for column 0 in row 0."""
    schedule = on_a_full_mask()
    rank, rows = schedule.rank.copy(), schedule.q_block.copy().reshape(-1, COLUMNS, 3)
    table = rank.reshape(-1, COLUMNS, 3)
    table[:, :, 1] = 2 - table[:, :, 1]
    rows[:, 0] = [1, 0, 2]
    table[:, 0] = table[:, 0][:, [1, 0, 2]]
    return dataclasses.replace(schedule, rank=rank, q_block=rows.reshape(-1))


FULL = BlockMask.full(S, S)
MASKS = [
    (
        "mask a tensor",
        masked(t(S, S, dtype=torch.bool)),
        ArgumentTypeError,
        ["block_mask", "from_dense", "Tensor"],
    ),
    ("mask a string", masked("causal"), ArgumentTypeError, ["block_mask", "str"]),
    ("mask True", masked(True), ArgumentTypeError, ["block_mask", "bool"]),
    ("mask a rule", masked(Band(0, 0)), ArgumentTypeError, ["block_mask", "Band"]),
    (
        "mask q_len",
        masked(BlockMask.causal(S - 1, S)),
        ShapeError,
        ["block_mask", "(300, 300)", "(299, 300)"],
    ),
    (
        "mask kv_len",
        masked(BlockMask.full(S, S + 128)),
        ShapeError,
        ["block_mask", "(300, 300)", "(300, 428)"],
    ),
    (
        "mask of 3 batches",
        masked(lambda: BlockMask.from_dense(torch.rand(3, 1, S, S) < 0.5)),
        ShapeError,
        ["block_mask", "1 or 2 batch", "3"],
    ),
    (
        "mask of KV heads",
        masked(lambda: BlockMask.from_dense(torch.rand(1, HKV, S, S) < 0.5)),
        ShapeError,
        ["block_mask", "1 or 4 query heads", "2"],
    ),
    (
        "mask not square, document",
        lambda: masked(BlockMask.document(torch.zeros(S + 1, dtype=torch.int32)))(),
        ShapeError,
        ["block_mask", "(301, 301)"],
    ),
    ("flex mask", masked(lambda: flex_mask()), ArgumentTypeError, ["block_mask", "from_flex"]),
    (
        "window left < 0",
        masked(lambda: BlockMask.sliding_window(S, S, left=-1, right=0)),
        MaskError,
        ["left", "-1"],
    ),
    (
        "dense of ints",
        masked(lambda: BlockMask.from_dense(t(S, S, dtype=torch.int32))),
        MaskTypeError,
        ["dense", "int32"],
    ),
    (
        "block size 0",
        masked(lambda: BlockMask.full(S, S, block_size=0)),
        MaskError,
        ["block_size", "0"],
    ),
    (
        "prefix too long",
        masked(lambda: BlockMask.prefix_lm(S, S, prefix=S + 1)),
        MaskError,
        ["prefix", "301"],
    ),
    (
        "blocks out of range",
        masked(
            lambda: BlockMask.from_blocks(
                torch.ones(1, 1, 3, dtype=torch.int32),
                torch.full((1, 1, 3, 1), 3, dtype=torch.int32),
                S,
                S,
            )
        ),
        MaskError,
        ["kv_index", "[0, 3)", "3"],
    ),
]
SCHEDULES = [
    ("unknown kind", ordered("fastest"), ArgumentValueError, ["schedule", "'spt'", "'fastest'"]),
    ("empty name", ordered(""), ArgumentValueError, ["schedule", "'auto'", "''"]),
    ("schedule None", ordered(lambda: None), ArgumentTypeError, ["schedule", "NoneType"]),
    ("schedule a number", ordered(3), ArgumentTypeError, ["schedule", "int"]),
    ("schedule a dict", ordered({}), ArgumentTypeError, ["schedule", "dict"]),
    ("order too short", ordered([0, 1]), ScheduleError, ["schedule", "[3]", "[2]"]),
    ("order too long", ordered([0, 1, 2, 3]), ScheduleError, ["schedule", "[3]", "[4]"]),
    (
        "order repeats",
        ordered([0, 1, 1]),
        ScheduleError,
        ["schedule", "permutation of 0..2", "twice"],
    ),
    ("order beyond", ordered([0, 1, 3]), ScheduleError, ["schedule", "permutation of 0..2", "3"]),
    ("order negative", ordered([0, 1, -1]), ScheduleError, ["schedule", "permutation", "-1"]),
    (
        "order of floats",
        ordered([0.0, 1.0, 2.0]),
        ScheduleError,
        ["schedule", "integers", "float64"],
    ),
    ("order ragged", ordered([[0, 1, 2], [0, 1]]), ScheduleError, ["schedule", "ragged"]),
    (
        "order by 3 heads",
        ordered([[0, 1, 2]] * 3),
        ScheduleError,
        ["schedule", "1 or 4 heads", "3"],
    ),
    (
        "order wrong in one head",
        ordered(torch.tensor([[0, 1, 2]] * 3 + [[0, 0, 2]])),
        ScheduleError,
        ["schedule (head 3)", "column 0 twice"],
    ),
    ("order [3, 1]", ordered(np.arange(3)[:, None]), ScheduleError, ["schedule", "[3]", "[3, 1]"]),
    (
        "of another mask",
        ordered(lambda: kinds.spt(FULL, heads=B * HKV)),
        ScheduleError,
        ["row 0", "kv block", "partial as in the mask"],
    ),
    (
        "full taken for partial",
        ordered(lambda: changed(partial=~good().partial)),
        ScheduleError,
        ["row", "as in the mask"],
    ),
    (
        "of other lengths",
        ordered(lambda: kinds.spt(BlockMask.causal(S + 128, S + 128), heads=B * HKV)),
        ScheduleError,
        ["schedule", "(3, 3) blocks", "(4, 4)"],
    ),
    (
        "of other blocks",
        ordered(lambda: kinds.spt(BlockMask.causal(S, S, block_size=64), heads=B * HKV)),
        ScheduleError,
        ["schedule", "(3, 3) blocks", "(5, 5)"],
    ),
    (
        "for query heads",
        ordered(lambda: kinds.spt(causal(), heads=B * H)),
        ScheduleError,
        ["schedule.heads", "4", "8"],
    ),
    (
        "for one head",
        ordered(lambda: kinds.spt(causal())),
        ScheduleError,
        ["schedule.heads", "4", "got 1"],
    ),
    (
        "a ticket twice",
        ordered(lambda: edited("order", 1, (0, 0))),
        ScheduleError,
        ["order", "in one ticket", "head 0 kv block 0 in tickets"],
    ),
    (
        "a ticket beyond",
        ordered(lambda: edited("order", 2, (0, 3))),
        ScheduleError,
        ["ticket 2", "kv block in [0, 3)"],
    ),
    ("a rank twice", ordered(lambda: edited("rank", 3, 0)), ScheduleError, ["rank", "twice"]),
    ("a rank beyond", ordered(lambda: edited("rank", 0, 9)), ScheduleError, ["rank of row", "9"]),
    (
        "a rank below 0",
        ordered(lambda: edited("rank", 0, -1)),
        ScheduleError,
        ["rank of row", "-1"],
    ),
    (
        "a row beyond",
        ordered(lambda: edited("q_block", 2, 3)),
        ScheduleError,
        ["q_block", "rows in [0, 3)", "row 3"],
    ),
    ("a row twice", ordered(lambda: edited("q_block", 1, 0)), ScheduleError, ["q_block", "twice"]),
    (
        "tickets backwards",
        ordered(lambda: changed(order=good().order[::-1])),
        ScheduleError,
        ["schedule", "resident CTAs", "needs 3"],
    ),
    ("waits in a ring", ordered(crossed, FULL), ScheduleError, ["waits without a cycle", "rank"]),
    ("shift by name", ordered("shift", FULL), ScheduleError, ["schedule", "'shift', which needs"]),
    (
        "lists of two masks",
        ordered(shared_lists, bits_by_batch()),
        ScheduleError,
        ["schedule.list_of_head", "share a mask"],
    ),
]
TENSORS = [
    ("q a list", att([1.0], kv(), kv()), ArgumentTypeError, ["q", "torch.Tensor", "list"]),
    ("k None", att(q(), None, kv()), ArgumentTypeError, ["k", "NoneType"]),
    ("v numpy", att(q(), kv(), np.ones(3)), ArgumentTypeError, ["v", "ndarray"]),
    ("q 3-D", att(t(S, H, D), kv(), kv()), ShapeError, ["q", "4 dimensions [B, Sq, Hq, D]", "3"]),
    ("k 5-D", att(q(), t(1, B, S, HKV, D), kv()), ShapeError, ["k", "[B, Sk, Hkv, D]", "5"]),
    ("v 3-D", att(q(), kv(), t(S, HKV, D)), ShapeError, ["v", "[B, Sk, Hkv, Dv]", "3"]),
    ("q fp32", att(q(dtype=torch.float32), kv(), kv()), DtypeError, ["q", "float32"]),
    ("all fp64", att(*[x(dtype=torch.float64) for x in (q, kv, kv)]), DtypeError, ["q", "float64"]),
    ("q int", att(q(dtype=torch.int32), kv(), kv()), DtypeError, ["q", "int32"]),
    ("k fp16", att(q(), kv(dtype=torch.float16), kv()), DtypeError, ["k", "bfloat16", "float16"]),
    ("v fp16", att(q(), kv(), kv(dtype=torch.float16)), DtypeError, ["v", "float16"]),
    ("v sparse", att(q(), kv(), kv().to_sparse()), ArgumentTypeError, ["v", "dense", "sparse"]),
    ("v longer", att(q(), kv(), t(B, S + 1, HKV, D)), ShapeError, ["v", "[2, 300, 2]", "301"]),
    ("v wider", att(q(), kv(), t(B, S, HKV, 128)), ShapeError, ["v", "size 64 for q of 64", "128"]),
    ("v of 64 for 128", of_dims(128, 64), ShapeError, ["v", "head size 128 for q of 128", "64"]),
    ("v of 192", of_dims(192, 192), ShapeError, ["v", "head size 128 for q of 192", "192"]),
    ("v of 64 for 192", of_dims(192, 64), ShapeError, ["v", "head size 128 for q of 192", "64"]),
    ("v of 128 for 256", of_dims(256, 128), ShapeError, ["v", "head size 256 for q of 256", "128"]),
    ("k of 128 for 192", of_dims(192, 128, 128), ShapeError, ["k", "head size 192 like q", "128"]),
    ("q as narrow as v", of_dims(128, 128, 192), ShapeError, ["k", "head size 128 like q", "192"]),
    ("k of 3 batches", att(q(), *[t(3, S, HKV, D)] * 2), ShapeError, ["k", "batch 2", "3"]),
    ("k narrower", att(t(B, S, H, 128), kv(), kv()), ShapeError, ["k", "head size 128", "64"]),
    ("D 80", att(t(B, S, H, 80), *[t(B, S, H, 80)] * 2), ShapeError, ["head size", "96", "80"]),
    ("D 320", of_dims(320, 320), ShapeError, ["head size of q", "192, 256", "320"]),
    ("3 KV heads", att(q(), *[t(B, S, 3, D)] * 2), ShapeError, ["k", "divides the 4", "3"]),
    ("8 KV heads", att(q(), *[t(B, S, 8, D)] * 2), ShapeError, ["k", "divides the 4", "8"]),
    ("no KV heads", att(q(), *[t(B, S, 0, D)] * 2), ShapeError, ["k", "divides", "0"]),
    ("no heads", att(t(B, S, 0, D), kv(), kv()), ShapeError, ["k", "divides the 0"]),
    ("k on meta", att(q(), kv(device="meta"), kv()), DeviceError, ["k", "cpu", "meta"]),
    ("v on meta", att(q(), kv(), kv(device="meta")), DeviceError, ["v", "cpu", "meta"]),
    (
        "longer than int32",
        att(
            t(1, 1, 1, D, device="meta"),
            *[torch.empty(1, 2**30, 1, D, dtype=BF16, device="meta")] * 2,
        ),
        ShapeError,
        ["k", "below 1073741824"],
    ),
]
OPTIONS = [
    ("scale 0", masked(None, scale=0.0), ArgumentValueError, ["scale", "above 0", "0.0"]),
    ("scale < 0", masked(None, scale=-1), ArgumentValueError, ["scale", "above 0", "-1"]),
    ("scale nan", masked(None, scale=math.nan), ArgumentValueError, ["scale", "finite", "nan"]),
    ("scale a tensor", masked(None, scale=torch.ones(())), ArgumentTypeError, ["scale", "tensor"]),
    ("scale True", masked(None, scale=True), ArgumentTypeError, ["scale", "number", "True"]),
    ("softcap 1025", masked(None, softcap=1025), ArgumentValueError, ["softcap", "to 1024"]),
    ("softcap < 0", masked(None, softcap=-2.0), ArgumentValueError, ["softcap", "-2.0"]),
    ("softcap inf", masked(None, softcap=math.inf), ArgumentValueError, ["softcap", "inf"]),
    ("scale 1e300", masked(None, scale=1e300), ArgumentValueError, ["scale", "2**40", "1e+300"]),
    ("scale 1e-300", masked(None, scale=1e-300), ArgumentValueError, ["scale", "2**-40"]),
    ("softcap 1e300", masked(None, softcap=1e300), ArgumentValueError, ["softcap", "0 (none), or"]),
    ("softcap 1e-300", masked(None, softcap=1e-300), ArgumentValueError, ["softcap", "1e-300"]),
    ("softcap None", masked(None, softcap=None), ArgumentTypeError, ["softcap", "None"]),
    ("causal 1", masked(None, causal=1), ArgumentTypeError, ["causal", "True or False", "1"]),
    ("causal None", masked(None, causal=None), ArgumentTypeError, ["causal", "None"]),
    ("deterministic 0", masked(None, deterministic=0), ArgumentTypeError, ["deterministic", "0"]),
    ("return_lse 1", masked(None, return_lse="yes"), ArgumentTypeError, ["return_lse", "'yes'"]),
]
CASES = MASKS + SCHEDULES + TENSORS + OPTIONS


def flex_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu")


def test_the_table_is_long_enough():
    assert len(MASKS) >= 14 and len(SCHEDULES) >= 20 and len(TENSORS) >= 20
    assert len({case[0] for case in CASES}) == len(CASES)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Whatever reaches a launcher came too far."""

    def launched(*args):
        raise AssertionError("launched")

    monkeypatch.setattr(cpu, "_attend", launched)
    monkeypatch.setattr(cpu, "_blocked", launched)


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert all(fragment in message for fragment in fragments), message


def test_good_input_is_launched():
    """The control: what the table varies is right before it is varied."""
    for call in (
        masked(causal()),
        ordered(good),
        ordered(on_a_full_mask, FULL),
        ordered([2, 0, 1]),
    ):
        with pytest.raises(AssertionError, match="launched"):
            call()


def test_flags_of_a_call_that_is_known_are_checked(monkeypatch):
    """The second call of a signature runs a cached plan: its flags are no part of the key."""
    monkeypatch.undo()
    tensors = q(), kv(), kv()
    for _ in range(2):
        assert block_sparse_attention(*tensors).shape == (B, S, H, D)
    for name in ("causal", "deterministic", "return_lse"):
        for value in ("False", 0, 1, None):
            with pytest.raises(ArgumentTypeError, match=f"^{name}: expected True or False, got "):
                block_sparse_attention(*tensors, **{name: value})


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_devices_without_a_backend_are_refused(device):
    with pytest.raises(BackendUnavailable, match=f"no backend for {device}") as caught:
        checking.supported("block_sparse_attention", torch.device(device))
    assert "cute_sm90" in str(caught.value) and "triton" in str(caught.value)


def test_fp32_is_refused_by_its_own_name_unless_autocast_casts_it():
    wide = [x(dtype=torch.float32) for x in (q, kv, kv)]
    with pytest.raises(DtypeError, match="float32"):
        block_sparse_attention(*wide)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="launched"):
        block_sparse_attention(*wide)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DtypeError, match="float64"):
        block_sparse_attention(wide[0].double(), *wide[1:])


def test_which_backward_stacks_the_heads_of_a_group(monkeypatch):
    """Where SM90 is the device's backend: (heads of the mask, rows, heads of q, of k)."""
    assert not checks.packs_gqa("cuda:0", 4, 100, 4, 2)  # no SM90 here
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    monkeypatch.setattr(arch, "describe", lambda _: arch.Device("cuda:0", "cuda", "sm_90a", 132))
    assert checks.packs_gqa("cuda:0", 4, 100, 4, 2)
    assert not checks.packs_gqa("cuda:0", 4, 100, 4, 4)
    assert not checks.packs_gqa("cuda:0", 1, 100, 4, 2)
    with pytest.raises(ShapeError, match=r"q: .*below 536870912.*by query head.*536870900"):
        checks.packs_gqa("cuda:0", 4, 2**29 - 12, 4, 2)
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    assert not checks.packs_gqa("cuda:0", 4, 100, 4, 2)


def test_a_gradient_is_checked_before_anything_runs(monkeypatch):
    """The op asks, and only if a gradient is wanted."""
    recorded = []

    def refuse(*sizes):
        recorded.append(sizes)
        raise ShapeError("refused")

    monkeypatch.setattr(checks, "packs_gqa", refuse)
    mask = BlockMask.from_dense(torch.ones(1, H, S, S, dtype=torch.bool).tril())
    with pytest.raises(ShapeError, match="refused"):
        block_sparse_attention(q().requires_grad_(), kv(), kv(), mask)
    assert recorded == [("cpu", H, S, H, HKV)]
    with torch.no_grad(), pytest.raises(AssertionError, match="launched"):
        block_sparse_attention(q().requires_grad_(), kv(), kv(), mask)
