"""Certificate A of the forward: ceilings, mutants that fail, and the overlap it was written for.

The overlap is read from the machine code: ptxas may hoist the wait for P V above the softmax, and
then every product is waited for before any exponential is taken.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.ptxsim import available

certificate = available.import_module("cute_kernels.compile.certificate")
kernel = available.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90")

from cute_kernels.compile import sass  # noqa: E402
from cute_kernels.compile.certificate_report import Expect  # noqa: E402
from tests.sparse_attn import test_fwd_sm90_mutants as mutants  # noqa: E402

#: Bytes of shared memory by head size: Q, two stages of K and V, O, barriers, alignment.
SHARED = {64: 99328, 96: 148480, 128: 197632}
CONFIGS = [
    *(kernel.Config("bf16", d, form) for d, form in itertools.product(SHARED, kernel.FORMS)),
    *(kernel.Config("bf16", 128, form, softcap=True) for form in kernel.FORMS),
    *(kernel.Config("fp16", 128, form) for form in kernel.FORMS),
]


def expect(config) -> Expect:
    """168 registers are all that 384 threads can start with; the roles then trade theirs."""
    products = ("64x128x16", f"64x{config.head_dim}x16")
    return Expect(products, max_registers=168, max_shared=SHARED[config.head_dim])


def artefacts(config):
    return sass.artefacts(lambda: kernel.build(config))


def certify(config, made=None, wanted=None):
    return certificate.certificate(
        made or artefacts(config),
        name="block_sparse_attention_fwd_sm90",
        constexpr=dict(config.items()),
        kind="A",
        expect=wanted or expect(config),
    )


def exponentials_between_the_waits(made) -> int:
    """How many ex2 the loop takes after S has come and before the wait for P V."""
    (function,) = sass.parse(made.sass)
    counts, open_products = [], 0
    for instruction in function.instructions:
        text = instruction.text
        if "WARPGROUP.DEPBAR" in text:
            open_products = int(text.split(",")[1].strip(" ;"), 16)
            if open_products:
                counts.append(0)
        elif "MUFU.EX2" in text and open_products:
            counts[-1] += 1
    assert len(counts) == 1, "one loop"
    return counts[0]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.dtype}-{c.head_dim}-{c.form}-{c.softcap}"
)
def test_configurations(config):
    made = artefacts(config)
    found = certify(config, made)
    assert found.ok, found.findings
    assert found.spills == 0 and found.stack == 0
    # 64 rows x 128 keys over 128 threads; a softcap takes another each.
    assert exponentials_between_the_waits(made) >= 64 * (1 + config.softcap)


def test_the_overlap_depends_on_the_wait_between(monkeypatch):
    """Without the wait for V before it, ptxas hoists the wait for P V."""
    with monkeypatch.context() as patch:
        mutants.no_wait_for(5)(patch, kernel)
        made = artefacts(CONFIGS[-1])
    assert exponentials_between_the_waits(made) < 32


@pytest.mark.parametrize(
    "change",
    [{"mma": "64x128x16"}, {"mma": None}, {"max_registers": 167}, {"max_shared": 99327}],
)
def test_what_was_not_meant_fails(change):
    config = kernel.Config("bf16", 64, "none")
    wanted = dataclasses.replace(expect(config), **change)
    assert {f.rule for f in certify(config, wanted=wanted).findings} == {"R5"}


def atomic_add(monkeypatch, module):
    """Every read of the mask's words also adds to them by a floating-point atomic."""
    cute, cutlass, true_four = module.cute, module.cutlass, module.four

    def four(words, tile, row):
        word = cute.make_ptr(
            cutlass.Float32, words.iterator.toint(), cute.AddressSpace.gmem, assumed_align=4
        )
        cute.arch.atomic_add(word, cutlass.Float32(1.0))
        return true_four(words, tile, row)

    monkeypatch.setattr(module, "four", four)


def narrow_offsets(monkeypatch, module):
    """The bytes before a mask tile in 32 bits."""
    cute, cutlass = module.cute, module.cutlass

    def four(words, tile, row):
        address = words.iterator.toint() + (tile * 2048 + row * 16)
        source = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(source, cute.make_layout(4)).load()

    monkeypatch.setattr(module, "four", four)


@pytest.mark.parametrize(("mutant", "rule"), [(atomic_add, "A1"), (narrow_offsets, "R4")])
def test_mutants_fail_the_certificate(monkeypatch, mutant, rule):
    config = kernel.Config("bf16", 64, "bits")
    with monkeypatch.context() as patch:
        mutant(patch, kernel)
        found = certify(config)
    assert rule in {finding.rule for finding in found.findings}
