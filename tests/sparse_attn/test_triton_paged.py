"""Triton's attention over paged caches: its bytes, its code on every target, its mutants."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.sparse_attn.triton import launch, paged
from ptxsim.skips import requires_core
from tests import interpreted
from tests import triton_harness as harness
from tests.old_memory import old_memory
from tests.triton_harness import WildAccess

from ..gemm import triton_inspect as inspect
from . import paged_batches, paged_cases
from . import triton_paged_cases as cases
from .paged_batches import HND, Case, batch_of
from .triton_paged_cases import copy_of

FORWARD = {"forward_kernel": ("out_ptr", "lse_ptr")}
PAGED = {
    "paged_forward_kernel": ("out_ptr", "lse_ptr"),
    "write_kv_kernel": ("k_ptr", "v_ptr"),
}
HOPPER = {"wgmma_math": 2}
LATE = HOPPER | {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "cta_order": 1, "seed": 9}
FEW = HOPPER | {"resident_ctas": 1, "cta_order": 2}
BF16, FP16 = torch.bfloat16, torch.float16


INTERPRETED = Path(__file__).with_name("triton_paged_interpreted.py")


def test_mutants_in_the_interpreter():
    """By day every sixth one."""
    passed = interpreted.check([INTERPRETED], marked="not nightly", chosen="test_killed")
    assert passed.total() >= 4


@pytest.mark.nightly
def test_everything_in_the_interpreter():
    assert interpreted.check([INTERPRETED]).total() >= 45


# ---- the sm_90 code, in the simulator -----------------------------------------------------------


@contextlib.contextmanager
def simulated(module=paged, options=HOPPER) -> Iterator[list]:
    """Runs launches of both forwards in ptxsim; memory that they leave unwritten holds NaN.

    Yields the kernels of ``module`` that were launched.
    """
    with (
        old_memory(),
        harness.simulated(launch, FORWARD, HOPPER),
        harness.simulated(module, PAGED, options) as kernels,
    ):
        yield kernels


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__)
def test_sm90_bytes(check):
    with simulated():
        check(paged)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s < 4 else pytest.mark.nightly) for s in range(500)]
)
def test_sm90_drawn_batches(seed):
    """Mixed batches of every head size, page size, layout and rule."""
    with simulated():
        cases.dense(paged_batches.draw(seed), paged)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("options", [LATE, FEW], ids=["late", "few"])
def test_sm90_in_any_order(options):
    with simulated(options=options):
        cases.mixed(paged)


@pytest.mark.sim
@requires_core
def test_sm90_writes():
    with simulated():
        cases.writes(paged)


def test_the_draw_covers_what_it_claims():
    drawn = [paged_batches.draw(seed) for seed in range(60)]
    assert {c.dim for c in drawn} == {64, 96, 128, 192, 256}
    assert {c.page for c in drawn} == {16, 32, 64, 128, 256}
    for name, values in (("layout", 2), ("dtype", 2), ("sinks", 2), ("softcap", 2), ("rest", 2)):
        assert len({getattr(c, name) for c in drawn}) == values, name
    assert {c.heads[0] // c.heads[1] for c in drawn} == {1, 3, 4, 5, 16}
    kinds = {(c.window[0] is None, c.window[1] == 0) for c in drawn}
    assert kinds == {(True, True), (False, True), (False, False), (True, False)}
    rows = [s for c in drawn for s in c.sequences]
    assert any(end - start == 1 < end for start, end, _ in rows)
    assert any(start == 0 and 1 < end == length for start, end, length in rows)
    assert any(1 < end - start < end < length for start, end, length in rows)


#: Elements from page to page: 16 pages are 2³¹.
FAR = 2**27


def far_apart(folder: Path, caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Caches in sparse files, whose pages from the 16th on begin beyond 32 bits."""
    out = []
    for number, cache in enumerate(caches):
        size = len(cache) * FAR
        file = str(folder / f"cache {number}")
        storage = torch.from_file(file, shared=True, size=size, dtype=cache.dtype)
        strides = FAR, *cache.stride()[1:]
        out.append(storage.as_strided(cache.shape, strides).copy_(cache))
    return out


