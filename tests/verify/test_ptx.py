"""Reading PTX, and the rules A1, A2, R3 and R4 on a few lines of it.

No compiler and no disassembler are needed.
"""

import dataclasses

import pytest

from cute_kernels.compile.kernel import Expect
from cute_kernels.errors import CertificateError
from tests.verify.listings import function
from verify import ptx, ptx_paths, sass
from verify.certificate import Offsets, _dependent_launch

# Reading.


def test_scopes_keep_their_own_labels_and_registers():
    wait = """
  {
  .reg .pred P1;
  LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r2], %r1;
  @P1 bra DONE;
  bra LAB_WAIT;
  DONE:
  }"""
    f = function(wait + wait)
    tries = [i for i in f.instructions if i.base == "mbarrier"]
    assert len({i.results for i in tries}) == 2
    assert sorted(len(loop) for loop in f.loops) == [2, 2]
    assert not f.loops[0] & f.loops[1]


def test_vectors_comments_and_line_numbers():
    f = function(
        "  // mov.u32 %r9, %clock;\n  ld.global.v2.b32 {%r4, %r5}, [%rd1+8]; /* a\n b */ nop;"
    )
    load, nop = f.instructions[-3:-1]
    assert load.results == ("%r4", "%r5")
    assert load.sources == ("%rd1",)
    assert (load.line, nop.line) == (load.line, load.line + 1)
    assert not any("%clock" in i.text for i in f.instructions)


def test_branch_tables_lead_to_every_target():
    f = function("""
  TABLE: .branchtargets A, B;
  brx.idx %r1, TABLE;
A: bra END;
B: mov.u32 %r4, 1;
END:""")
    assert len(f.blocks[0].edges) == 2
    assert f.join[0] == f.blocks[-1].index


def test_nested_loops_are_told_apart():
    f = function("""
OUT: mov.u32 %r4, 0;
IN: add.u32 %r4, %r4, 1;
  setp.lt.u32 %p1, %r4, %r1;
  @%p1 bra IN;
  add.u32 %r5, %r5, 1;
  setp.lt.u32 %p2, %r5, %r1;
  @%p2 bra OUT;""")
    inner, outer = f.loops
    assert inner < outer


def test_conditions_that_are_the_same_in_a_thread_have_the_same_key():
    f = function("""
  setp.ne.b32 %p1, %r2, 0;
  mov.u32 %r9, %tid.x;
  setp.eq.b32 %p2, %r9, 0;
  not.pred %p3, %p2;
  setp.eq.b32 %p4, %r9, 1;
  ld.global.u32 %r8, [%rd1];
  setp.eq.b32 %p5, %r8, 0;""")
    values = ptx_paths.Values(f)
    assert values.condition("%p1") == (values.condition("%p2")[0], False)
    assert values.condition("%p3") == values.condition("%p1")
    assert values.condition("%p4")[0] != values.condition("%p2")[0]
    assert values.condition("%p5") == ("%p5", True)


@pytest.mark.parametrize(
    "code, scope",
    [
        ("setp.eq.b32 %p1, %r2, 0;", 2),
        ("setp.eq.b32 %p1, %r2, 31;", 2),
        ("and.b32 %r4, %r2, 31; setp.eq.b32 %p1, %r4, 0;", 1),
        ("mov.u32 %r4, %laneid; setp.eq.b32 %p1, %r4, 0;", 1),
        ("elect.sync %r4|%p1, -1;", 1),
        ("shr.u32 %r4, %r2, 5; shfl.sync.idx.b32 %r5, %r4, 0, 31, -1; setp.eq.b32 %p1, %r5, 1;", 2),
        ("setp.eq.b32 %p1, %r3, 0;", 0),  # another CTA may differ, no thread of this one does
        ("setp.eq.b32 %p1, %r1, 0;", 0),
        ("add.u32 %r4, %r2, %r1; setp.eq.b32 %p1, %r4, 0;", 0),
        ("ld.shared.u32 %r4, [%r2]; setp.eq.b32 %p1, %r4, 0;", 0),
    ],
)
def test_which_conditions_tell_threads_apart(code, scope):
    assert ptx_paths.Values(function(code)).selects("%p1") == scope
    if scope == 2:
        assert ptx_paths.Values(function(code, ".reqntid 32")).selects("%p1") == 1


