"""Rule R6: what warpgroups hold after setmaxnreg fits what their CTA starts with."""

import functools

import pytest

from cute_kernels.compile.kernel import Expect
from tests.verify.listings import elf, function, listing
from verify import sass
from verify.certificate import certificate, check_a, check_b
from verify.registers import Pool, register_pools
from verify.report import RegisterPool, tables

INC, DEC = "setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32"
THREADS = ".reqntid 384, 1, 1"
WARP = "shr.u32 %r13, %r2, 5; shfl.sync.idx.b32 %r4|%p9, %r13, 0, 31, -1;"


def roles(split: str, dec: int = 24, inc: int = 240) -> str:
    """`split` sets %p1 for those that take registers."""
    return f"{split} @%p1 bra C; {DEC} {dec}; bra E; C: {INC} {inc}; E: bar.sync 0;"


def pool(body: str, registers: int = 168, bounds: str = THREADS):
    """What each warpgroup holds, and the findings' texts."""
    out, wrong = Pool(function(body, bounds), registers).read()
    assert {f.rule for f in wrong} <= {"R6"}
    return out and out.held, [f.text for f in wrong]


SPLITS = [
    "setp.ge.u32 %p1, %r2, 128;",
    "not.b32 %r13, %r2; setp.lt.s32 %p1, %r13, -128;",
    "and.b32 %r13, %r2, 0x180; setp.ne.s32 %p1, %r13, 0;",
    "sub.s32 %r13, 127, %r2; shr.s32 %r4, %r13, 31; setp.eq.b32 %p1, %r4, -1;",
    "mul.lo.s32 %r13, %r2, 3; setp.hi.u32 %p1, %r13, 381;",
    "shl.b32 %r13, %r2, 1; or.b32 %r4, %r13, 1; setp.gt.u32 %p1, %r4, 255;",
    "setp.lt.u32 %p2, %r2, 128; not.pred %p1, %p2;",
    f"{WARP} setp.gt.s32 %p1, %r4, 3;",
    "shfl.sync.idx.b32 %r4, %r2, 31, 31, -1; setp.gt.s32 %p1, %r4, 127;",
    "mov.u32 %r13, %laneid; sub.s32 %r4, %r2, %r13; setp.ge.s32 %p1, %r4, 128;",
]


@pytest.mark.parametrize("split", SPLITS)
def test_roles_by_the_index_of_a_thread(split):
    assert pool(roles(split)) == ((24, 240, 240), [])


@pytest.mark.parametrize(
    "split, held",
    [
        ("setp.lt.u32 %p1, %r2, 256;", (240, 240, 24)),
        ("setp.ge.u32 %p1, %r2, 256;", (24, 24, 240)),
        ("xor.b32 %r13, %r2, 128; setp.ge.u32 %p1, %r13, 128;", (240, 24, 240)),
    ],
)
def test_the_warpgroups_are_counted(split, held):
    assert pool(roles(split)) == (held, [])


@pytest.mark.parametrize(
    "dec, inc, registers, fits",
    [
        (24, 240, 168, True),
        (24, 240, 161, True),  # the hardware gives 168
        (24, 240, 160, False),
        (32, 240, 168, False),
        (40, 232, 168, True),
        (40, 240, 168, False),
        (56, 224, 168, True),
        (64, 224, 168, False),
        (168, 168, 168, True),
    ],
)
def test_what_they_hold_must_fit(dec, inc, registers, fits):
    register_count, wrong = pool(roles(SPLITS[0], dec, inc), registers)
    assert register_count == (dec, inc, inc)
    assert len(wrong) == (not fits)
    if not fits:
        start = (registers + 7) // 8 * 8
        asked = 128 * (dec + 2 * inc)
        for part in (f"hold {dec} + {inc} + {inc} registers", f"{asked} > {384 * start} of 384"):
            assert part in wrong[0], wrong


