"""R8 on small texts: registers of WGMMA from the issue to the wait, in PTX and in SASS."""

from __future__ import annotations

import pytest

from tests.verify.listings import module
from verify import sass, sass_registers
from verify.in_flight import in_flight

SHAPE = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
SUM = "{%f1, %f2, %f3, %f4}"
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT, WAIT_1 = (f"wgmma.wait_group.sync.aligned {n};" for n in (0, 1))


def product(first: int, accumulators: str = SUM, shape: str = SHAPE) -> str:
    """A WGMMA with registers first to first + 3 as operand A."""
    a = ", ".join(f"%r{first + n}" for n in range(4))
    return f"{shape} {accumulators}, {{{a}}}, %rd1, 1, 1, 1, 0;"


def load(first: int, guard: str = "") -> str:
    registers = ", ".join(f"%r{first + n}" for n in range(4))
    return f"{guard}ld.shared.v4.b32 {{{registers}}}, [%r31];"


FROM_SHARED = f"{SHAPE} {SUM}, %rd2, %rd1, 1, 1, 1, 0, 0;"
BATCH = (load(1), FENCE, product(1), COMMIT)
LOOP, BACK = "HEAD:", "@%p1 bra HEAD;"
#: A branch that only some come to, around something.
ASIDE = "@%p1 bra ASIDE;", "ASIDE:"


def written(*lines: str) -> list[str]:
    """The findings of PTX."""
    out = list(in_flight(module(*lines), []))
    assert all(f.rule == "R8" and f.where.startswith("k: PTX line") for f in out)
    return [f.text for f in out]


@pytest.mark.parametrize(
    "lines",
    [
        (*BATCH, WAIT, load(1), "st.shared.f32 [%r31], %f1;"),
        # two groups, the older one retired
        (*BATCH, load(5), FENCE, product(5), COMMIT, WAIT_1, load(1)),
        # a chain of batches that nobody touches needs neither waits nor fences
        (FENCE, FROM_SHARED, COMMIT, LOOP, FROM_SHARED, COMMIT, BACK, WAIT),
        # A is read, not written
        (*BATCH, "add.s32 %r20, %r1, %r2;", WAIT),
        (LOOP, WAIT, *BATCH, BACK, WAIT),
        # one fragment is loaded while the other is multiplied
        (load(1), LOOP, FENCE, product(1), COMMIT, load(5), WAIT)
        + (FENCE, product(5), COMMIT, WAIT, load(1), BACK),
        # each branch waits
        (*BATCH, "@%p1 bra ELSE;", WAIT, "bra.uni END;", "ELSE:", WAIT, "END:", load(1)),
        # the other accumulators are nobody's
        (*BATCH, "mov.f32 %f5, 0f00000000;", WAIT),
        # LLVM writes accumulators behind the fence: SASS is asked
        (load(1), FENCE, "mul.f32 %f1, %f1, %f6;", product(1), COMMIT, WAIT),
        # a group without a WGMMA counts
        (*BATCH, COMMIT, WAIT_1, load(1)),
    ],
    ids=range(10),
)
def test_ptx_that_holds(lines):
    assert written(*lines) == []


