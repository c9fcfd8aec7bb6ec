"""Certificates of the attention kernels: every one that can be asked for, and what fails them.

An unordered backward is claimed no certificate for: it must break the rules of the turns, and no
other.  The overlap of the forward is read from the machine code: ptxas may hoist the wait for P V
up to that for S, and then every product is waited for before the scores are looked at.  R7 fails
where products are issued before registers are free: at D = 128 the backward issued dV before dS was
formed, ptxas awaited every product, and no value, spill or ceiling showed it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")

from cute_kernels.sparse_attn import (  # noqa: E402
    config,
    kernel_bwd_sm90,
    kernel_fwd_sm90,
    launch,
    masks,
)
from tests import certified  # noqa: E402
from tests.sparse_attn import mutated, test_bwd_sm90_mutants, test_fwd_sm90_mutants  # noqa: E402
from tests.sparse_attn.test_bwd_sm90_mutants import LOOP, RELEASE, SEEN  # noqa: E402
from verify import certificate, ptx, sass  # noqa: E402
from verify.products import serialised  # noqa: E402

NIGHT = pytest.mark.nightly
CATALOGUE = list(launch.catalogue())
EXPECT = {entry.kernel: entry.expect for entry in CATALOGUE}
NAMES = ("fwd", "fwd_no_overlap", "fwd_wide", "bwd", "bwd_wide")
IS_PROVED = all(certified.proved(f"sparse_attn_{name}_sm90") for name in NAMES)
#: Mark of what proved kernels leave to the nightly run; of nothing if one changed.
LEFT = NIGHT if IS_PROVED else pytest.mark.skipif(False, reason="a kernel changed")
#: One of each class: every commit compiles them, once for all tests of intact kernels.
SAMPLE = certified.first_of((e for e in CATALOGUE if e.kind), lambda entry: entry.kind)
BACKWARD = config.configure("bf16", 128, "band", ordered=True)
FORWARD = config.configure_forward("bf16", 64, "bits")
OVERLAPPED = [
    d for d in config.HEAD_DIMS if not config.configure_forward("bf16", d, "none").no_overlap
]


@pytest.mark.parametrize(
    ("kernel", "kind", "expect"),
    list(certified.cases(CATALOGUE, lambda entry: entry.kernel in SAMPLE)),
)
def test_every_configuration(kernel, kind, expect):
    proof = certified.read(kernel, kind or "B", expect)
    assert proof.spills == 0 and proof.stack == 0
    if kind is None:
        rules = {finding.rule for finding in proof.findings}
        assert {"R1", "R2"} <= rules <= {"R1", "R2", "A1"}, proof.findings
        return
    assert proof.ok, proof.findings
    certified.check_stored(kernel, proof)


#: With 48 it is a mutant, as tests/verify/test_registers.py has one at every commit.
@pytest.mark.parametrize("producer", [None, pytest.param(48, marks=NIGHT)])
@pytest.mark.parametrize("module", [pytest.param(kernel_fwd_sm90, marks=NIGHT), kernel_bwd_sm90])
def test_the_roles_registers_fit_in_those_of_the_launch(monkeypatch, module, producer):
    """What the consumers take beyond what the producer gave back, they would wait for in vain."""
    name = f"sparse_attn_{module.__name__.split('kernel_')[1]}"
    kernel = next(kernel for kernel in SAMPLE if kernel.name == name)
    # The forward's are by consumers.
    consumers = dict(kernel.constexpr).get("consumers", 2)
    if producer is not None:
        by = {consumers: producer} if module is kernel_fwd_sm90 else producer
        monkeypatch.setattr(module, "PRODUCER_REGISTERS", by)
    out = sass.artefacts(kernel.build) if producer else certified.compiled(kernel)
    least, most = map(int, re.findall(r"setmaxnreg\S+\s+(\d+)", out.ptx))
    (usage,) = sass.usage(out.cubin).values()
    assert least < usage.registers < most
    held = least + consumers * most
    assert (held <= (1 + consumers) * usage.registers) == (producer is None)


def test_the_catalogue_has_each_kernel_once():
    assert len(EXPECT) == len(CATALOGUE) == 742


# ---- the overlap of the forward -----------------------------------------------------------------


def between_the_waits(artefacts) -> dict[str, int]:
    """How many maxima and ex2 the loop takes after S has come and before the wait for P V."""
    (function,) = sass.parse(artefacts.sass)
    counts, open_products = [], 0
    for instruction in function.instructions:
        text = instruction.text
        if "WARPGROUP.DEPBAR" in text:
            open_products = int(text.split(",")[1].strip(" ;"), 16)
            if open_products:
                counts.append(dict.fromkeys(("FMNMX", "MUFU.EX2"), 0))
        elif open_products:
            for name in counts[-1]:
                counts[-1][name] += name in text
    assert len(counts) == 1, "one loop"
    return counts[0]


def every_forward():
    """(head size, form, softcap, packed): that of `SAMPLE` for every commit."""
    forms = (*((form, False) for form in masks.FORMS), (config.VARLEN_FORM, True))
    for dim, softcap, (form, packed) in itertools.product(OVERLAPPED, (False, True), forms):
        night = NIGHT if packed and softcap else LEFT
        often = (dim, form, softcap) == (64, "none", False)
        yield pytest.param(dim, form, softcap, packed, marks=() if often else night)


@pytest.mark.parametrize(("head_dim", "form", "softcap", "packed"), list(every_forward()))
def test_the_maxima_overlap_the_product(head_dim, form, softcap, packed):
    """And before them the softcap; the exponentials fill the gaps behind the wait."""
    chosen = config.configure_forward("bf16", head_dim, form, softcap, packed=packed)
    out = between_the_waits(certified.compiled(launch.entry(chosen)))
    # Of each of a thread's 2 rows: 32 scores, the maximum so far, 2 steps over the other lanes.
    assert out["FMNMX"] == 2 * (31 + 1 + 2)
    assert out["MUFU.EX2"] >= 64 * softcap


@NIGHT
def test_the_overlap_depends_on_the_wait_between(tmp_path):
    """Without the wait for V before it, ptxas hoists the wait for P V."""
    _, *pieces = test_fwd_sm90_mutants.MUTANTS["V not awaited: kernel_fwd_sm90"]
    entry = mutated.entry(tmp_path, config.configure_forward("fp16", 128, "bits"), *pieces)
    assert between_the_waits(sass.artefacts(entry.build))["FMNMX"] < 32


@pytest.mark.parametrize(
    "change",
    [{"mma": "64x128x16"}, {"mma": None}, {"max_registers": 127}, {"max_shared": 222207}],
)
def test_what_was_not_meant_fails(change):
    entry = launch.entry(config.configure_forward("bf16", 64, "none"))
    wanted = dataclasses.replace(EXPECT[entry], **change)
    assert {f.rule for f in certified.read(entry, "A", wanted).findings} == {"R5"}


# ---- R7 ------------------------------------------------------------------------------------------


def findings(build) -> list[str]:
    out = sass.artefacts(build)
    return [one.text for one in serialised(ptx.parse(out.ptx), sass.parse(out.sass))]


@pytest.mark.parametrize("head_dim", [pytest.param(d, marks=LEFT) for d in config.HEAD_DIMS])
def test_products_are_not_serialised(head_dim):
    """The certificates hold R7 too: every commit looks at kernels that are not proved."""
    forward = config.configure_forward("bf16", head_dim, "bits")
    for chosen in (forward, config.configure("bf16", head_dim, "bits", ordered=True)):
        assert findings(launch.entry(chosen).build) == []


@NIGHT
def test_dv_before_ds_fails_nothing_but_r7(tmp_path):
    """dP alone is awaited before dS is formed."""
    indent = 16 * " "
    dv = f"{indent}mma.extend(sum_kv, rdV, tVrP, tVrO, state.index)\n"
    awaited = f"{indent}warpgroup.wait_group({{}})\n{indent}# dS ="
    pieces = dv, "", awaited.format(0), dv + awaited.format(1)
    chosen = config.configure("bf16", 128, "none", ordered=True)
    mutant = mutated.entry(tmp_path, chosen, "sparse_attn.kernel_bwd_sm90", *pieces)
    complaints = certified.certify(mutant, "B", EXPECT[launch.entry(chosen)]).findings
    assert {f.rule for f in complaints} == {"R7"}, complaints
    assert complaints[0].text.startswith("64 batches of 64 products, 10 of 64 in the PTX")


@LEFT
def test_an_accumulator_that_is_not_awaited_fails(monkeypatch):
    """Of the forward: ptxas puts waits of its own where the source has none."""
    monkeypatch.setattr(kernel_fwd_sm90.warpgroup, "wait_group", lambda count: None)
    chosen = config.configure_forward("bf16", 128, "band")
    *_, why = findings(lambda: kernel_fwd_sm90.build(chosen))
    assert why.endswith("waits of 32 products, 0 of 32 in the PTX: ptxas has serialised WGMMA")


# ---- mutants -------------------------------------------------------------------------------------

TURNSTILE, KERNEL, MASK = "dsl.turnstile", "sparse_attn.kernel_bwd_sm90", "sparse_attn.device.mask"
_SPIN, _RED, _GPU = f"    {SEEN}{LOOP}", f"    {RELEASE}", 'sem="release", scope="gpu"'
_OFFSET = "(cutlass.Int64(tile) * mWords.shape[1] + row) * WORDS + first\n"
_PLACE = "mWords.iterator.toint(), cute.AddressSpace.gmem, assumed_align=4"
_WORD = f"cute.make_ptr(cutlass.Float32, {_PLACE})"
_ADD = "turnstile.add_or_store(target, sdQ, self.dq_size * 4, visit.rank, first_stores)\n"
_FINISH = "turnstile.finish_turn(mSemaphore.iterator + row)\n"
#: label -> (rule, module, a piece of its text, another, ..); of the backward's turns, then others.
MUTANTS: dict[str, tuple] = {
    label: (rule, *test_bwd_sm90_mutants.MUTANTS[f"{label}: turnstile"][1:])
    for label, rule in (
        ("landing is a read", "R2"),
        ("no release", "R2"),
        ("the turn not awaited", "R1"),
    )
} | {
    "not landed": ("R2", TURNSTILE, "cute.arch.cp_async_bulk_wait_group(0, read=False)", "pass"),
    "released before it landed": ("R2", TURNSTILE, f"    land()\n{_RED}", f"{_RED}\n    land()"),
    "released in the CTA": ("R2", TURNSTILE, _GPU, _GPU.replace("gpu", "cta")),
    "a relaxed release": ("R2", TURNSTILE, 'sem="release"', 'sem="relaxed"'),
    # Loads with acquire, and goes on whatever it saw.
    "one look": ("R1", TURNSTILE, LOOP, ""),
    "a relaxed spin": ("R1", TURNSTILE, _SPIN, _SPIN.replace("acquire", "relaxed")),
    "added after its turn": ("R1", KERNEL, _ADD, "pass\n", _FINISH, f"{_FINISH}{24 * ' '}{_ADD}"),
    "too few registers": ("R5", KERNEL, "CONSUMER_REGISTERS = 240", "CONSUMER_REGISTERS = 168"),
    "words added to by a floating-point atomic": (
        *(
            "A1",
            MASK,
            _OFFSET,
            f"{_OFFSET}    cute.arch.atomic_add({_WORD}, cutlass.Float32(1.0))\n",
        ),
    ),
    "words' places in 32 bits": ("R4", MASK, _OFFSET, _OFFSET.replace("cutlass.Int64", "")),
}
#: One of each rule, and the release that another CTA does not see.
OFTEN = ("not landed", "no release", "released in the CTA", "one look", "too few registers")


@pytest.mark.mutants
@pytest.mark.parametrize(
    "label",
    [pytest.param(m, marks=() if m in OFTEN or MUTANTS[m][1] == MASK else NIGHT) for m in MUTANTS],
)
def test_mutants_fail_the_certificate(tmp_path, label):
    rule, where, *pieces = MUTANTS[label]
    chosen, kind = (FORWARD, "A") if where == MASK else (BACKWARD, "B")
    mutant = mutated.entry(tmp_path, chosen, where, *pieces)
    complaints = certified.certify(mutant, kind, EXPECT[launch.entry(chosen)]).findings
    assert rule in {finding.rule for finding in complaints}, complaints


_WAIT = f"{12 * ' '}cute.arch.griddepcontrol_wait()\n"


@pytest.mark.parametrize(
    ("which", "new"),
    [
        pytest.param("bwd", f"{12 * ' '}pass\n", marks=LEFT),
        ("bwd_post", f"{12 * ' '}pass\n"),
        *(pytest.param(which, f"{_WAIT[:-1]}  #\n", marks=NIGHT) for which in ("bwd", "bwd_post")),
    ],
)
def test_a_dependent_kernel_that_does_not_wait_is_refused(tmp_path, which, new):
    """The simulator runs one kernel after the other; rule R3 of the certificates sees this."""
    chosen, check = config.configure("bf16", 64, "band", True), certificate.check_b
    if which == "bwd_post":
        chosen, check = launch.configs_around(chosen, False)[1], certificate.check_a
    mutant = mutated.entry(tmp_path, chosen, f"sparse_attn.kernel_{which}_sm90", _WAIT, new)
    complaints = check(sass.artefacts(mutant.build), EXPECT[launch.entry(chosen)])
    assert {f.rule for f in complaints} == (set() if "wait" in new else {"R3"})


@pytest.mark.parametrize("by_number", [False, pytest.param(True, marks=LEFT)])
def test_a_ticket_is_one_load_of_each_role(tmp_path, by_number):
    """Of the warp that loads, the thread that adds dQ, the consumers: all in the PTX."""
    chosen = config.configure("bf16", 64, "none", ordered=True)
    record = "record = copy.vector(self.ticket, (ticket, 0), FIELDS).load()\n"
    numbers = "return tuple({}[{}] for i in range(FIELDS))\n\n    def ends("
    pieces = (
        record + 8 * " " + numbers.format("record", "i"),
        numbers.format("self.ticket", "ticket, i"),
    )
    out = certified.compiled(launch.entry(chosen))
    if by_number:
        changed = mutated.entry(tmp_path, chosen, "sparse_attn.device.walk", *pieces)
        out = sass.artefacts(changed.build)
    loads = re.findall(r"ld\.global\.\S*", out.ptx)
    wide = [load for load in loads if ".v4." in load]
    # Besides, each role has one for its entries, and those that add and multiply one for ranks.
    assert (len(wide) == 3 and len(loads) == 2 * 3 + 2) is not by_number