def test_a_part_of_a_warpgroup_counts_with_its_threads():
    """288 threads, of which 32 give 144 registers back: 24 x 32 + 184 x 256 <= 168 x 288."""
    split = "setp.lt.u32 %p1, %r2, 256;"
    bounds = ".reqntid 288, 1, 1"
    out, wrong = Pool(function(roles(split, 24, 184), bounds), 168).read()
    assert (out.asked, out.size, wrong) == (47872, 48384, [])
    assert out.held == (184, 184, 24)
    _, wrong = pool(roles(split, 24, 192), bounds=bounds)
    assert "49920 > 48384" in wrong[0]


@pytest.mark.parametrize(
    "split",
    [
        "setp.ge.u32 %p1, %r1, 128;",
        "mov.u32 %r13, %ctaid.x; setp.ge.u32 %p1, %r13, 128;",
        "ld.global.u32 %r13, [%r1]; setp.ge.u32 %p1, %r13, 128;",
        "add.s32 %r13, %r2, %r1; setp.ge.u32 %p1, %r13, 128;",
        "shfl.sync.up.b32 %r13, %r2, 1, 0, -1; setp.ge.u32 %p1, %r13, 128;",
        "cvt.rn.f32.u32 %r13, %r2; setp.ge.f32 %p1, %r13, %r13;",
    ],
)
def test_what_is_not_known_counts_with_the_most(split):
    register_count, wrong = pool(roles(split))
    assert register_count == (240, 240, 240)
    assert "240 + 240 + 240" in wrong[0]


def test_a_warpgroup_without_setmaxnreg_keeps_its_registers():
    body = f"setp.ge.u32 %p1, %r2, 128; @!%p1 bra E; {INC} 240; E: bar.sync 0;"
    register_count, wrong = pool(body)
    assert register_count == (168, 240, 240) and "waits for ever" in wrong[0]


def test_a_path_without_setmaxnreg_keeps_its_registers():
    early = "setp.eq.u32 %p2, %r1, 0; @%p2 ret; "
    register_count, wrong = pool(roles("setp.ge.u32 %p1, %r2, 128; @%p1 bra C; " + early))
    assert register_count == (168, 240, 240) and len(wrong) == 1
    trap = "setp.eq.u32 %p2, %r1, 0; @!%p2 bra G; trap; G: "
    assert pool(roles("setp.ge.u32 %p1, %r2, 128; " + trap)) == ((24, 240, 240), [])


def test_the_most_of_several_counts():
    again = f"{DEC} 24; bar.sync 1, 128; {INC} 64; bar.sync 1, 128; {DEC} 40; bra E;"
    body = f"setp.ge.u32 %p1, %r2, 128; @%p1 bra C; {again} C: {INC} 240; E: bar.sync 0;"
    register_count, wrong = pool(body)
    assert register_count == (64, 240, 240) and len(wrong) == 1
    assert pool(body.replace("240", "216")) == ((64, 216, 216), [])


@pytest.mark.parametrize(
    "split, threads",
    [
        ("setp.ge.u32 %p1, %r2, 96;", "0 to 127"),
        ("setp.ge.u32 %p1, %r2, 288;", "256 to 383"),
        ("and.b32 %r13, %r2, 1; setp.ne.u32 %p1, %r13, 0;", "128 to 255"),
    ],
)
def test_a_warpgroup_executes_the_same_setmaxnreg(split, threads):
    assert any(
        text.startswith(f"threads {threads} execute different setmaxnreg")
        for text in pool(roles(split))[1]
    )


@pytest.mark.parametrize("dec, inc, why", [(176, 240, "above the 168"), (24, 160, "below the 168")])
def test_the_direction_of_a_change(dec, inc, why):
    assert any(why in text for text in pool(roles(SPLITS[0], dec, inc))[1])


def test_guards_and_places_without_bounds():
    guarded = f"setp.ge.u32 %p1, %r2, 128; @!%p1 {DEC} 24; @%p1 {INC} 240;"
    assert pool(guarded) == ((24, 240, 240), [])
    assert pool(f"setp.ge.u32 %p1, %r1, 128; @%p1 {DEC} 24;")[0] == (168, 168, 168)
    for bounds in ("", ".maxntid 384"):
        register_count, wrong = pool(roles(SPLITS[0]), bounds=bounds)
        assert register_count is None and "without .reqntid" in wrong[0]


# PTX, SASS and the cubin together.