@pytest.mark.parametrize(
    "text", ["", "int main() {}", ".target sm_90a .entry f() { mov.u32 %r1, 0 }"]
)
def test_text_that_is_not_ptx_is_refused(text):
    with pytest.raises(CertificateError, match="ptx"):
        ptx.parse(text)


def test_a_branch_without_its_label_is_refused():
    with pytest.raises(CertificateError, match="'NOWHERE'"):
        function("bra NOWHERE;")


# A1, A2.


@pytest.mark.parametrize(
    "opcode, is_float",
    [
        ("red.global.add.f32 [%rd1], %r2", True),
        ("red.release.gpu.global.add.noftz.bf16x2 [%rd1], %r2", True),
        ("red.global.add.v4.f32 [%rd1], {%r2, %r3, %r2, %r3}", True),
        ("atom.shared.add.f64 %rd2, [%r2], %rd3", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r2], 64", True),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1], [%r2]",
            True,
        ),
        ("multimem.red.relaxed.sys.global.add.f16x2 [%rd1], %r2", True),
        ("multimem.ld_reduce.global.add.f32 %r4, [%rd1]", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], 64", False),
        ("red.global.add.u32 [%rd1], %r2", False),
        ("atom.global.cas.b32 %r4, [%rd1], %r2, %r3", False),
        ("atom.global.max.s64 %rd2, [%rd1], %rd3", False),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1], [%r2]", False),
        ("ld.global.f32 %r4, [%rd1]", False),
        ("redux.sync.add.u32 %r4, %r2, -1", False),
        ("fma.rn.f32 %r4, %r2, %r2, %r3", False),
    ],
)
def test_float_atomics_in_ptx(opcode, is_float):
    assert [f.rule for f in sass.float_atomics([function(opcode + ";")])] == ["A1"] * is_float


CAS = """
LOOP: ld.global.b32 %r4, [%rd1];
  {compute}
  atom.global.cas.b32 %r6, [%rd1], %r4, %r5;
  setp.ne.b32 %p1, %r6, %r4;
  @%p1 bra LOOP;"""


@pytest.mark.parametrize(
    "compute, is_float",
    [
        ("add.f32 %r5, %r4, %r2;", True),
        ("cvt.rzi.s32.f32 %r7, %r4; add.s32 %r5, %r7, 1;", True),
        ("add.s32 %r5, %r4, %r2;", False),
    ],
)
def test_a_swap_of_a_float_is_an_atomic_on_it(compute, is_float):
    float_swaps = list(sass.float_swaps(function(CAS.format(compute=compute))))
    assert [f.rule for f in float_swaps] == ["A1"] * is_float


@pytest.mark.parametrize(
    "name",
    ["clock", "clock64", "globaltimer_lo", "smid", "nsmid", "warpid", "tid.x", "nctaid.x"],
)
def test_clocks_and_places_are_found(name):
    wide = "64" if name == "clock64" else "32"
    out = list(sass.clocks([function(f"mov.u{wide} %r4, %{name};")]))
    assert [f.rule for f in out] == ["A2"] * (not name.endswith(".x"))


# R3.

READ = "ld.global.u32 %r4, [%rd1];"
GRID_WAIT = "griddepcontrol.wait;"


@pytest.mark.parametrize(
    "body, broken",
    [
        (GRID_WAIT + READ, 0),
        (READ + GRID_WAIT, 1),
        (READ, 1),
        ("ld.shared.u32 %r4, [%r2]; ld.param.u32 %r5, [n];" + GRID_WAIT + READ, 0),
        (f"setp.eq.b32 %p1, %r2, 0; @%p1 bra A; {GRID_WAIT} A: {READ}", 1),
        (f"setp.eq.b32 %p1, %r2, 0; @%p1 bra A; {GRID_WAIT} {READ} A:", 0),
        (f"setp.eq.b32 %p1, %r2, 0; @%p1 bra A; {GRID_WAIT} A: @!%p1 {READ}", 0),
        ("cp.async.bulk.shared::cta.global.bulk_group [%r2], [%rd1], 16;" + GRID_WAIT, 1),
        ("red.global.add.u32 [%rd1], 1;" + GRID_WAIT, 1),
    ],
)
def test_the_grid_wait_comes_before_global_memory(body, broken):
    expect = Expect(None, 64, pdl=True)
    assert [f.rule for f in _dependent_launch(function(body), expect)] == ["R3"] * broken
    assert not _dependent_launch(function(body), dataclasses.replace(expect, pdl=False))


# R4.

