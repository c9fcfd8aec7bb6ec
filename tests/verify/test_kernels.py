"""Certificates of CuTe kernels compiled for sm_90a on this machine, and of mutants of them."""

import dataclasses
import functools
import re
from unittest import mock

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.compile.kernel import Expect
from cute_kernels.errors import ArgumentValueError, CertificateError
from tests.verify import kernels, reloading
from verify import sass
from verify.certificate import certificate, certify, check_a, check_b

try:
    sass.nvdisasm()
except CertificateError as error:
    pytest.skip(str(error), allow_module_level=True)

PLAIN = Expect(mma=None, max_registers=64)


@functools.cache
def made(builder, *args):
    """What one compile leaves; tests share it."""
    return sass.artefacts(lambda: builder(*args))


@functools.cache
def made_of_ptx(builder, *args):
    """`made`, with the SASS of `elementwise`: nvdisasm takes six times as long as the compile."""
    others = elementwise().sass
    with mock.patch.object(sass, "disassemble", lambda cubin: others):
        return sass.artefacts(lambda: builder(*args))


def elementwise(extra=""):
    return made(kernels.compile_elementwise, extra)


def multiply():
    return made(reloading.compile_reloading, reloading.WHEN[0])


def ordered_sum(style="thread", defect=""):
    return made(kernels.compile_ordered_sum, style, defect)


def rules(findings):
    return {finding.rule for finding in findings}


def edited(artefacts, part, old, new):
    """The artefacts with one edit of their PTX or SASS."""
    text = getattr(artefacts, part)
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    return dataclasses.replace(artefacts, **{part: changed})


# Class A.


@pytest.mark.parametrize(
    "extra, rule, in_sass",
    [
        ("float atomic", "A1", True),
        ("float swap", "A1", False),
        ("clock", "A2", True),
        ("smid", "A2", False),
    ],
)
def test_class_a_mutants_fail(extra, rule, in_sass):
    """Two of them in SASS too; `test_edits_of_text_fail` has it of each register."""
    assert check_a(elementwise(), PLAIN) == ()  # with an integer atomic
    kernel = (made if in_sass else made_of_ptx)(kernels.compile_elementwise, extra)
    out = check_a(kernel, PLAIN)
    assert rules(out) == {rule}
    assert any("PTX" in f.where for f in out)
    assert any("SASS" in f.where for f in out) == in_sass


@pytest.mark.parametrize(
    "part, old, new, rule",
    [
        ("ptx", r"atom\.global\.add\.u32[^,]*,", "red.global.add.f32", "A1"),
        ("ptx", r"%ctaid\.x", "%globaltimer_lo", "A2"),
        ("ptx", r"\tret;", "\tnanosleep.u32 100;\n\tret;", "A2"),
        ("sass", r"REDG\.E\.ADD", "REDG.E.ADD.F32.FTZ.RN", "A1"),
        ("sass", r"SR_CTAID\.X", "SR_VIRTUALSMID", "A2"),
        ("sass", r"FADD|FMUL", "STL", "R5"),
        ("sass", r"LDG\.E", "LDL", "R5"),
    ],
)
def test_edits_of_text_fail(part, old, new, rule):
    assert rules(check_a(edited(elementwise(), part, old, new), PLAIN)) == {rule}


@pytest.mark.parametrize("strides, broken", [("int64", False), ("int32", True), (7168, True)])
def test_offsets_of_cute_tensors(strides, broken):
    out = check_a(made_of_ptx(kernels.compile_row_copy, strides), PLAIN)
    assert rules(out) == ({"R4"} if broken else set())


@pytest.mark.parametrize("wait, broken", [("first", False), ("late", True), ("never", True)])
def test_dependent_launch(wait, broken):
    kernel = made_of_ptx(kernels.compile_row_copy, "int64", wait)
    assert rules(check_a(kernel, dataclasses.replace(PLAIN, pdl=True))) == (
        {"R3"} if broken else set()
    )
    assert check_a(kernel, PLAIN) == ()


def test_the_matrix_instruction_and_the_ceilings():
    kernel = multiply()
    used = next(iter(sass.usage(kernel.cubin).values()))
    shared = used.shared + kernel.dynamic_shared
    expect = Expect("HGMMA.64x16x16.F32.BF16", used.registers, shared)
    assert kernel.dynamic_shared >= reloading.N * reloading.K * 2
    assert check_a(kernel, expect) == ()
    assert check_a(kernel, dataclasses.replace(expect, mma="64x16x16")) == ()
    for worse in (
        {"mma": "64x128x16"},
        {"mma": None},
        {"max_registers": used.registers - 1},
        {"max_shared": shared - 1},
    ):
        assert rules(check_a(kernel, dataclasses.replace(expect, **worse))) == {"R5"}


# Class B.


@pytest.mark.parametrize("style", ["thread", "lanes", "plain", "fence", "late"])
def test_right_turnstiles_pass(style):
    kernel = ordered_sum(style)
    assert check_b(kernel, PLAIN) == ()
    assert rules(check_a(kernel, PLAIN)) == {"A1"}


