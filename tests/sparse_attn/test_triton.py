"""The sm_90 code of the Triton attention, dense and paged, in ptxsim; the code of every target.

Its source in Triton's interpreter: test_triton_interpreted.py.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.triton import launch, paged
from ptxsim.skips import requires_core
from tests import contract
from tests.contract import ContractViolation, same_bytes
from tests.triton_harness import TARGETS, WildAccess

from .. import triton_inspect as inspect
from . import against_float64, battery, cases, pack_cases, paged_cases, wild
from .paged_cases import Engine, drawn
from .triton_engine import DENSE, PAGED, engine, simulated, through

pytestmark = pytest.mark.simulates("sparse_attn.triton")

SIM = [pytest.mark.sim, requires_core]
NIGHT = pytest.mark.nightly
HOPPER = {"wgmma_math": 2}
LATE = HOPPER | {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "cta_order": 1, "seed": 9}
FEW = HOPPER | {"resident_ctas": 1, "cta_order": 2}
BF16, FP16 = torch.bfloat16, torch.float16
WIDE = (192, 256)
#: (Kernel, CUDA architecture) -> bytes a thread on the stack that it may have.  On sm_90 Triton
#: 3.7.1 keeps one register there at D = 96 under bits by head with a softcap, and one, outside of
#: any loop, of the 96 that ptxas aims at in fp16 at D = 256; 3.6.0 kept none.  On sm_80 mma.sync
#: has its operands in registers too: dK and dV of 128 keys of 128 columns take half of all 255.
STACK = {("dkdv_kernel", 90): 8, ("delta_kernel", 90): 8, ("dkdv_kernel", 80): 88}
#: Family of the matrix instructions of an architecture; MFMA of all others.
FAMILIES = {80: "mma.sync", 90: "wgmma"}
#: The kernels with matrix products.
PRODUCTS = ("forward_kernel", "dkdv_kernel", "dq_kernel", "paged_forward_kernel")


def often(day, night) -> list:
    """Parameters of a test, the second ones by night."""
    return [*day, *(pytest.param(value, marks=NIGHT) for value in night if value not in day)]


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is.

    On AMD scalar registers may be kept in lanes of vector registers: that is no memory access.
    """
    arch_number = kernel.metadata.target.arch
    out = inspect.common_complaints(kernel, stack=STACK.get((kernel.name, arch_number), 0))
    matrix, family = inspect.matrix_instructions(kernel), FAMILIES.get(arch_number, "v_mfma")
    if family == "v_mfma" and re.search(r"\.vgpr_spill_count:\s*0\b", inspect.text(kernel)):
        out = [complaint for complaint in out if complaint != "spills"]
    right = all(name.startswith(family) for name in matrix)
    if bool(matrix) != (kernel.name in PRODUCTS) or not right:
        out.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        out.append("sums that the compiler may fuse")
    return out


def sim(function):
    """A test that runs compiled kernels in the simulator."""
    return functools.reduce(lambda f, mark: mark(f), SIM, function)


# ---- dense: values and rows ----------------------------------------------------------------------


# A group with a mask per head; another at 192, with v of 128.  By night also 128 and 256.
@sim
@pytest.mark.parametrize("seed", often((58, 59), range(64)))
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
    op, x = battery.sequence_op("causal documents"), battery.sequence()
    one = tuple(t[:1] for t in x)
    with through(launch), simulated(launch, **HOPPER):
        count = battery.check_chunks(op, one, [[1], [128], [3, 131, 140, 299]])
        count += battery.check_padding(op, one, [84])
        count += battery.check_batch(op, x, shuffles=1) + battery.check_heads(op, x)
        count += battery.check_neighbours(op, one, [128])
        return count + battery.check_layout(op, one)


@sim
def test_sequences():
    assert small_battery() > 28


@sim
def test_a_row_that_follows_its_neighbours_is_killed():
    edit = ("tl.max(s, axis=1) * factor", "tl.max(tl.max(s, axis=1), axis=0) * factor")
    with pytest.raises(ContractViolation):
        small_battery(DENSE.mutant(edit))


@sim
@NIGHT
@pytest.mark.parametrize("mask", [*battery.MASKS, "rows"])
@pytest.mark.parametrize(("dim", "dtype"), [(64, BF16), (96, FP16), (192, BF16), (256, FP16)])
def test_every_transform(mask, dim, dtype):
    """Of sequences; queries without positions are rows: the battery of every row op."""
    with through(), simulated(**HOPPER):
        if mask == "rows":
            assert contract.check_rows(battery.rows_op(dim, dtype), 150, 5) > 60
        else:
            op = battery.sequence_op(mask, softcap=4.0)
            assert battery.battery(op, battery.sequence(dim=dim, dtype=dtype)) > 50


