"""Certificate A over the whole catalogue of gemm, the stored SASS hashes, and mutants that fail."""

from __future__ import annotations

import dataclasses

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")
kernel_sm90 = skips.import_module("cute_kernels.gemm.kernel_sm90")

from cute_kernels.compile.kernel import Expect  # noqa: E402
from cute_kernels.gemm import launch, tiles  # noqa: E402
from cute_kernels.gemm.tiles import Dense  # noqa: E402
from tests import certified  # noqa: E402
from tests.gemm import sm90_defects as mutants  # noqa: E402

CATALOGUE = [entry for entry in launch.catalogue() if entry.kind is not None]
EXPECT = Expect("64x256x16", max_registers=168, max_shared=232448)
NARROW = dataclasses.replace(EXPECT, mma="64x128x16")


def certify(kernel, kind: str = "A", expect: Expect = EXPECT):
    return certified.certify(kernel, kind, expect)


#: One configuration of each kernel is compiled for every commit.
SAMPLE = certified.first_of(CATALOGUE, lambda entry: entry.kernel.name)


@pytest.mark.parametrize(
    ("kernel", "kind", "expect"),
    list(certified.cases(CATALOGUE, lambda entry: entry.kernel in SAMPLE)),
)
def test_every_configuration(kernel, kind, expect):
    certificate = certified.read(kernel, kind, expect)
    assert certificate.ok, certificate.findings
    assert certificate.spills == 0 and certificate.stack == 0
    certified.check_stored(kernel, certificate)


def entry(epilogue: str, **changes):
    import torch

    kernel_config = launch.dense_config(torch.bfloat16, "k", "k", epilogue, Dense(256))
    kernel_config = dataclasses.replace(kernel_config, **changes)
    return launch.entry(kernel_config)


def atomic_store(monkeypatch, module):
    """Each value of the tile is also added to D[0, 0] by a floating-point atomic."""
    true_bias = module.GemmSm90.add_bias

    def add_bias(self, consumer, mBias, column0):
        true_bias(self, consumer, mBias, column0)
        word = module.cute.make_ptr(
            module.cutlass.Float32,
            mBias.iterator.toint(),
            module.cute.AddressSpace.gmem,
            assumed_align=4,
        )
        module.cute.arch.atomic_add(word, consumer.tCrC[0])

    monkeypatch.setattr(module.GemmSm90, "add_bias", add_bias)


def narrow_offsets(monkeypatch, module):
    """accumulate: row * stride in 32 bits."""

    def start_from(self, consumer, mD, row0, column0):
        stride = mD.stride[0].to(module.cutlass.Int32)
        offset = row0 * stride + column0
        source = module.cute.make_ptr(
            module.cutlass.Float32,
            mD.iterator.toint() + offset * 4,
            module.cute.AddressSpace.gmem,
            assumed_align=4,
        )
        consumer.tCrC.fill(module.cute.make_tensor(source, module.cute.make_layout(1))[0])

    monkeypatch.setattr(module.GemmSm90, "start_from", start_from)


def reads_the_clock(monkeypatch, module):
    true_bias = module.GemmSm90.add_bias

    def add_bias(self, consumer, mBias, column0):
        true_bias(self, consumer, mBias, column0)
        acc = consumer.tCrC
        acc[0] = acc[0] + module.cute.arch.clock().to(module.cutlass.Float32)

    monkeypatch.setattr(module.GemmSm90, "add_bias", add_bias)


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("mutant", "epilogue", "rule"),
    [
        (atomic_store, "bias", "A1"),
        (reads_the_clock, "bias", "A2"),
        (narrow_offsets, "accumulate", "R4"),
    ],
)
def test_mutants_fail_the_certificate(monkeypatch, mutant, epilogue, rule):
    with monkeypatch.context() as patch:
        mutant(patch, kernel_sm90)
        certificate = certify(entry(epilogue))
    assert rule in {finding.rule for finding in certificate.findings}


@pytest.mark.parametrize(
    "expect",
    [
        NARROW,
        dataclasses.replace(EXPECT, mma=None),
        dataclasses.replace(EXPECT, max_registers=167),
        dataclasses.replace(EXPECT, max_shared=230399),
    ],
)
def test_what_was_not_meant_fails(expect):
    certificate = certified.read(entry("plain"), "A", expect)
    assert {f.rule for f in certificate.findings} == {"R5"}


def test_each_width_has_its_instruction():
    """All tiles are certified, each for the matrix instruction of its own width and no other."""
    meant = {e.mma for kernel, _, e in CATALOGUE if kernel.name == "gemm_sm90"}
    assert meant == {f"64x{width}x16" for width in tiles.DENSE_COST}


@pytest.mark.mutants
@pytest.mark.parametrize(
    "mutant", [mutants.k_steps_swapped, mutants.no_wait_for_loads, mutants.tail_not_predicated]
)
def test_a_changed_order_changes_the_hash(monkeypatch, mutant):
    """What no rule names (K order, a wait of the pipeline) shows as other machine code."""
    stored_certificate = certified.stored(entry("plain"))
    with monkeypatch.context() as patch:
        mutant(patch, kernel_sm90)
        certificate = certify(entry("plain"))
    assert (
        stored_certificate["toolchain"] != certificate.toolchain
        or stored_certificate["sass_sha256"] != certificate.sass_sha256
    )
