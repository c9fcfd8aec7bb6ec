"""R7 on the attention kernels: as shipped, and with products issued before registers are free.

The mutants are what happened: at D = 128 the backward issued dV before dS was formed, ptxas awaited
every product, and no value, spill or ceiling showed it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")
kernel = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")
forward = skips.import_module("cute_kernels.sparse_attn.kernel_fwd_sm90")

from cute_kernels.compile.kernel import Kernel  # noqa: E402
from cute_kernels.sparse_attn import config, launch  # noqa: E402
from tests import certified  # noqa: E402
from verify import ptx, sass  # noqa: E402
from verify.products import serialised  # noqa: E402

CHOSEN = config.configure("bf16", 128, "none", ordered=True)
ENTRY = launch.entry(CHOSEN)
(EXPECT,) = (e for k, _, e in launch.catalogue() if k == ENTRY)
INDENT = " " * 16
DV = f"{INDENT}mma.extend(sum_kv, rdV, tVrP, tVrO, state.index)\n"
AWAITED = f"{INDENT}warpgroup.wait_group(0)\n{INDENT}# dS ="


def findings(build) -> list[str]:
    out = sass.artefacts(build)
    return [found.text for found in serialised(ptx.parse(out.ptx), sass.parse(out.sass))]


def every_head_dim():
    """The certificates hold R7 too: every commit looks at kernels that are not proved."""
    names = "fwd", "fwd_no_overlap", "fwd_wide", "bwd", "bwd_wide"
    is_proved = all(certified.proved(f"sparse_attn_{name}_sm90") for name in names)
    for head_dim in config.HEAD_DIMS:
        yield pytest.param(head_dim, marks=pytest.mark.nightly if is_proved else ())


@pytest.mark.parametrize("head_dim", list(every_head_dim()))
def test_the_kernels_hold(head_dim):
    kernel_config = config.configure_forward("bf16", head_dim, "bits")
    assert findings(launch.entry(kernel_config).build) == []
    kernel_config = config.configure("bf16", head_dim, "bits", ordered=True)
    assert findings(launch.entry(kernel_config).build) == []


@pytest.fixture
def dv_first(tmp_path, monkeypatch):
    """The kernel's module with dV issued before dS is formed; dP alone is awaited before that."""
    source = Path(kernel.__file__).read_text()
    assert source.count(DV) == source.count(AWAITED) == 1
    early = DV + AWAITED.replace("wait_group(0)", "wait_group(1)")
    path = tmp_path / "kernel_bwd_dv_first.py"
    path.write_text(source.replace(DV, "").replace(AWAITED, early))
    name = "cute_kernels.sparse_attn.kernel_bwd_dv_first"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


# Of every commit: the mutant of the forward, below.
@pytest.mark.nightly
def test_dv_before_ds_fails_nothing_but_r7(dv_first):
    mutant = Kernel(ENTRY.name, ENTRY.constexpr, lambda: dv_first.build(CHOSEN))
    certificate = certified.certify(mutant, "B", EXPECT)
    assert {f.rule for f in certificate.findings} == {"R7"}, certificate.findings
    assert certificate.findings[0].text.startswith("64 batches of 64 products, 10 of 64 in the PTX")


def test_an_accumulator_that_is_not_awaited_fails(monkeypatch):
    """Of the forward: ptxas puts waits of its own where the source has none."""
    monkeypatch.setattr(forward.warpgroup, "wait_group", lambda count: None)
    *_, why = findings(lambda: forward.build(config.configure_forward("bf16", 128, "band")))
    assert why.endswith("waits of 32 products, 0 of 32 in the PTX: ptxas has serialised WGMMA")
