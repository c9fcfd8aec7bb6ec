"""The kernels of the Triton order ``tree``, compiled for sm_90, gfx942 and gfx950 without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from triton.backends.compiler import GPUTarget

from cute_kernels.gemm.triton import launch, plan

from . import triton_cases as cases
from . import triton_harness
from . import triton_tree_cases as tree_cases
from .triton_harness import compiled
from .triton_inspect import matrix_instructions, text, tree_complaints

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
AMPERE = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89)}
ARCHS = {"sm_90": "sm_90a", "gfx942": "gfx942", "gfx950": "gfx950", "sm_80": "sm_80"}
ROWS, MAJORS = (16, 32, 64, 128), (("k", "k"), ("k", "mn"), ("mn", "k"), ("mn", "mn"))
#: Of every target the smallest tile and the largest, where registers are short.
EVERY_COMMIT = ((16, 128), ("sm_90", "gfx950"), BF16, ("k", "k"))


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    targets = triton_harness.TARGETS | AMPERE
    monkeypatch.setattr(triton_harness, "TARGETS", targets)


def variants():
    heights, targets, *rest = EVERY_COMMIT
    for target in targets:
        yield pytest.param(heights, target, *rest, id=f"{target}-some")
    for target, dtype, majors in itertools.product(ARCHS, NAMES, MAJORS):
        name = f"{target}-{NAMES[dtype]}-{'_'.join(majors)}"
        yield pytest.param(ROWS, target, dtype, majors, marks=pytest.mark.nightly, id=name)


def kernels(target, dtype, rows, majors=("k", "k"), size=(256, 2888)) -> dict[str, list]:
    """Kernels by stage: those that calls with so many rows launch, split and not."""
    n, k = size
    a, b = tree_cases.operands(rows, n, k, dtype)
    a, b = cases.laid_out(a, majors[0]), cases.laid_out(b, majors[1])
    bias = tree_cases.bias_of("rows", rows, n, dtype)
    kernel_config = plan.skinny(ARCHS.get(target, target), launch.plan_of(dtype))

    def skinny(deterministic, units):
        return compiled(
            launch,
            target,
            lambda: launch._launch_skinny(a, b, bias, deterministic, kernel_config, units),
        )

    leaves, root = skinny(True, 132)
    unordered, conversion = skinny(False, 132)
    (alone,) = skinny(True, 1)
    (tree,) = compiled(launch, target, lambda: launch._launch_tree(a, b, bias[0], 132))
    return {
        "leaves": [leaves],
        "unordered": [unordered],
        "tree": [alone, tree] if rows == ROWS[-1] else [alone],
        "root": [root, conversion],
    }


@pytest.mark.parametrize(("heights", "target", "dtype", "majors"), list(variants()))
def test_code(heights, target, dtype, majors):
    """The instruction that takes K is one, in every stage and tile; nothing spills."""
    # Triton 3.7 keeps registers of the 128 x 128 tree of sm_80 on the stack: slower, the same bits.
    tolerated = {"spills"} if target == "sm_80" else set()
    for rows in heights:
        for stage, stage_kernels in kernels(target, dtype, rows, majors).items():
            for kernel in stage_kernels:
                wrong = set(tree_complaints(kernel, dtype, stage)) - tolerated
                assert not wrong, (rows, stage, wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_86", "sm_89"])
def test_the_rest_of_the_family(target):
    """They have the instruction of sm_80."""
    for rows in (16, 128):
        for stage, stage_kernels in kernels(target, BF16, rows).items():
            assert set(tree_complaints(stage_kernels[0], BF16, stage)) <= {"spills"}, (rows, stage)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ARCHS)
def test_alignment_changes_loads_only(target):
    """As of the chain: sizes that allow no wide load may spill, and have the same instruction."""
    for rows, majors in itertools.product((16, 128), MAJORS[:2]):
        for stage, stage_kernels in kernels(target, BF16, rows, majors, size=(255, 1031)).items():
            assert set(tree_complaints(stage_kernels[0], BF16, stage)) <= {"spills"}


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_each_stage_has_its_code_only(target):
    """What a stage does not do is not compiled; leaves of 16 bytes are loaded as such."""
    texts = {stage: text(of[0]) for stage, of in kernels(target, BF16, 16).items()}
    wide = "cp.async.cg" if target == "sm_90" else "buffer_load_dwordx4"
    for stage in ("leaves", "unordered", "tree"):
        assert wide in texts[stage], stage
    assert len({len(code) for code in texts.values()}) == 4


def test_tokens_first_would_be_another_instruction(monkeypatch):
    """Why the weight is the first operand: with few tokens there, sm_90 falls back to mma.sync."""
    few = replace(plan.TRITON, block_m=16, block_n=64, num_warps=4)
    monkeypatch.setattr(launch, "plan_of", lambda dtype: few)
    a, b, bias, _ = cases.problem(16, 256, 128, BF16, "bias")
    (kernel,) = compiled(launch, "sm_90", lambda: launch._launch(a, b, bias, None, 132))
    assert all(name.startswith("mma.sync") for name in matrix_instructions(kernel))


def test_table():
    """What bits depend on is one number for all architectures, the chain's."""
    for arch in ("gfx942", "gfx950", "sm_90a", "sm_80", "sm_100", "gfx90a"):
        for of in (plan.TRITON, plan.TRITON_FP32):
            skinny_plan = plan.skinny(arch, of)
            assert skinny_plan.matrix_instr_nonkdim == of.hip_matrix_instr_nonkdim
            assert all(tokens <= of.block_m for tokens, _ in skinny_plan.tiles)
            if arch in ("sm_100", "gfx90a"):
                assert skinny_plan.tiles == ((of.block_m, of.num_warps),)
    assert "ot run on a GPU" in plan.SkinnyPlan.__doc__