@sim
@NIGHT
@pytest.mark.parametrize("dim", [64, *WIDE])
@pytest.mark.parametrize("rule", pack_cases.RULES, ids=str)
def test_packs(rule, dim):
    lengths = [130, 0, 1, 61, 128]
    tensors = pack_cases.drawn(sum(lengths), heads=(4, 2), dim=dim)
    with pack_cases.launched(launch.forward, launch.backward), simulated(**HOPPER):
        out = pack_cases.packed(tensors, lengths, *rule)
        assert pack_cases.differing(out, pack_cases.alone(tensors, lengths, *rule)) == []


@sim
def test_the_form_of_a_mask_does_not_show():
    """A band, the same band as bits, by batch and by head: three programs, one set of bits."""
    with through(), simulated(**HOPPER) as kernels:
        battery.same_elements_have_the_same_bits()
    assert len({kernel.hash for kernel in kernels}) >= 2


# ---- dense: gradients ----------------------------------------------------------------------------

SIZE, HEADS, KV_HEADS = 300, 2, 1


@functools.cache
def problem(dim: int = 64) -> cases.Inputs:
    return cases.inputs(2, HEADS, KV_HEADS, SIZE, SIZE, dim, seed=9)


def gradients(schedule, x: cases.Inputs):
    """dq, dk, dv through the op."""
    mask = BlockMask.causal(SIZE, SIZE)
    out, lse = block_sparse_attention(*x.leaves(), mask, schedule=schedule, return_lse=True)
    return torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))


def permuted(**options) -> Schedule:
    options = {"order": [2, 0, 1]} | options
    return kinds.permutation(BlockMask.causal(SIZE, SIZE), heads=2 * KV_HEADS, **options)


def equal(one, two) -> list[bool]:
    return [same_bytes(a, b) for a, b in zip(one, two, strict=True)]


@sim
@pytest.mark.parametrize("dim", often((64,), WIDE))
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


@sim
@pytest.mark.parametrize("dim", often((64,), WIDE))
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
        for layout in ("BHSD", "offset by 1"):
            plain = (vars(x)[name].detach() for name in ("q", "k", "v", "dout"))
            q, k, v, dout = map(battery.LAYOUTS[layout], plain)
            leaves = (t.requires_grad_() for t in (q, k, v))
            assert all(equal(gradients("spt", cases.Inputs(*leaves, dout, x.dlse)), want)), layout


def part(t: torch.Tensor, place: int) -> torch.Tensor:
    return t.detach()[place : place + 1].requires_grad_(t.requires_grad)


def beside_nan(t: torch.Tensor, place: int) -> torch.Tensor:
    new = torch.full_like(t.detach(), torch.nan)
    new[place] = t.detach()[place]
    return new.requires_grad_(t.requires_grad)


@sim
def test_nan_in_masked_rows_reaches_the_blocks_that_are_visited():
    x = cases.inputs(1, 1, 1, wild.SIZE, wild.SIZE, 64)

    def gradients(q, k, v, dout):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with through(), simulated(**HOPPER):
            return torch.autograd.grad(block_sparse_attention(*leaves, wild.mask()), leaves, dout)

    wild.check(gradients, (*x.leaves(), x.dout), wild.REACHES)


def test_an_operand_is_copied_only_if_rows_cannot_be_loaded():
    plain = problem().q.detach()
    fused = torch.zeros(2, SIZE, 3, HEADS, 64, dtype=BF16)[:, :, 1]
    for t in (plain, fused, plain[:1].expand(2, -1, -1, -1), plain[:, ::2]):
        assert launch._loadable(t, False) is t
    shifted, by_column = (battery.LAYOUTS[name](plain) for name in ("offset by 1", "D first"))
    for t in (shifted, by_column, plain[..., 1:33]):
        assert launch._loadable(t, False).is_contiguous()


@sim
def test_sinks_that_are_not_contiguous():
    x = [t.detach() for t in cases.inputs(1, 2, 1, 40, 40, 64).leaves()]
    sinks = torch.tensor([[1.0, 9.0], [2.0, 8.0]])[:, 0]
    with through(), simulated(**HOPPER):
        want, out = (block_sparse_attention(*x, sinks=s) for s in (sinks.clone(), sinks))
    assert same_bytes(out, want)


# ---- paged caches --------------------------------------------------------------------------------


def outside(engine: Engine) -> None:
    """Pages that the cache has not, and keys that the table has not: zeros, and no key."""
    batch, zero = (drawn([(32, 40), (1, 31)], (4, 2, 64), 16, seed=9) for _ in range(2))
    for t in (zero.k_cache, zero.v_cache):
        t[zero.block_table[0, 1].long()] = 0.0
    batch.block_table[0, 1], batch.seqlens_k[0], zero.seqlens_k[0] = len(batch.k_cache), 2000, 32
    batch, zero = (b.changed(block_table=b.block_table[:, :2].clone()) for b in (batch, zero))
    assert all(map(same_bytes, engine.attend(batch), engine.attend(zero)))