def far_pages(module, folder: Path) -> None:
    """A row keeps its bytes, and what is written its place."""
    case = Case(3, ((97, 98, 130), (280, 281, 281)), heads=(2, 1))
    batch = batch_of(case)
    assert batch.block_table.max() > 16
    want = batch.run(paged.paged_attention, case)
    k_cache, v_cache = far_apart(folder, [batch.k_cache, batch.v_cache])
    far = replace(batch, k_cache=k_cache, v_cache=v_cache)
    assert all(map(cases.same_bytes, far.run(module.paged_attention, case), want))
    key, value = (torch.randn(2, 1, 64).bfloat16() for _ in range(2))
    last = len(k_cache) - 1
    module.write_kv_cache(key, value, k_cache, v_cache, torch.tensor([last * 16 + 3, -1]))
    assert cases.same_bytes(k_cache[last, 3], key[0])
    assert cases.same_bytes(v_cache[last, 3], value[0])


@pytest.mark.sim
@requires_core
def test_sm90_pages_that_lie_far_apart(tmp_path):
    with simulated():
        far_pages(paged, tmp_path)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sm90_writes_of_the_op(dtype):
    """Rows are copied with their bits, negative slots are skipped, and no other slot changes."""
    with simulated():
        for slots in paged_cases.SLOTS:
            operands, both, want = paged_cases.written(slots, dtype)
            paged.write_kv_cache(*operands)
            assert cases.same_bytes(both, want), slots


# LLVM may widen products of 32 bits, but not these of 31.
NARROW = {
    "k": ("page * k_strides[0] + (n", "(page * k_strides[0] & 0x7FFFFFFF) + (n"),
    "v": ("page * v_strides[0] + (n", "(page * v_strides[0] & 0x7FFFFFFF) + (n"),
    "written": ("page * v_strides[0] + slot", "(page * v_strides[0] & 0x7FFFFFFF) + slot"),
}


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("name", NARROW)
def test_narrow_offsets_are_killed(tmp_path, name):
    module = copy_of(tmp_path, NARROW[name])
    with (
        simulated(module),
        harness.simulated(paged, PAGED, HOPPER),
        pytest.raises((AssertionError, WildAccess)),
    ):
        far_pages(module, tmp_path)


#: Of those that leave their tensors, or that only an order shows.
MUTANTS = {
    "beyond the table": ("tl.minimum(kv_len, TABLE * PAGE)", "kv_len", cases.outside),
    "beyond the cache": (" & (page < PAGES)", "", cases.outside),
    "rows of the next sequence": (
        "(tl.minimum(end, TOKENS) - begin) * GROUP",
        "(TOKENS - begin) * GROUP",
        cases.mixed,
    ),
    "negative slots": ("(slot < 0) | (page >= PAGES)", "page >= PAGES", cases.writes),
    "slots beyond the cache": ("(slot < 0) | (page >= PAGES)", "slot < 0", cases.writes),
    "slots of the next key": (
        "slot % PAGE * v_strides[1]",
        "(slot + 1) % PAGE * v_strides[1]",
        cases.writes,
    ),
    "some heads": ("tl.range(0, KV_HEADS, BLOCK_H)", "tl.range(0, BLOCK_H, BLOCK_H)", cases.writes),
    "V where K would be": ("head * v_strides[2]", "head * k_strides[2]", cases.writes),
    "one maximum for the tile": (
        "tl.max(s, axis=1) * factor",
        "tl.max(tl.max(s, axis=1), axis=0) * factor",
        cases.mixed,
    ),
}


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    module = copy_of(tmp_path, (old, new))
    with simulated(module, FEW), pytest.raises((AssertionError, WildAccess)):
        check(module)


# ---- the code of every target -------------------------------------------------------------------

#: (target, case): by day; by night all.
CODE = [
    (target, Case(1, ((10, 30, 30),), dim, dtype, page=page, **rule))
    for target in ("sm_90", "gfx942", "gfx950")
    for dim, page in ((64, 16), (96, 32), (128, 256), (192, 64), (256, 128))
    for dtype, rule in ((BF16, {}), (FP16, {"softcap": 2.0, "sinks": True, "layout": HND}))
]
BY_DAY = {("sm_90", 128), ("gfx950", 192)}


def kernel_of(target: str, case: Case, module=paged):
    """The kernel that a case launches."""
    call = lambda: batch_of(case).run(module.paged_attention, case)  # noqa: E731
    with harness.on_the_cpu():
        (kernel,) = harness.compiled(module, harness.TARGETS[target], PAGED, call)
    return kernel


def dense_of(target: str, case: Case):
    """The kernel of the dense forward of the one sequence of a case."""
    call = lambda: paged_batches.wanted(case, launch.forward)  # noqa: E731
    with harness.on_the_cpu():
        (kernel,) = harness.compiled(launch, harness.TARGETS[target], FORWARD, call)
    return kernel


