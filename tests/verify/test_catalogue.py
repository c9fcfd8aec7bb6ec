"""Certificates of the systems that have no tests of their own for them, and the stored hashes."""

from __future__ import annotations

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")

from cute_kernels import about  # noqa: E402
from cute_kernels.systems import SYSTEMS  # noqa: E402
from tests import certified  # noqa: E402

ELSEWHERE = ("gemm_", "sparse_attn_")
CATALOGUE = [
    entry
    for entry in about.catalogue()
    if entry.kind is not None and not entry.kernel.name.startswith(ELSEWHERE)
]
#: Every commit compiles one kernel of each system, at least: of those that compile the fastest.
FAST = (
    "linear_attn_delta_sm90",
    "logp_finish_sm90",
    "mhc_sums_sm90",
    "moe_grouped_few_sm90",
    "norm_sums_sm90",
)
SAMPLE = certified.first_of(
    [entry for entry in CATALOGUE if entry.kernel.name in FAST], lambda entry: entry.kernel.name
)


@pytest.mark.parametrize(
    ("kernel", "kind", "expect"),
    list(certified.cases(CATALOGUE, lambda entry: entry.kernel in SAMPLE)),
)
def test_every_configuration(kernel, kind, expect):
    certificate = certified.certify(kernel, kind, expect)
    assert certificate.ok, certificate.findings
    certified.check_stored(kernel, certificate)


def test_every_system_with_kernels_is_tested():
    names = {entry.kernel.name for entry in CATALOGUE}
    prefixes = {f"{system.package}_" for system in SYSTEMS if system.launcher} - set(ELSEWHERE)
    for of in names, {kernel.name for kernel in SAMPLE}:
        assert {prefix for prefix in prefixes if any(n.startswith(prefix) for n in of)} == prefixes
    assert prefixes >= {"logp_", "mhc_", "norm_"} and len(names) >= 14