@sim
@pytest.mark.parametrize("check", [*paged_cases.CHECKS, outside], ids=lambda c: c.__name__)
def test_paged_bytes(check):
    with simulated(**HOPPER):
        check(engine())


@sim
@pytest.mark.parametrize("seed", often(range(2), range(500)))
def test_drawn_paged_batches(seed):
    """Mixed batches of every head size, page size, layout and rule."""
    with simulated(**HOPPER):
        engine().check(drawn(**paged_cases.draw(seed)))


@sim
@pytest.mark.parametrize("options", [LATE, FEW], ids=["late", "few"])
def test_paged_rows_in_any_order(options):
    with simulated(**options):
        paged_cases.mixed(engine())


#: Elements from page to page: 16 pages are 2³¹.
FAR = 2**27


def far_apart(folder: Path, *caches: torch.Tensor) -> list[torch.Tensor]:
    """Caches in sparse files, whose pages from the 16th on begin beyond 32 bits."""
    out = []
    for number, cache in enumerate(caches):
        file, size = str(folder / f"cache {number}"), len(cache) * FAR
        storage = torch.from_file(file, shared=True, size=size, dtype=cache.dtype)
        out.append(storage.as_strided(cache.shape, (FAR, *cache.stride()[1:])).copy_(cache))
    return out


def far_pages(mutant: Engine, folder: Path) -> None:
    """A row keeps its bytes, and what is written its place."""
    batch = drawn([(1, 98), (1, 281)], (2, 1, 64), 16, seed=3)
    assert batch.block_table.max() > 16
    k_cache, v_cache = far_apart(folder, batch.k_cache, batch.v_cache)
    far = batch.changed(k_cache=k_cache, v_cache=v_cache)
    assert all(map(same_bytes, mutant.attend(far), engine().attend(batch)))
    key, value = (torch.randn(2, 1, 64).bfloat16() for _ in range(2))
    last = len(k_cache) - 1
    mutant.write_kv_cache(key, value, k_cache, v_cache, torch.tensor([last * 16 + 3, -1]))
    assert same_bytes(k_cache[last, 3], key[0]) and same_bytes(v_cache[last, 3], value[0])


@sim
def test_pages_that_lie_far_apart(tmp_path):
    with simulated(**HOPPER):
        far_pages(engine(), tmp_path)


PAGE_K, PAGE_V = "page * k_strides[0]", "page * v_strides[0]"
SLOT, TOP = "slot % PAGE * v_strides[1]", "tl.max(s, axis=1)"
#: What leaves its tensors, or only an order shows.  LLVM may widen products of 32 bits, not of 31.
KILLED = [
    (far_pages, f"{PAGE_K} + (n", f"({PAGE_K} & 0x7FFFFFFF) + (n"),
    (far_pages, f"{PAGE_V} + (n", f"({PAGE_V} & 0x7FFFFFFF) + (n"),
    (far_pages, f"{PAGE_V} + slot", f"({PAGE_V} & 0x7FFFFFFF) + slot"),
    (outside, "tl.minimum(kv_len, TABLE * PAGE)", "kv_len"),
    (outside, " & (page < PAGES)", ""),
    (paged_cases.mixed, "(tl.minimum(end, TOKENS) - begin) * GROUP", "(TOKENS - begin) * GROUP"),
    (paged_cases.mixed, f"{TOP} * factor", f"tl.max({TOP}, axis=0) * factor"),
    (paged_cases.writes, "(slot < 0) | (page >= PAGES)", "page >= PAGES"),
    (paged_cases.writes, "(slot < 0) | (page >= PAGES)", "slot < 0"),
    (paged_cases.writes, SLOT, SLOT.replace("slot", "(slot + 1)")),
    (paged_cases.writes, "tl.range(0, KV_HEADS, BLOCK_H)", "tl.range(0, BLOCK_H, BLOCK_H)"),
    (paged_cases.writes, "head * v_strides[2]", "head * k_strides[2]"),
]


@sim
@pytest.mark.parametrize("mutant", often(KILLED[::3], KILLED))
def test_killed(tmp_path, mutant):
    check, *edit = mutant
    module = PAGED.mutant(tuple(edit))
    folder = (tmp_path,) if check is far_pages else ()
    running = simulated(**FEW), PAGED.simulated(module, **FEW)
    with running[0], running[1], pytest.raises((AssertionError, WildAccess)):
        check(engine(module), *folder)


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


# ---- the code of every target --------------------------------------------------------------------

