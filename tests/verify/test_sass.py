"""Reading SASS and cubins, the rules A1, A2 and R5 on them, and the report.

No compiler and no disassembler are needed.
"""

import dataclasses
import json
import shutil

import pytest

from cute_kernels.compile.kernel import Expect
from cute_kernels.errors import ArgumentTypeError, CertificateError
from tests.verify.listings import elf, listing
from verify import sass
from verify.report import Certificate, Finding, broken_rules, tables, write_report


@pytest.mark.parametrize(
    "opcode, is_float",
    [
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5", True),
        ("ATOMG.E.ADD.F16x2.RN.STRONG.GPU PT, RZ, desc[UR4][R2.64], R5", True),
        ("@P0 ATOMS.ADD.F32 R4, [R2], R5", True),
        ("UBLKRED.G.S.ADD.F32.RN [UR8], [UR5], UR6", True),
        ("UTMAREDG.2D.ADD [UR8], [UR4]", True),
        ("REDG.E.ADD.STRONG.GPU desc[UR4][R2.64], R5", False),
        ("ATOMG.E.CAS.STRONG.GPU PT, R4, [R2], R5, R6", False),
        ("UBLKRED.G.S.ADD.S32 [UR8], [UR5], UR6", False),
        ("REDUX.SUM UR4, R5", False),
        ("F2FP.BF16.F32.PACK_AB R4, R5, R6", False),
    ],
)
def test_float_atomics_in_sass(opcode, is_float):
    code = sass.parse(listing(opcode))
    assert [f.rule for f in sass.float_atomics(code)] == ["A1"] * is_float


@pytest.mark.parametrize(
    "register", ["SR_CLOCKLO", "SR_CLOCKHI", "SR_GLOBALTIMERLO", "SR_VIRTUALSMID", "SR_VIRTID"]
)
def test_clocks_in_sass_are_found(register):
    code = sass.parse(listing(f"S2R R0, {register}", "S2R R1, SR_TID.X", "S2R R2, SR_CTAID.X"))
    assert [f.rule for f in sass.clocks(code)] == ["A2"]


def test_sass_digest_ignores_addresses_labels_and_names():
    code = ("IADD3 R0, R1, 0x4, RZ", "@P0 BRA `(.L_x_{0})")

    def digest(label, *, name="f", start=0, first=code[0]):
        text = listing(first, code[1].format(label), name=name, start=start, label=label)
        return sass.digest(sass.parse(text))

    assert digest(3) == digest(7, name="another_kernel", start=0x200)
    assert digest(3) != digest(3, first="IADD3 R0, R1, 0x8, RZ")
    assert digest(3) != digest(3, first="@!P0 IADD3 R0, R1, 0x4, RZ")
    assert digest(3) != digest(3, first="IADD3.X R0, R1, 0x4, RZ")


def test_histogram_counts_opcodes_without_padding():
    code = sass.parse(
        listing("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ", "HGMMA.64x64x16.F32 R8")
    )
    assert sass.histogram(code) == {"EXIT": 1, "HGMMA": 2}


@pytest.mark.parametrize("text", ["", "hello", ".text.f:\n"])
def test_text_without_code_is_refused(text):
    with pytest.raises(CertificateError, match="sass"):
        sass.parse(text)


