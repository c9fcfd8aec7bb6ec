"""Certificate A of the forward: mutants that fail it, and the overlap it was written for.

The overlap is read from the machine code: ptxas may hoist the wait for P V up to that for S, and
then every product is waited for before the scores are looked at.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.ptxsim import available

available.import_module("cute_kernels.certify.certificate")
kernel = available.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90")

from cute_kernels.certify import sass  # noqa: E402
from cute_kernels.sparse_attn import launch, masks  # noqa: E402
from cute_kernels.sparse_attn.config import HEAD_DIMS, configure_forward  # noqa: E402
from tests import certified  # noqa: E402
from tests.sparse_attn import test_fwd_sm90_mutants as mutants  # noqa: E402

CATALOGUE = {kernel: expect for kernel, _, expect in launch.catalogue()}


def certify(config, wanted=None):
    entry = launch.forward_entry(config)
    return certified.certify(entry, "A", wanted or CATALOGUE[entry])


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


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("form", masks.FORMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_maxima_overlap_the_product(head_dim, form, softcap):
    """And before them the softcap; the exponentials fill the gaps behind the wait."""
    found = between_the_waits(artefacts(configure_forward("bf16", head_dim, form, softcap)))
    # Of each of a thread's 2 rows: 32 scores, the maximum so far, 2 steps over the other lanes.
    assert found["FMNMX"] == 2 * (31 + 1 + 2)
    assert found["MUFU.EX2"] >= 64 * softcap


def test_the_overlap_depends_on_the_wait_between(monkeypatch):
    """Without the wait for V before it, ptxas hoists the wait for P V."""
    with monkeypatch.context() as patch:
        mutants.no_wait_for(12)(patch, kernel)
        made = artefacts(configure_forward("fp16", 128, "bits"))
    assert between_the_waits(made)["FMNMX"] < 32


@pytest.mark.parametrize(
    "change",
    [{"mma": "64x128x16"}, {"mma": None}, {"max_registers": 127}, {"max_shared": 222207}],
)
def test_what_was_not_meant_fails(change):
    config = configure_forward("bf16", 64, "none")
    wanted = dataclasses.replace(CATALOGUE[launch.forward_entry(config)], **change)
    assert {f.rule for f in certify(config, wanted=wanted).findings} == {"R5"}


def atomic_add(monkeypatch, module):
    """Every read of the mask's words also adds to them by a floating-point atomic."""
    cute, cutlass, true_words = module.cute, module.cutlass, module.score_mask.words_of

    def words_of(tiles, *place):
        word = cute.make_ptr(
            cutlass.Float32, tiles.iterator.toint(), cute.AddressSpace.gmem, assumed_align=4
        )
        cute.arch.atomic_add(word, cutlass.Float32(1.0))
        return true_words(tiles, *place)

    monkeypatch.setattr(module.score_mask, "words_of", words_of)


def narrow_offsets(monkeypatch, module):
    """The bytes before a mask tile in 32 bits."""
    cute, cutlass = module.cute, module.cutlass

    def words_of(tiles, tile, row, first, count):
        address = tiles.iterator.toint() + (tile * 2048 + row * 16 + first * 4)
        source = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(source, cute.make_layout(count)).load()

    monkeypatch.setattr(module.score_mask, "words_of", words_of)


@pytest.mark.parametrize(("mutant", "rule"), [(atomic_add, "A1"), (narrow_offsets, "R4")])
def test_mutants_fail_the_certificate(monkeypatch, mutant, rule):
    config = configure_forward("bf16", 64, "bits")
    with monkeypatch.context() as patch:
        mutant(patch, kernel)
        found = certify(config)
    assert rule in {finding.rule for finding in found.findings}