A, SUMS = "operand A of the WGMMA at PTX line", "accumulators of the WGMMA at PTX line"
RELOADED = f"writes %r1, %r2, %r3, %r4, {A}"
UNFENCED = "no fence since %r1, %r2, %r3, %r4 was written"
OTHER_SUMS = "{%f4, %f5, %f6, %f7}"
N16, K32 = SHAPE.replace("n8", "n16"), SHAPE.replace("k16", "k32")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((*BATCH, load(1), WAIT), f"{RELOADED} 13"),
        ((*BATCH, "mov.b32 %r3, %r20;", WAIT), f"writes %r3, {A}"),
        ((*BATCH, WAIT_1, load(1)), RELOADED),
        # the younger of two groups
        ((*BATCH, FENCE, product(5), COMMIT, WAIT_1, "mov.b32 %r5, 0;"), f"writes %r5, {A}"),
        # no group holds it
        ((load(1), FENCE, product(1), WAIT, load(1)), RELOADED),
        # what the mHC kernel did
        ((LOOP, load(1), WAIT, FENCE, product(1), COMMIT, BACK, WAIT), RELOADED),
        # a wait, or a commit, that may be skipped
        ((*BATCH, f"@%p1 {WAIT}", load(1)), RELOADED),
        ((*BATCH, ASIDE[0], WAIT, ASIDE[1], load(1)), RELOADED),
        ((*BATCH, f"@%p1 {COMMIT}", WAIT_1, load(1)), RELOADED),
        # a write that may be skipped
        ((*BATCH, load(1, "@%p1 "), WAIT), RELOADED),
        ((*BATCH, "mov.f32 %f7, %f2;", WAIT), f"reads %f2, {SUMS}"),
        ((*BATCH, "mov.f32 %f2, %f7;", WAIT), f"writes %f2, {SUMS}"),
        ((*BATCH, "mul.f32 %f2, %f2, %f7;", WAIT), f"writes %f2, {SUMS}"),
        # other accumulators than those in flight, and another shape
        ((*BATCH, FENCE, product(5, OTHER_SUMS), COMMIT, WAIT), f"writes %f4, {SUMS}"),
        ((*BATCH, FENCE, product(1, SUM, N16), COMMIT), f"writes %f1, %f2, %f3, %f4, {SUMS}"),
        # sums in flight as operand A, and operand A as sums
        ((*BATCH, FENCE, product(5).replace("%r5", "%f1"), COMMIT, WAIT), f"reads %f1, {SUMS}"),
        ((*BATCH, FENCE, product(5, "{%r1, %f6, %f7, %f8}"), COMMIT, WAIT), f"writes %r1, {A}"),
        # fences
        ((load(1), product(1), COMMIT, WAIT), "no fence before it"),
        ((ASIDE[0], FENCE, ASIDE[1], product(1), COMMIT, WAIT), "no fence before it"),
        ((f"@%p1 {FENCE}", product(1), COMMIT, WAIT), "no fence before it"),
        ((*BATCH, WAIT, load(1), product(1), COMMIT, WAIT), UNFENCED),
        ((FENCE, LOOP, load(1), product(1), COMMIT, WAIT, BACK), UNFENCED),
        ((*BATCH, WAIT, "mov.f32 %f1, %f6;", product(1), COMMIT), "no fence since %f1 was"),
        ((*BATCH, WAIT, product(1, SUM, K32), COMMIT, WAIT), "no fence since %f1, %f2, %f3, %f4"),
    ],
    ids=range(24),
)  # fmt: skip
def test_ptx_that_does_not(lines, why):
    out = written(*lines)
    assert any(why in text for text in out), out


ARRIVE, DEPBAR, DEPBAR_1 = (
    "WARPGROUP.ARRIVE",
    *(f"WARPGROUP.DEPBAR.LE gsb0, {n:#x}" for n in (0, 1)),
)


def machine_product(a: int, end: str = ", gsb0", sums: int = 24) -> str:
    return f"HGMMA.64x8x16.F32.BF16 R{sums}, R{a}, gdesc[UR16], R{sums}{end}"


@pytest.mark.parametrize(
    ("text", "sums", "a"),
    [
        ("HGMMA.64x8x16.F32 R24, R36, gdesc[UR16].tnspB, R24, gsb0", range(24, 28), range(36, 40)),
        ("HGMMA.64x16x16.F32 R24, gdesc[UR16], RZ, !UPT", range(24, 32), ()),
        ("HGMMA.64x16x16.F16 R24, R36.reuse, gdesc[UR16], R24", range(24, 28), range(36, 40)),
        ("IGMMA.64x8x32.S8.S8 R24, gdesc[UR16], R24, gsb0", range(24, 28), ()),
    ],
)  # fmt: skip
def test_registers_of_a_product(text, sums, a):
    (function,) = sass.parse(f".text.k:\n        /*0000*/    {text} ;\n")
    found = sass_registers.product(function.instructions[0])
    assert found == (tuple(f"R{n}" for n in sums), tuple(f"R{n}" for n in a))


def compiled(*lines: str) -> list[str]:
    """The findings of SASS; a line that ends with a colon is a label."""
    text, address = [".text.k:"], 0
    for line in (*lines, "EXIT"):
        text.append(line if line.endswith(":") else f"        /*{address:04x}*/    {line} ;")
        address += 0 if line.endswith(":") else 16
    out = list(in_flight([], sass.parse("\n".join(text) + "\n")))
    assert all(f.rule == "R8" for f in out)
    return [f.text for f in out]