def arithmetic(kernel) -> set[str]:
    """The products and reductions of a kernel, with the layouts that decide their order.

    A set: where loads run ahead, AMD's compiler writes the last step out behind the loop.
    """
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", code, re.M))
    assert layouts
    products = re.findall(r"(?:warp_group_dot|tt\.dot) .*? : (.*?)(?: loc.*)?$", code, re.M)
    sums = re.findall(r'"tt\.reduce".*?\}\) : (.*?)(?: loc.*?)?$', code, re.M | re.DOTALL)
    assert len(products) == len(sums) and len(sums) in (2, 4)
    return {re.sub(r"#\w+", lambda m: layouts.get(m[0], m[0]), t) for t in products + sums}


def complaints(kernel) -> list[str]:
    """As of the dense forward; scalars of AMD may be kept in lanes of vector registers."""
    out = inspect.common_complaints(kernel)
    if re.search(r"\.vgpr_spill_count:\s*0\b", inspect.text(kernel)):
        out = [complaint for complaint in out if complaint != "spills"]
    return out + ["sums that the compiler may fuse"] * kernel.metadata.enable_fp_fusion


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(
            *(target, case),
            marks=() if (target, case.dim) in BY_DAY else pytest.mark.nightly,
            id=f"{target} {case.dim} {case.layout}",
        )
        for target, case in CODE
    ],
)
def test_code(target, case):
    """No atomics, spills or fused sums; the dense forward's instructions, and order in a step."""
    kernel, dense = kernel_of(target, case), dense_of(target, case)
    assert complaints(kernel) == []
    assert inspect.matrix_instructions(kernel) == inspect.matrix_instructions(dense)
    assert arithmetic(kernel) == arithmetic(dense)
    assert kernel.metadata.num_warps == dense.metadata.num_warps


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_code_of_writes(target):
    caches = torch.zeros(3, 16, 2, 128, dtype=BF16)
    tokens, slots = torch.zeros(5, 2, 128, dtype=BF16), torch.arange(5)
    call = lambda: paged.write_kv_cache(tokens, tokens, caches, caches, slots)  # noqa: E731
    with harness.on_the_cpu():
        (kernel,) = harness.compiled(paged, harness.TARGETS[target], PAGED, call)
    assert complaints(kernel) == [] and not inspect.matrix_instructions(kernel)
    wide = "ld.global.v4" if target == "sm_90" else "buffer_load_dwordx2"
    assert re.search(wide, inspect.text(kernel))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("**_compiled(plan, plan.forward)", "**_compiled(plan, plan.dkdv)"),
        (
            "**_compiled(plan, plan.forward)",
            "**_compiled(plan, plan.forward) | {'num_warps': 4}",
        ),
        ("tl.sum(p, axis=1)", "tl.sum(p.trans(1, 0), axis=0)"),
    ],
    ids=["tiles", "warps", "a transposed sum"],
)
def test_another_order_is_noticed(tmp_path, old, new):
    case = Case(1, ((10, 30, 30),))
    kernel = kernel_of("sm_90", case, copy_of(tmp_path, (old, new)))
    assert arithmetic(kernel) != arithmetic(dense_of("sm_90", case))


def test_one_binary_for_every_length():
    """Nothing that a batch decides is specialised on, so that a graph's kernel serves all."""
    hashes = set()
    for sequences in (((9, 10, 10),), ((0, 16, 16), (15, 16, 32)), paged_batches.MIXED):
        for rest in (0, 16):
            case = Case(1, sequences, rest=rest)
            hashes.add(kernel_of("sm_90", case).hash)
    assert len(hashes) == 1


def test_slots_are_enough_for_any_lengths():
    """A batch's grid has a slot for each tile of its sequences and of the tokens of none."""
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        lengths = torch.randint(0, 200, (int(torch.randint(0, 9, (1,), generator=g)),), generator=g)
        rest, group = (int(torch.randint(low, 17, (1,), generator=g)) for low in (0, 1))
        starts = [0, *lengths.cumsum(0).tolist()]
        tokens = starts[-1] + rest
        first = [start * group // 128 + i for i, start in enumerate(starts)]
        ends = [*first[1:], paged.tile_slots(tokens, len(lengths), group, 128)]
        counts = [-(-n * group // 128) for n in (*lengths.tolist(), rest)]
        assert all(b - a >= n for a, b, n in zip(first, ends, counts, strict=True))
