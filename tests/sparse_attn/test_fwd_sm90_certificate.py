"""Certificate A of the forward: mutants that fail it, and the overlap it was written for.

The overlap is read from the machine code: ptxas may hoist the wait for P V up to that for S, and
then every product is waited for before the scores are looked at.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")
kernel = skips.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90")

from cute_kernels.sparse_attn import launch, masks  # noqa: E402
from cute_kernels.sparse_attn.config import (  # noqa: E402
    HEAD_DIMS,
    VARLEN_FORM,
    configure_forward,
)
from tests import certified  # noqa: E402
from tests.sparse_attn.waits import no_wait_for  # noqa: E402
from verify import sass  # noqa: E402

#: Not simulated, but as costly, and proved by the same digests.
#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_the_maxima_overlap_the_product test_mutants_fail_the_certificate"
pytestmark = pytest.mark.simulates("sparse_attn", often=EACH_COMMIT)
CATALOGUE = {kernel: expect for kernel, _, expect in launch.catalogue()}
OVERLAPPED = [d for d in HEAD_DIMS if not configure_forward("bf16", d, "none").no_overlap]


def certify(config):
    entry = launch.entry(config)
    return certified.certify(entry, "A", CATALOGUE[entry])


def artefacts(config):
    return sass.artefacts(lambda: kernel.build(config))


def between_the_waits(made) -> dict[str, int]:
    """How many maxima and ex2 the loop takes after S has come and before the wait for P V."""
    (function,) = sass.parse(made.sass)
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
    """For every commit each head size, form and softcap once, or all if the kernel changed."""
    is_proved = certified.proved("sparse_attn_fwd_sm90")
    often = {(64, "band", True), (128, "bits", False)}
    for chosen in itertools.product(OVERLAPPED, masks.FORMS, (False, True)):
        marks = pytest.mark.nightly if is_proved and chosen not in often else ()
        yield pytest.param(*chosen, marks=marks)


@pytest.mark.parametrize(("head_dim", "form", "softcap"), list(every_forward()))
def test_the_maxima_overlap_the_product(head_dim, form, softcap):
    """And before them the softcap; the exponentials fill the gaps behind the wait."""
    overlap(configure_forward("bf16", head_dim, form, softcap))


@pytest.mark.parametrize("head_dim", OVERLAPPED)
@pytest.mark.parametrize("softcap", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_maxima_of_packs_overlap_the_product(head_dim, softcap):
    overlap(configure_forward("bf16", head_dim, VARLEN_FORM, softcap, packed=True))


def overlap(config):
    out = between_the_waits(certified.compiled(launch.entry(config)))
    # Of each of a thread's 2 rows: 32 scores, the maximum so far, 2 steps over the other lanes.
    assert out["FMNMX"] == 2 * (31 + 1 + 2)
    assert out["MUFU.EX2"] >= 64 * config.softcap


def test_the_overlap_depends_on_the_wait_between(monkeypatch):
    """Without the wait for V before it, ptxas hoists the wait for P V."""
    with monkeypatch.context() as patch:
        no_wait_for(12)(patch, kernel)
        out = artefacts(configure_forward("fp16", 128, "bits"))
    assert between_the_waits(out)["FMNMX"] < 32


@pytest.mark.parametrize(
    "change",
    [{"mma": "64x128x16"}, {"mma": None}, {"max_registers": 127}, {"max_shared": 222207}],
)
def test_what_was_not_meant_fails(change):
    config = configure_forward("bf16", 64, "none")
    entry = launch.entry(config)
    wanted = dataclasses.replace(CATALOGUE[entry], **change)
    assert {f.rule for f in certified.read(entry, "A", wanted).findings} == {"R5"}


def atomic_add(monkeypatch, module):
    """Every read of the mask's words also adds to them by a floating-point atomic."""
    cute, cutlass, true_words = module.cute, module.cutlass, module.mask.words_of

    def words_of(tiles, *place):
        word = cute.make_ptr(
            cutlass.Float32, tiles.iterator.toint(), cute.AddressSpace.gmem, assumed_align=4
        )
        cute.arch.atomic_add(word, cutlass.Float32(1.0))
        return true_words(tiles, *place)

    monkeypatch.setattr(module.mask, "words_of", words_of)


def narrow_offsets(monkeypatch, module):
    """The bytes before a mask tile in 32 bits."""
    cute, cutlass = module.cute, module.cutlass

    def words_of(tiles, tile, row, first, count):
        address = tiles.iterator.toint() + (tile * 2048 + row * 16 + first * 4)
        source = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(source, cute.make_layout(count)).load()

    monkeypatch.setattr(module.mask, "words_of", words_of)


@pytest.mark.mutants
@pytest.mark.parametrize(("mutant", "rule"), [(atomic_add, "A1"), (narrow_offsets, "R4")])
def test_mutants_fail_the_certificate(monkeypatch, mutant, rule):
    config = configure_forward("bf16", 64, "bits")
    with monkeypatch.context() as patch:
        mutant(patch, kernel)
        certificate = certify(config)
    assert rule in {finding.rule for finding in certificate.findings}