READ = "LDS.128 R36, [R2]"
ONE = (READ, ARRIVE, machine_product(36))
SASS_BACK = "@P0 BRA `(.L_x_1)"
READ_AGAIN = "writes R36, R37, R38, R39, operand A"
UNKNOWN = "sass: a WGMMA of an unknown form"
NO_ARRIVE = "no fence since R36, R37, R38, R39 was written"


@pytest.mark.parametrize(
    "lines",
    [
        (*ONE, DEPBAR, READ, "STG.E desc[UR4][R2.64], R24"),
        (*ONE, "LDS.128 R32, [R2]", "LDS.128 R40, [R2]", "IMAD.WIDE R22, R3, R4, R6", DEPBAR),
        (*ONE, "LDS.128 R40, [R2]", ARRIVE, machine_product(40), DEPBAR_1, READ),
        (ARRIVE, machine_product(36, ""), machine_product(36, ""), machine_product(36), DEPBAR),
        (".L_x_1:", DEPBAR, *ONE, SASS_BACK, DEPBAR),
        (*ONE, "STS.128 [R2], R36", "FADD R2, R36, R37", DEPBAR),
        (*ONE, "BAR.SYNC.DEFER_BLOCKING R37, 0x80", "R2UR UR4, R36", "FCHK P0, R36, R37", DEPBAR),
        # after the BSYNC a thread is behind it, not where an earlier BSSY of B0 led
        ("BSSY B0, `(.L_x_2)", ".L_x_1:", SASS_BACK, "BSYNC B0", ".L_x_2:", READ)
        + ("BSSY B0, `(.L_x_3)", *ONE, "BSYNC B0", ".L_x_3:", DEPBAR),
    ],
    ids=range(8),
)  # fmt: skip
def test_sass_that_holds(lines):
    assert compiled(*lines) == []


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((*ONE, READ, DEPBAR), f"{READ_AGAIN} of the WGMMA at SASS 0x0020"),
        ((*ONE, "LDS.64 R38, [R2]", DEPBAR), "writes R38, R39, operand A"),
        ((*ONE, "LDSM.16.M88.4 R33, [R2]", DEPBAR), "writes R36, operand A"),
        ((*ONE, "CS2R R38, SRZ", DEPBAR), "writes R38, R39, operand A"),
        ((*ONE, "SHFL.BFLY PT, R39, R2, 0x1, 0x1f", DEPBAR), "writes R39, operand A"),
        ((*ONE, "IMAD.WIDE R38, R3, R4, R6", DEPBAR), "writes R38, R39, operand A"),
        ((*ONE, "@P0 IMAD.MOV.U32 R36, RZ, RZ, R2", DEPBAR), "writes R36, operand A"),
        ((*ONE, DEPBAR_1, READ), READ_AGAIN),
        ((*ONE, f"@P0 {DEPBAR}", READ), READ_AGAIN),
        ((ARRIVE, machine_product(36, ""), DEPBAR, READ), READ_AGAIN),
        ((".L_x_1:", READ, DEPBAR, ARRIVE, machine_product(36), SASS_BACK), READ_AGAIN),
        ((*ONE, "@P0 BRA `(.L_x_1)", DEPBAR, ".L_x_1:", READ), READ_AGAIN),
        # a BSYNC leads to where its BSSY says
        (("BSSY B0, `(.L_x_1)", *ONE, "BSYNC B0", DEPBAR, ".L_x_1:", READ), READ_AGAIN),
        # a branch with a guard may not jump: what follows it is looked at
        ((*ONE, "@P0 BRA `(.L_x_1)", READ, ".L_x_1:", DEPBAR), READ_AGAIN),
        # a BMOV restores a join that a later BSSY of its register replaced
        (
            ("BSSY B0, `(.L_x_1)", "BMOV.32.CLEAR R5, B0", "BSSY B0, `(.L_x_2)", "BMOV.32 B0, R5")
            + (*ONE, "BSYNC B0", ".L_x_2:", DEPBAR, "EXIT", ".L_x_1:", READ),
            READ_AGAIN,
        ),
        # a routine that is called writes them
        ((*ONE, "CALL.REL.NOINC `($f)", DEPBAR, "EXIT", "$f:", READ, "RET"), READ_AGAIN),
        ((*ONE, "FADD R2, R27, R3", DEPBAR), "reads R27, accumulators"),
        ((*ONE, "STG.E.64 desc[UR4][R2.64], R24", DEPBAR), "reads R24, R25, accumulators"),
        ((*ONE, "LDG.E R2, desc[UR4][R26.64]", DEPBAR), "reads R26, R27, accumulators"),
        ((*ONE, "IMAD.WIDE R2, R3, R4, R26", DEPBAR), "reads R26, R27, accumulators"),
        ((*ONE, "FMUL R24, R2, R3", DEPBAR), "writes R24, accumulators"),
        ((*ONE, machine_product(36, sums=25), DEPBAR), "writes R25, R26, R27, accumulators"),
        # fences
        ((machine_product(36), DEPBAR), "no fence before it"),
        ((*ONE, DEPBAR, READ, machine_product(36), DEPBAR), NO_ARRIVE),
        ((ARRIVE, READ, machine_product(36), DEPBAR), NO_ARRIVE),
        ((ARRIVE, "FMUL R24, R24, R3", machine_product(36)), "no fence since R24 was written"),
        # what is not followed is not passed
        ((*ONE, "BRX R4 -0x100", DEPBAR), "not followed: sass: k: SASS 0x0030: BRX R4 -0x100"),
        ((*ONE, "BRA `(.L_x_7)", DEPBAR), "not followed: sass: k: SASS 0x0030"),
        ((ARRIVE, "HGMMA R24, gdesc[UR8], R24", DEPBAR), f"not followed: {UNKNOWN}"),
        ((machine_product(36).replace("R24,", "R88,", 1), DEPBAR), f"not followed: {UNKNOWN}"),
        ((machine_product(36).replace("R36", "UR36"), DEPBAR), f"not followed: {UNKNOWN}"),
    ],
    ids=range(31),
)  # fmt: skip
def test_sass_that_does_not(lines, why):
    out = compiled(*lines)
    assert any(why in text for text in out), out


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("FADD R2, R3, -R4", {3, 4}, {2}),
        ("FADD R2, |R3|, R4.reuse", {3, 4}, {2}),
        ("LDG.E.128 R4, desc[UR6][R2.64+0x10]", {2, 3}, {4, 5, 6, 7}),
        ("LDS.U16 R4, [R2+UR4+0x10]", {2}, {4}),
        ("STS.64 [R2], R4", {2, 4, 5}, set()),
        ("STSM.16.M88.4 [R2], R4", {2, 4, 5, 6, 7}, set()),
        ("LDSM.16.MT88.2 R4, [R2]", {2}, {4, 5}),
        ("CS2R.32 R4, SR_CLOCKLO", set(), {4}),
        ("ISETP.GE.AND P0, PT, R2, R3, PT", {2, 3}, set()),
        ("LOP3.LUT P0, R5, R2, R3, RZ, 0x3c, !PT", {2, 3}, {5}),
        ("IADD3 R4, P0, R2, R3, RZ", {2, 3}, {4}),
        ("IMAD.WIDE.U32 R4, P0, R2, R3, R6", {2, 3, 6, 7}, {4, 5}),
        ("ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR6][R2.64], R8", {2, 3, 8}, {4}),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R4", {2, 4}, set()),
        ("SYNCS.ARRIVE.TRANS64 R6, [R2], R8", {2, 8}, {6, 7}),
        ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ], RZ", {2}, set()),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", {*range(4, 16)}, {4, 5, 6, 7}),
        ("F2I.S64.TRUNC R4, R2", {2, 3}, {4, 5}),
        ("DFMA R4, R6, R8, R10", {*range(6, 12)}, {4, 5}),
        ("WARPSYNC R2", {2}, set()),
        ("R2P PR, R2, 0x7f", {2}, set()),
        ("UIADD3 UR4, UR5, UR6, URZ", set(), set()),
        ("DEPBAR.LE SB0, 0x1", set(), set()),
    ],
)
def test_registers_of_an_instruction(text, reads, writes):
    (function,) = sass.parse(f".text.k:\n        /*0000*/    {text} ;\n")
    found = sass_registers.accesses(function.instructions[0])
    assert found == ({f"R{n}" for n in reads}, {f"R{n}" for n in writes})