def test_bytes_that_are_no_cubin_are_refused_and_a_missing_disassembler_named(monkeypatch):
    for read in (sass.disassemble, sass.usage):
        with pytest.raises(CertificateError, match="cubin"):
            read(b"not an ELF file")
    sass.nvdisasm.cache_clear()
    monkeypatch.setattr(sass, "_in_wheel", lambda distribution: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        with pytest.raises(CertificateError, match="pip install nvidia-cuda-nvdisasm"):
            sass.nvdisasm()
    finally:
        sass.nvdisasm.cache_clear()


def broken_resources(code: str, cubin: bytes, expect: Expect, dynamic: int | None = 0):
    out = sass.Artefacts("", cubin, listing(code), dynamic)
    return [f.text for f in sass.resources(sass.parse(out.sass), out, expect)]


def test_ceilings_are_inclusive():
    cubin = elf(168, 0, 1024 + 512)
    assert broken_resources("NOP", cubin, Expect(None, 168, 4608), 4096) == []
    assert broken_resources("NOP", cubin, Expect(None, 167, 4608), 4096) == ["168 registers > 167"]
    (text,) = broken_resources("NOP", cubin, Expect(None, 168, 4607), 4096)
    assert "4608 bytes of shared memory > 4607" in text
    (text,) = broken_resources("NOP", cubin, Expect(None, 168, 4607), None)
    assert "not a constant" in text
    assert broken_resources("NOP", cubin, Expect(None, 168), None) == []


def test_stack_and_spills_are_found():
    assert "16 bytes of stack" in broken_resources("NOP", elf(8, 16, 0), Expect(None, 8))[0]
    for code in ("STL [R1], R4", "LDL.64 R4, [R1+0x8]"):
        assert "a spill" in broken_resources(code, elf(8, 0, 0), Expect(None, 8))[0]
    assert broken_resources("STS [R1], R4", elf(8, 0, 0), Expect(None, 8)) == []


def test_a_kernel_off_the_fast_path_may_spill_so_much():
    out = sass.Artefacts("", elf(8, 16, 0), listing("STL [R1], R4", "LDL R4, [R1]"), 0)

    def found(spills: int) -> list[str]:
        expect = Expect(None, 8, spills=spills)
        return [f.text for f in sass.resources(sass.parse(out.sass), out, expect)]

    assert found(2) == []
    assert sum("a spill" in text for text in found(1)) == 2
    assert any("bytes of stack" in text for text in found(0))


@pytest.mark.parametrize(
    "mma, count",
    [
        ("64x256x16", 0),
        ("HGMMA.64x256x16.F32.BF16", 0),
        (("64x256x16",), 0),
        (None, 1),
        ("64x128x16", 2),
        ("64x256x1", 2),
        (("64x256x16", "64x64x16"), 1),
    ],
)
def test_the_matrix_instruction_that_was_meant(mma, count):
    code = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
    assert len(broken_resources(code, elf(8, 0, 0), Expect(mma, 8))) == count


# Dynamic shared memory, from the host code's MLIR.

HOST = """
  llvm.func @main(%arg0: i64) {
    %1 = llvm.mlir.constant(230400 : i64) : i64
    %2 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, CONFIG
    llvm.store %1, %2 : i64, !llvm.ptr
  }
""".replace("CONFIG", "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")


def test_dynamic_shared_memory_is_the_largest_constant():
    two = HOST + HOST.replace("@main", "@other").replace("230400", "1000")
    assert sass._dynamic_shared(two) == 230400
    assert sass._dynamic_shared(HOST.replace("store %1", "store %arg0")) is None
    assert sass._dynamic_shared("") is None


# The report.

CERTIFICATE = Certificate(
    name="gemm",
    constexpr=(("tile", (128, 256)), ("dtype", float)),
    arch="sm_90a",
    toolchain="cutlass-dsl 4.8.1, CUDA release 13.4",
    kind="A",
    opcodes=(("EXIT", 1), ("HGMMA", 8), ("REDG", 2)),
    registers=168,
    shared_static=256,
    shared_dynamic=None,
    stack=0,
    spills=0,
    sass_sha256="ab" * 32,
    findings=(),
)
BROKEN = dataclasses.replace(
    CERTIFICATE,
    findings=(Finding("R4", "f: PTX line 3", "mul"), Finding("R4", "f: PTX line 4", "mul")),
)


def test_broken_rules_and_their_kernels_are_told():
    (table,) = tables([CERTIFICATE, BROKEN])
    assert table.row_count == 2 and broken_rules([CERTIFICATE]) == []
    assert any("R4" in line for line in broken_rules([CERTIFICATE, BROKEN]))
    with pytest.raises(ArgumentTypeError, match="certs"):
        tables([{"name": "gemm"}])


def test_reports_are_json_and_equal_for_equal_certificates(tmp_path):
    path = write_report([CERTIFICATE, BROKEN], tmp_path / "new" / "folder")
    first, second = json.loads(path.read_text())
    assert path.name == "certificates.json"
    assert first["ok"] and not second["ok"]
    assert first["constexpr"] == {"tile": [128, 256], "dtype": "<class 'float'>"}
    assert first["opcodes"] == {"EXIT": 1, "HGMMA": 8, "REDG": 2}
    assert second["findings"][1] == {"rule": "R4", "where": "f: PTX line 4", "text": "mul"}
    assert json.loads(BROKEN.to_json()) == second
    assert dataclasses.replace(BROKEN).to_json() == BROKEN.to_json()