SASS = ("USETMAXREG.DEALLOC.CTAPOOL 0x18", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0")


def checked(code=SASS, body=None, registers=168):
    module = [function(roles(SPLITS[0]) if body is None else body, THREADS, "k")]
    pools, wrong = register_pools(
        module, sass.parse(listing(*code, name="k")), elf(registers, 0, 0)
    )
    return pools, [f.text for f in wrong]


def test_registers_come_from_the_cubin_and_counts_are_looked_for_in_sass():
    assert checked() == ([RegisterPool(384, 168, (24, 240, 240))], [])
    assert len(checked(registers=160)[1]) == 1
    assert checked(body="bar.sync 0;") == ([], [])


@pytest.mark.parametrize(
    "code, missing",
    [
        (("NOP",), 2),
        (SASS[:1], 1),
        ((SASS[0], SASS[1].replace("0xf0", "0xe8")), 1),
        ((SASS[0].replace("DEALLOC", "TRY_ALLOC"), SASS[1]), 1),
    ],
)
def test_what_ptxas_leaves_out_is_found(code, missing):
    texts = checked(code)[1]
    assert len(texts) == missing
    assert all("not in SASS" in text for text in texts)


# Compiled kernels and mutants of them.

PLAIN = Expect(mma=None, max_registers=168)


@functools.cache
def made(*args):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from tests.verify import kernels

    try:
        sass.nvdisasm()
    except sass.CertificateError as error:
        pytest.skip(str(error))
    return sass.artefacts(lambda: kernels.compile_roles(*args))


@pytest.mark.parametrize("dec, inc", [(24, 240), pytest.param(40, 232, marks=pytest.mark.nightly)])
def test_compiled_roles_that_fit(dec, inc):
    out = certificate(made(dec, inc), name="roles", constexpr={}, kind="A", expect=PLAIN)
    assert out.ok, out.findings
    assert out.register_pool == RegisterPool(384, 168, (dec, inc, inc))
    assert out.to_dict()["register_pool"] == {
        "threads": 384,
        "start": 168,
        "held": (dec, inc, inc),
    }
    assert f"{dec}+{inc}+{inc}" in list(tables([out])[0].columns[2].cells)


@pytest.mark.parametrize("dec, inc", [(32, 240), pytest.param(48, 232, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", [check_a, check_b])
def test_compiled_roles_that_do_not_fit(dec, inc, check):
    texts = [f.text for f in check(made(dec, inc), PLAIN) if f.rule == "R6"]
    assert len(texts) == 1 and f"{dec} + {inc} + {inc} registers per thread" in texts[0]


def test_ptxas_drops_setmaxnreg_without_a_minimum_of_ctas():
    texts = [f.text for f in check_a(made(24, 240, 0), PLAIN) if f.rule == "R6"]
    assert sum("not in SASS" in text for text in texts) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_attention_with_too_many_registers(monkeypatch, direction):
    """What once hung an H200: 32 + 240 + 240 registers of 3 x 168."""
    from ptxsim import skips

    kernel = skips.import_module(f"cute_kernels.sparse_attn.kernel_{direction}_sm90")
    from cute_kernels.about import catalogue
    from tests import certified

    name = f"sparse_attn_{direction}_sm90"
    entry, kind, expect = next(e for e in catalogue() if e[0].name == name and e[1])
    if direction == "fwd":
        # Two consumers, as at D = 128; three have another split.
        size = ("head_dim", 128)
        entry, kind, expect = next(
            e for e in catalogue() if e[0].name == name and size in e[0].constexpr
        )
        monkeypatch.setitem(kernel.PRODUCER_REGISTERS, 2, 32)
        monkeypatch.setitem(kernel.CONSUMER_REGISTERS, 2, 240)
    else:
        monkeypatch.setattr(kernel, "PRODUCER_REGISTERS", 32)
        monkeypatch.setattr(kernel, "CONSUMER_REGISTERS", 240)
    out = certified.certify(entry, kind, expect)
    texts = [f.text for f in out.findings if f.rule == "R6"]
    assert len(texts) == 1 and "32 + 240 + 240 registers per thread" in texts[0]
