"""The Triton gemm, as it is launched, compiled for sm_90, gfx942 and gfx950 without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from triton.backends.compiler import GPUTarget

from cute_kernels import arch
from cute_kernels.gemm.triton import launch, plan
from tests import triton_inspect as inspect
from tests import triton_runner
from tests.triton_runner import DEVICES

from . import triton_cases as cases
from .triton_cases import BF16, FP16, FP32, TREE
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("gemm.triton")

TARGETS = ("sm_90", "gfx942", "gfx950")
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
MAJORS = tuple(itertools.product(("k", "mn"), repeat=2))
K, MN = MAJORS[0], MAJORS[3]
ROWS = (16, 32, 64, 128)

#: Of the chain, every value of each field, and the products that training runs: forward (k, k), dx
#: (k, mn), dW (mn, mn) with and without main_grad.  Each for one target, each target in turn.
EVERY_COMMIT = (
    (BF16, K, "bias"),
    (BF16, ("k", "mn"), "plain"),
    (BF16, MN, "accumulate"),
    (FP16, MN, "plain"),
    (FP16, ("mn", "k"), "accumulate"),
    (FP32, K, "bias"),
    (FP32, MN, "accumulate"),
)


def chain_variants():
    every = itertools.product(NAMES, MAJORS, cases.EPILOGUES)
    for case, (index, target) in itertools.product(every, enumerate(TARGETS)):
        marks = () if case in EVERY_COMMIT[index::3] else pytest.mark.nightly
        yield pytest.param(target, *case, marks=marks)


def kernel_of(target, dtype, majors=K, epilogue="plain", size=(256, 384, 128), module=launch):
    """The chain's kernel."""
    m, n, k = size
    a, b = map(cases.laid_out, cases.operands(m, n, k, dtype), majors)
    bias = torch.zeros(n, dtype=dtype) if epilogue == "bias" else None
    start = torch.zeros(m, n) if epilogue == "accumulate" else None
    (kernel,) = RUNNER.compiled(target, lambda: module.gemm(a, b, bias, start), module)
    return kernel


@pytest.mark.parametrize(("target", "dtype", "majors", "epilogue"), list(chain_variants()))
def test_chain(target, dtype, majors, epilogue):
    kernel = kernel_of(target, dtype, majors, epilogue)
    assert inspect.complaints(kernel, dtype, epilogue) == []


@pytest.mark.parametrize("epilogue", ["plain", "accumulate"])
@pytest.mark.parametrize("target", TARGETS)
def test_alignment_changes_loads_only(target, epilogue):
    """Sizes and strides that allow no vector load compile to the same matrix instruction.

    Such a kernel keeps an address per element and may spill some: slower, the same bits.
    """
    aligned = kernel_of(target, BF16, ("k", "mn"), epilogue)
    ragged = kernel_of(target, BF16, ("k", "mn"), epilogue, size=(255, 383, 127))
    assert aligned.hash != ragged.hash
    instructions = map(inspect.matrix_instructions, (aligned, ragged))
    assert len({frozenset(of) for of in instructions}) == 1
    assert set(inspect.complaints(ragged, BF16, epilogue)) <= {"spills"}


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        pytest.param(t, d, marks=() if i == j else pytest.mark.nightly)
        for (i, t), (j, d) in itertools.product(enumerate(TARGETS), enumerate(NAMES))
    ],
)
def test_column_sum(target, dtype):
    rows = cases.random(64, 128, dtype=dtype, seed=1)
    (kernel,) = RUNNER.compiled(target, lambda: launch.column_sum(rows))
    assert inspect.common_complaints(kernel) == []
    assert not inspect.matrix_instructions(kernel)


# ---- the tree ------------------------------------------------------------------------------------

#: The rest of the family of sm_80, which has its instruction.
AMPERE = ("sm_86", "sm_89")


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    for name in AMPERE:
        number = int(name.removeprefix("sm_"))
        monkeypatch.setitem(triton_runner.TARGETS, name, GPUTarget("cuda", number, 32))
        monkeypatch.setitem(DEVICES, name, arch.Device("cuda:0", "cuda", name, 84))


def tree_variants():
    # Of every target the smallest tile and the largest, where registers are short.
    for target in ("sm_90", "gfx950"):
        yield pytest.param((16, 128), target, BF16, K, id=f"{target}-some")
    for target, dtype, majors in itertools.product((*TARGETS, "sm_80"), NAMES, MAJORS):
        yield pytest.param(ROWS, target, dtype, majors, marks=pytest.mark.nightly)


def tree_kernels(target, dtype, rows, majors=K, size=(256, 2888), module=launch) -> dict[str, list]:
    """Kernels by stage: those that calls with so many rows launch, split and not."""
    n, k = size
    a, b = map(cases.laid_out, cases.operands(rows, n, k, dtype), majors)
    bias = cases.bias_of("rows", rows, n, dtype)

    def of(*call) -> list:
        return RUNNER.compiled(target, lambda: cases.skinny(module, a, b, bias, *call), module)

    (leaves, root), (unordered, conversion), (alone,) = of(True), of(False), of(True, cases.ONE)
    tree = [alone]
    if rows == ROWS[-1]:
        tree += RUNNER.compiled(target, lambda: module.gemm(a, b, bias[0], None, TREE), module)
    return {"leaves": [leaves], "unordered": [unordered], "tree": tree, "root": [root, conversion]}


