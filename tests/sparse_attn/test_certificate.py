"""The certificates of every attention kernel that can be asked for, and their stored SASS hashes.

An unordered backward is claimed no certificate for: it must break the rules of the turns, and no
other.
"""

from __future__ import annotations

import re

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")

from cute_kernels.sparse_attn import kernel_bwd_sm90, kernel_fwd_sm90, launch  # noqa: E402
from tests import certified  # noqa: E402
from verify import sass  # noqa: E402

CATALOGUE = list(launch.catalogue())


def sort_of(entry) -> tuple:
    """Each class, and a backward that adds in arrival order: every commit compiles one."""
    return entry.kind


SAMPLE = certified.first_of(CATALOGUE, sort_of)


@pytest.mark.parametrize(
    ("kernel", "kind", "expect"),
    list(certified.cases(CATALOGUE, lambda entry: entry.kernel in SAMPLE)),
)
def test_every_configuration(kernel, kind, expect):
    certificate = certified.read(kernel, kind or "B", expect)
    assert certificate.spills == 0 and certificate.stack == 0
    if kind is None:
        rules = {finding.rule for finding in certificate.findings}
        assert {"R1", "R2"} <= rules <= {"R1", "R2", "A1"}, certificate.findings
        return
    assert certificate.ok, certificate.findings
    certified.check_stored(kernel, certificate)


#: With 48 it is a mutant, as tests/verify/test_registers.py has one at every commit.
@pytest.mark.parametrize("producer", [None, pytest.param(48, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "module", [pytest.param(kernel_fwd_sm90, marks=pytest.mark.nightly), kernel_bwd_sm90]
)
def test_the_roles_registers_fit_in_those_of_the_launch(monkeypatch, module, producer):
    """What the consumers take beyond what the producer gave back, they would wait for in vain."""
    name = f"sparse_attn_{module.__name__.split('kernel_')[1]}"
    kernel = next(kernel for kernel, _, _ in launch.catalogue() if kernel.name == name)
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
    kernels = [kernel for kernel, _, _ in launch.catalogue()]
    assert len(set(kernels)) == len(kernels) == 742