@pytest.mark.parametrize(
    "style, defect, rule",
    [
        ("thread", "no spin", "R1"),
        ("thread", "relaxed spin", "R1"),
        ("thread", "one spin for all rows", "R1"),
        ("thread", "read wait", "R2"),
        ("thread", "release before the wait", "R2"),
        ("thread", "no release", "R2"),
        ("lanes", "no barrier before the addition", "R1"),
        ("lanes", "no barrier before the release", "R2"),
        ("plain", "no barrier before the release", "R2"),
        ("late", "waits for one group less", "R2"),
    ],
)
def test_compiled_mutants_fail(style, defect, rule):
    kernel = made_of_ptx(kernels.compile_ordered_sum, style, defect)
    proved_on_ptx = [f for f in check_b(kernel, PLAIN) if "PTX" in f.where]
    assert rules(proved_on_ptx) == {rule}


@pytest.mark.parametrize(
    "style, old, new, rule",
    [
        ("thread", r"ld\.acquire\.gpu", "ld.relaxed.gpu", "R1"),
        ("thread", r"ld\.acquire\.gpu", "ld.acquire.cta", "R1"),
        ("thread", r"bulk\.wait_group ", "bulk.wait_group.read ", "R2"),
        ("thread", r"cp\.async\.bulk\.wait_group[^;]*;", "", "R2"),
        ("thread", r"cp\.async\.bulk\.commit_group;", "", "R2"),
        ("thread", r"red\.release[^;]*;", "", "R2"),
        ("thread", r"red\.release\.gpu", "red.relaxed.gpu", "R2"),
        ("thread", r"red\.release\.gpu", "red.release.cta", "R2"),
        ("lanes", r"bulk\.wait_group ", "bulk.wait_group.read ", "R2"),
        ("lanes", r"red\.release[^;]*;", "", "R2"),
        ("plain", r"red\.release[^;]*;", "", "R2"),
        ("fence", r"fence\.acq_rel\.gpu;", "", "R2"),
        ("fence", r"fence\.acq_rel\.gpu;", "fence.acq_rel.cta;", "R2"),
        ("late", r"bulk\.wait_group \t?1", "bulk.wait_group 2", "R2"),
    ],
)
def test_edits_of_a_turnstile_fail(style, old, new, rule):
    kernel = edited(ordered_sum(style), "ptx", old, new)
    out = check_b(kernel, PLAIN)
    # the wait that is edited is the first of several in "late"
    assert rules(out) == {rule}


@pytest.mark.parametrize(
    "old, new, rule",
    [
        (r"LDG\.E\.STRONG\.GPU", "LDG.E", "R1"),
        (r"MEMBAR\.ALL\.GPU", "MEMBAR.ALL.CTA", "R2"),
        (r"REDG\.E\.ADD\.S32\.STRONG\.GPU", "REDG.E.ADD.S32.STRONG.CTA", "R2"),
        (r"UBLKRED\.G\.S\.ADD\.F32\.RN", "UBLKCP.S.G", "R2"),
    ],
)
def test_each_part_of_a_turnstile_must_be_left_in_sass(old, new, rule):
    kernel = ordered_sum()
    while re.search(old, kernel.sass):
        kernel = edited(kernel, "sass", old, new)
    assert rules(check_b(kernel, PLAIN)) == {rule}


# The record.


def test_certify_compiles_once_and_fills_the_record():
    facts = {"name": "multiply", "constexpr": {"n": 16}, "kind": "A"}
    facts["expect"] = Expect("64x16x16", 128)
    first = certify(lambda: reloading.compile_reloading(reloading.WHEN[0]), **facts)
    assert first.ok and first.arch == "sm_90a"
    assert first.constexpr == (("n", 16),)
    assert dict(first.opcodes)["HGMMA"] == 1
    assert re.fullmatch(r"cutlass-dsl \d[\w.]*, CUDA release \d+\.\d+", first.toolchain)
    assert certificate(multiply(), **facts).to_json() == first.to_json()


@pytest.mark.parametrize("times", [0, 2])
def test_a_build_compiles_exactly_once(times):
    def build():
        for _ in range(times):
            kernels.compile_elementwise()

    with pytest.raises(CertificateError, match=f"one cute.compile, got {times}"):
        sass.artefacts(build)


def test_the_settings_of_the_dsl_come_back(tmp_path):
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    names = ("keep_ptx", "keep_cubin", "dump_dir", "arch")
    before = {name: getattr(dsl.envar, name) for name in names}

    def build():
        assert dsl.envar.arch == "sm_90a"
        raise KeyError("from build")

    with pytest.raises(KeyError, match="from build"):
        sass.artefacts(build)
    assert {name: getattr(dsl.envar, name) for name in names} == before
    assert "compile_and_cache" not in vars(dsl)


def test_a_wrong_class_is_refused_before_the_compile():
    def build():
        raise AssertionError("compiled")

    with pytest.raises(ArgumentValueError, match="kind: expected one of 'A', 'B', got 'C'"):
        certify(build, name="x", constexpr={}, kind="C", expect=PLAIN)