ROW = "cvt.s64.s32 %rd2, %r10; shl.b64 %rd3, %rd2, 2; add.s64 %rd4, %rd1, %rd3;"
USE = ROW + "ld.global.b32 %r11, [%rd4];"


@pytest.mark.parametrize(
    "body, broken",
    [
        ("mul.lo.s32 %r10, %r3, %r1;" + USE, 1),
        ("mad.lo.s32 %r10, %r3, %r1, %r2;" + USE, 1),
        (
            "mul.lo.s32 %r9, %r3, %r1; add.s32 %r10, %r9, %r2; mul.wide.s32 %rd3, %r10, 4;"
            "add.s64 %rd4, %rd1, %rd3; st.global.b32 [%rd4], %r2;",
            1,
        ),
        ("mul.lo.s32 %r10, %r3, 7168;" + USE, 1),
        ("shl.b32 %r10, %r3, 12;" + USE, 1),
        ("shl.b32 %r10, %r3, %r1;" + USE, 1),
        (
            "mul.lo.s32 %r10, %r3, %r1;"
            + ROW
            + "cp.async.bulk.shared::cta.global.bulk_group [%r2], [%rd4], 16;",
            1,
        ),
        ("mul.lo.s32 %r10, %r3, %r1;" + ROW + "red.global.add.u32 [%rd4], 1;", 1),
        # widened first
        (
            "cvt.u64.u32 %rd5, %r3; cvt.u64.u32 %rd6, %r1; mul.lo.s64 %rd7, %rd5, %rd6;"
            "add.s64 %rd4, %rd1, %rd7; ld.global.b32 %r11, [%rd4];",
            0,
        ),
        ("mul.wide.u32 %rd7, %r3, %r1; add.s64 %rd4, %rd1, %rd7; ld.global.b32 %r11, [%rd4];", 0),
        # a coordinate, not an offset
        ("shl.b32 %r9, %r3, 7; or.b32 %r10, %r9, %r2;" + USE, 0),
        # cannot wrap: tid < 128, a mask, a shift
        ("mul.lo.s32 %r10, %r2, 7168;" + USE, 0),
        ("and.b32 %r9, %r3, 1023; mul.lo.s32 %r10, %r9, 7168;" + USE, 0),
        ("and.b32 %r9, %r3, -1024; mul.lo.s32 %r10, %r9, 7168;" + USE, 1),
        ("shr.u32 %r9, %r3, 20; mul.lo.s32 %r10, %r9, 7168;" + USE, 0),
        ("mov.u32 %r9, %ctaid.y; mul.lo.s32 %r10, %r9, 7168;" + USE, 0),
        # not an address, or not of global memory
        ("mul.lo.s32 %r10, %r3, %r1;" + ROW + "st.global.b64 [%rd1], %rd4;", 0),
        ("mul.lo.s32 %r10, %r3, %r1; ld.shared.b32 %r11, [%r10];", 0),
        ("mul.lo.s32 %r10, %r3, %r1; setp.lt.s32 %p1, %r10, 7;" + READ, 0),
        # a remainder is smaller than its divisor
        ("div.u32 %r8, %r3, %r1; mul.lo.s32 %r9, %r8, %r1; sub.s32 %r10, %r3, %r9;" + USE, 0),
        (
            "mul.hi.u32 %r8, %r3, %r1; shr.u32 %r7, %r8, 3; mul.lo.s32 %r9, %r7, %r1;"
            "sub.s32 %r10, %r3, %r9;" + USE,
            0,
        ),
        ("div.u32 %r8, %r3, %r1; neg.s32 %r9, %r1; mad.lo.s32 %r10, %r8, %r9, %r3;" + USE, 0),
        ("div.u32 %r8, %r3, %r1; mul.lo.s32 %r9, %r8, %r1; sub.s32 %r10, %r2, %r9;" + USE, 1),
        # an index that is divided again
        ("mul.lo.s32 %r9, %r3, %r1; div.u32 %r10, %r9, %r2;" + USE, 0),
    ],
)
def test_offsets_are_widened_before_they_are_multiplied(body, broken):
    assert [f.rule for f in Offsets(function(body), 512).findings()] == ["R4"] * broken


def test_the_line_between_coordinate_and_offset_can_be_moved():
    f = function("mul.lo.s32 %r10, %r3, 2048;" + USE)
    assert len(list(Offsets(f, 512).findings())) == 1
    assert not list(Offsets(f, 2048).findings())