def tree_complaints(target, dtype, rows, *of) -> set:
    """Complaints of every stage, with the stage."""
    return {
        (stage, complaint)
        for stage, kernels in tree_kernels(target, dtype, rows, *of).items()
        for kernel in kernels
        for complaint in inspect.tree_complaints(kernel, dtype, stage)
    }


@pytest.mark.parametrize(("heights", "target", "dtype", "majors"), list(tree_variants()))
def test_tree(heights, target, dtype, majors):
    """The instruction that takes K is one, in every stage and tile; nothing spills."""
    # Triton 3.7 keeps registers of the 128 x 128 tree of sm_80 on the stack: slower, the same bits.
    tolerated = {"spills"} if target == "sm_80" else set()
    for rows in heights:
        wrong = tree_complaints(target, dtype, rows, majors)
        assert {complaint for _, complaint in wrong} <= tolerated, (rows, wrong)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("target", "size"),
    [*((name, (256, 2888)) for name in AMPERE), *((t, (255, 1031)) for t in (*TARGETS, "sm_80"))],
)
def test_tree_of_the_family_and_of_odd_sizes(target, size):
    """Sizes that allow no wide load may spill, and have the same instruction."""
    for rows, majors in itertools.product((16, 128), MAJORS[:2]):
        wrong = tree_complaints(target, BF16, rows, majors, size)
        assert {complaint for _, complaint in wrong} <= {"spills"}, (rows, wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_each_stage_has_its_code_only(target):
    """What a stage does not do is not compiled; leaves of 16 bytes are loaded as such."""
    texts = {s: inspect.text(of[0]) for s, of in tree_kernels(target, BF16, 16).items()}
    wide = "cp.async.cg" if target == "sm_90" else "buffer_load_dwordx4"
    for stage in ("leaves", "unordered", "tree"):
        assert wide in texts[stage], stage
    assert len({len(code) for code in texts.values()}) == 4


def test_tokens_first_would_be_another_instruction(monkeypatch):
    """Why the weight is the first operand: with few tokens there, sm_90 falls back to mma.sync."""
    few = replace(plan.TRITON, block_m=16, block_n=64, num_warps=4)
    monkeypatch.setattr(launch, "plan_of", lambda dtype: few)
    kernel = kernel_of("sm_90", BF16, K, "bias", (16, 256, 128))
    names = inspect.matrix_instructions(kernel)
    assert all(name.startswith("mma.sync") for name in names)


def test_table():
    """What bits depend on is one number for all architectures, the chain's."""
    for name in ("gfx942", "gfx950", "sm_90a", "sm_80", "sm_100", "gfx90a"):
        for of in (plan.TRITON, plan.TRITON_FP32):
            skinny_plan = plan.skinny(name, of)
            assert skinny_plan.matrix_instr_nonkdim == of.hip_matrix_instr_nonkdim
            assert all(tokens <= of.block_m for tokens, _ in skinny_plan.tiles)
            if name in ("sm_100", "gfx90a"):
                assert skinny_plan.tiles == ((of.block_m, of.num_warps),)


# ---- sums of leaves ------------------------------------------------------------------------------


def root_kernels(target: str, n: int, module=launch) -> list:
    """The kernels of an exchange: eight leaves of four ranks, and a running sum and two leaves."""
    parts, bias = torch.empty(8, 5, n), torch.empty(n, dtype=BF16)
    out, running = torch.empty(5, n, dtype=BF16), torch.empty(1, 5, n)

    def launches():
        module.add_leaves(out, parts.split((2, 2, 4)), bias)
        module.add_leaves(running[0], (running, parts[:2]), None)

    return RUNNER.compiled(target, launches, module)


@pytest.mark.parametrize("n", [4096, 97])
@pytest.mark.parametrize("target", TARGETS)
def test_add_leaves(target, n):
    """Adds as they are written, nothing fused, flushed or spilled, offsets of 64 bits; whole rows
    are loaded by 16 bytes."""
    wide = "ld.global.v4" if target == "sm_90" else "buffer_load_dwordx4"
    for kernel, adds in zip(root_kernels(target, n), (8, 2), strict=True):
        assert triton_runner.complaints(kernel) == []
        assert kernel.asm["ttir"].count("arith.addf") == adds
        assert "ftz" not in inspect.text(kernel)
        assert (wide in inspect.text(kernel)) == (n == 4096)


# ---- one binary ----------------------------------------------------------------------------------


def forward(m, module=launch):
    b = torch.zeros(32, 48, dtype=BF16)
    return lambda: module.gemm(torch.zeros(m, 48, dtype=BF16), b, None, None)


#: Call of so many rows, the numbers of rows, and how many binaries there are for all of them.
BINARIES = {
    "forward": (forward, (1, 2, 7, 16, 33, 128), 1),
    "dW": (
        lambda tokens: (
            lambda: launch.gemm(
                *(torch.zeros(tokens, n, dtype=BF16).mT for n in (32, 48)),
                None,
                torch.zeros(32, 48),
            )
        ),
        (1, 15, 16, 17, 64),
        1,
    ),
    "few rows": (
        lambda m: (
            lambda: cases.skinny(
                launch, torch.zeros(m, 272, dtype=BF16), torch.zeros(32, 272, dtype=BF16)
            )
        ),
        (1, 2, 7, 16),
        2,
    ),
    "tree": (
        lambda m: (
            lambda: launch.gemm(
                torch.zeros(m, 272, dtype=BF16), torch.zeros(32, 272, dtype=BF16), None, None, TREE
            )
        ),
        (1, 2, 16, 150),
        1,
    ),
    "leaves": (
        lambda m: lambda: launch.add_leaves(torch.empty(m, 70), [torch.empty(8, m, 70)], None),
        (1, 2, 16, 37),
        1,
    ),
    "leaves and a bias": (
        lambda m: (
            lambda: launch.add_leaves(torch.empty(m, 70), [torch.empty(8, m, 70)], torch.empty(70))
        ),
        (1, 2, 16, 37),
        1,
    ),
}


@pytest.mark.parametrize("name", BINARIES)
def test_one_binary_for_every_number_of_rows(name):
    """Neither M of a product nor the tokens of a dW are specialised on, nor what follows from M."""
    call, sizes, count = BINARIES[name]
    found = {kernel.hash for m in sizes for kernel in RUNNER.compiled("sm_90", call(m))}
    assert len(found) == count


def test_specialising_on_m_is_noticed():
    mutant = RUNNER.mutant(('["M", "N", "K"]', '["N", "K"]'))
    hashes = {RUNNER.compiled("sm_90", forward(m, mutant), mutant)[0].hash for m in (1, 7, 16)}
    assert len(hashes) == 3


# ---- mutants -------------------------------------------------------------------------------------

STORE = "tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)"
ATOMIC = "tl.atomic_add(out_ptrs, acc, mask=in_m & in_n)"
STORE_LEAF = "tl.store(out_ptrs + tl.cast(leaf, tl.int64) * M * N, acc, mask=in_n & in_m)"


def of_chain(target, dtype, epilogue, size=(32, 32, 64)):
    def found(module):
        kernel = kernel_of(target, dtype, K, epilogue, size, module)
        return inspect.complaints(kernel, dtype, epilogue)

    return found


def of_leaves(module):
    a, b = cases.operands(16, 256, 1024, BF16)
    kernel, _ = RUNNER.compiled("sm_90", lambda: cases.skinny(module, a, b), module)
    return inspect.tree_complaints(kernel, BF16, "leaves")


def of_root(module):
    return triton_runner.complaints(root_kernels("sm_90", 97, module)[0])


#: (complaints of a launcher, the one that it must give rise to, edit)
MUTANTS = [
    *((of_chain(t, BF16, "accumulate"), "atomics", STORE, ATOMIC) for t in TARGETS),
    (
        of_chain("sm_90", FP32, "plain"),
        "tf32",
        '"INPUT_PRECISION": plan.input_precision',
        '"INPUT_PRECISION": "tf32"',
    ),
    # On gfx950 a dot of 64 takes 32 k in one instruction: a cut at 16 would show.
    (
        of_chain("gfx950", FP16, "accumulate"),
        "matrix instruction",
        "plan.accumulate_k if accumulate else plan.block_k",
        "plan.block_k",
    ),
    (
        of_chain("gfx942", BF16, "plain"),
        "matrix instruction",
        'out["matrix_instr_nonkdim"] = plan.hip_matrix_instr_nonkdim',
        "pass",
    ),
    (
        of_leaves,
        "offsets of 32 bits",
        STORE_LEAF,
        STORE_LEAF.replace("tl.cast(leaf, tl.int64)", "leaf"),
    ),
    (of_leaves, "atomics", STORE_LEAF, STORE_LEAF.replace("tl.store", "tl.atomic_add")),
    (
        of_leaves,
        "matrix instruction",
        "acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)",
        "acc = tl.trans(tl.dot(tl.trans(b), tl.trans(a), tl.trans(acc)))",
    ),
    (of_root, "sums that the compiler may fuse", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    (
        of_root,
        "offsets of 32 bits",
        "    size = tl.cast(sums_l, tl.int64)",
        "    size = tl.cast(sums_l, tl.int32)",
    ),
    (
        of_root,
        "offsets of 32 bits",
        "offsets = row * N + columns",
        "offsets = (row * N + columns).to(tl.int32)",
    ),
]


@pytest.mark.parametrize(("found", "complaint", "old", "new"), MUTANTS)
def test_code_is_noticed(found, complaint, old, new):
    assert complaint in found(RUNNER.mutant((old, new)))