LENGTH = 256
ALLOWED = torch.rand(1, 2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
MASKS = {
    "none": BlockMask.full(LENGTH, LENGTH),
    "band": BlockMask.causal(LENGTH, LENGTH),
    "bits": BlockMask.from_dense(ALLOWED[:, :1]),
    "bits by head": BlockMask.from_dense(ALLOWED),
}
#: The sm_90 code that runs above is looked at there.
CODE = (("gfx942", 128, BF16, "bits", 2.0), ("gfx950", 192, FP16, "bits by head", 0.0))
GPUS = ("sm_90", "gfx942", "gfx950")
ALL_CODE = itertools.product(TARGETS, config.HEAD_DIMS, (BF16, FP16), MASKS, (0.0, 2.0))


def kernels_of(target, dim, dtype, mask, softcap, module=launch) -> list:
    """The five kernels of a forward and a backward of two query heads on one KV head."""
    x, options = cases.inputs(1, 2, 1, LENGTH, LENGTH, dim, dtype), {"softcap": softcap}

    def call():
        with through(module):
            out = block_sparse_attention(*x.leaves(), MASKS[mask], return_lse=True, **options)
            torch.autograd.grad(out, x.leaves(), (x.dout, x.dlse))

    return DENSE.compiled(target, call, module)


@pytest.mark.parametrize("case", often(CODE, ALL_CODE), ids=str)
def test_code(case):
    """No atomics, no vector spills, shared memory for the smallest GPU, the matrix instruction."""
    kernels = kernels_of(*case)
    assert [kernel.name for kernel in kernels] == list(DENSE.written)
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name


PLAIN = {"lengths": [(20, 30)], "heads": (4, 2, 64), "page": 16}
OTHER = {"dtype": "fp16", "softcap": 2.0, "with_sinks": True, "layout": "HND"}
PAGED_CODE = [
    (target, PLAIN | {"heads": (4, 2, dim), "page": page} | rule)
    for rule in ({}, OTHER)
    for target in GPUS
    for dim, page in ((64, 16), (96, 32), (128, 256), (192, 64), (256, 128))
]


def paged_kernel(target: str, arguments: dict, module=paged):
    """The kernel that a batch launches."""
    batch = drawn(**arguments)
    (kernel,) = PAGED.compiled(target, lambda: engine(module).attend(batch), module)
    return kernel


def dense_kernel(target: str, arguments: dict):
    """The kernel of the dense forward of its one sequence."""
    call = lambda: paged_cases.dense(drawn(**arguments), 0, launch.forward)  # noqa: E731
    (kernel,) = DENSE.compiled(target, call)
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


@pytest.mark.parametrize(
    ("target", "arguments"),
    [pytest.param(*c, marks=() if i in (2, 28) else NIGHT) for i, c in enumerate(PAGED_CODE)],
)
def test_paged_code(target, arguments):
    """No atomics, spills or fused sums; the dense forward's instructions, and order in a step."""
    kernel, dense = paged_kernel(target, arguments), dense_kernel(target, arguments)
    assert complaints(kernel) == []
    assert inspect.matrix_instructions(kernel) == inspect.matrix_instructions(dense)
    assert arithmetic(kernel) == arithmetic(dense)
    assert kernel.metadata.num_warps == dense.metadata.num_warps


@pytest.mark.parametrize("target", GPUS)
def test_code_of_writes(target):
    caches = torch.zeros(3, 16, 2, 128, dtype=BF16)
    tokens, slots = torch.zeros(5, 2, 128, dtype=BF16), torch.arange(5)
    call = lambda: paged.write_kv_cache(tokens, tokens, caches, caches, slots)  # noqa: E731
    (kernel,) = PAGED.compiled(target, call)
    assert complaints(kernel) == []
    wide = "ld.global.v4" if target == "sm_90" else "buffer_load_dwordx2"
    assert re.search(wide, inspect.text(kernel))


FORWARD = "**_compiled(plan, plan.forward)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FORWARD, "**_compiled(plan, plan.dkdv)"),
        (FORWARD, f"{FORWARD} | {{'num_warps': 4}}"),
        ("tl.sum(p, axis=1)", "tl.sum(p.trans(1, 0), axis=0)"),
    ],
    ids=["tiles", "warps", "a transposed sum"],
)
def test_another_order_is_noticed(old, new):
    kernel = paged_kernel("sm_90", PLAIN, PAGED.mutant((old, new)))
    assert arithmetic(kernel) != arithmetic(dense_kernel("sm_90", PLAIN))


def test_one_binary_for_every_length():
    """Nothing that a batch decides is specialised on, so that a graph's kernel serves all."""
    batches = itertools.product(([(1, 10)], [(16, 16), (1, 16)], paged_cases.MIXED), (0, 16))
    kernels = (
        paged_kernel("sm_90", PLAIN | {"lengths": lengths, "padding": rest})
        for lengths, rest in batches
    )
    assert len({kernel.hash for kernel in kernels}) == 1
