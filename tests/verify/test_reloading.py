"""R8 and the simulator on compiled kernels whose operand A is overwritten while it is multiplied.

In the small kernel the fault is the compiler's: its source copies to the operand after the wait.
In the attention forward the mutant rounds P for the next product before the wait for this one.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import ptxsim
from ptxsim import skips
from tests import contract

skips.import_module("verify.certificate")
reloading = skips.import_module("tests.verify.reloading")

from cute_kernels.compile.kernel import Expect  # noqa: E402
from cute_kernels.schedulers import BlockMask  # noqa: E402
from cute_kernels.sparse_attn import launch  # noqa: E402
from cute_kernels.sparse_attn.config import configure_forward  # noqa: E402
from ptxsim import modes  # noqa: E402
from ptxsim.tests.wgmma import register_operand  # noqa: E402
from tests import certified  # noqa: E402
from tests.kernels.edited import changed  # noqa: E402
from tests.sparse_attn.simulated_fwd import case, run, same  # noqa: E402
from verify import certificate  # noqa: E402

RIGHT, FAULTY = reloading.WHEN
CONFIG = configure_forward("bf16", 64, "none")


def certify(when: str):
    def build():
        reloading.compile_reloading(when)

    expect = Expect(max_registers=128, max_shared=None, mma="64x16x16", pdl=False)
    return certificate.certify(build, name="k", constexpr={}, kind="A", expect=expect)


def test_the_right_order_holds():
    assert certify(RIGHT).ok


def test_a_fragment_that_is_reloaded_before_the_wait_fails_r8_alone():
    """In the PTX, where the compiler loads to the operand, and so in the SASS."""
    found = certify(FAULTY).findings
    assert {f.rule for f in found} == {"R8"}, found
    assert all(", operand A of the WGMMA at " in f.text for f in found)
    assert {f.where.split(": ")[1].split()[0] for f in found} == {"PTX", "SASS"}


@functools.cache
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A as fragments, B, and A Bᵀ of small integers, which is exact."""
    numbers = torch.Generator().manual_seed(3)
    a, b = (
        torch.randint(-4, 5, (rows, reloading.K), generator=numbers).bfloat16()
        for rows in (reloading.M, reloading.N)
    )
    bits = a.view(torch.int16).numpy().view(np.uint16)
    steps = [bits[:, first : first + 16] for first in range(0, reloading.K, 16)]
    fragments = [np.ascontiguousarray(register_operand(step)).view(np.int32) for step in steps]
    words = torch.from_numpy(np.stack(fragments).reshape(reloading.STEPS, 128, 4))
    return words, b, a.float() @ b.float().T


@functools.cache
def simulated(when: str):
    stream = {"use_tvm_ffi_env_stream": True}
    return reloading.compile_reloading(when, ptxsim.compile, **stream)


def multiply(when: str) -> torch.Tensor:
    a, b, want = operands()
    out = modes.poisoned(tuple(want.shape), torch.float32, "nan")
    simulated(when)(a, b, out)
    return out


@pytest.mark.sim
def test_every_mode_has_the_right_bytes():
    out = modes.run_modes(lambda: multiply(RIGHT), modes.QUICK_MODES)
    assert all(contract.same_bytes(result, operands()[2]) for result in out.values())


@pytest.mark.sim
@pytest.mark.parametrize("mode", ["late", "random"])
def test_an_operand_that_is_reloaded_early_shows(mode):
    """Immediate products have read A before it is overwritten: what the simulator once did."""
    with ptxsim.options(wgmma_mode="now"):
        assert contract.same_bytes(multiply(FAULTY), operands()[2])
    with ptxsim.options(wgmma_mode=mode):
        assert not contract.same_bytes(multiply(FAULTY), operands()[2])
    (warning,) = ptxsim.report()["warnings"]
    assert "registers of operand A were written before a wait that retires it: wgmma" in warning


WAIT = "            warpgroup.wait_group(0)\n            rings.v.consumer_release(held)\n"
ROUND = "            softmax.exponentiate(ctx.tSrS, ctx.row_sum, ctx.factor, ctx.shift, c)\n"
LATER = "            softmax.rescale(ctx.tOrO, ctx.factor)\n            self.round_p(ctx)\n"
COMMENT = "            # P_n = exp2(c (t_n - m_n)); l_n = l_{n-1} factor + Σ P_n; O *= factor\n"
EARLY = f"{ROUND}            self.round_p(ctx)\n{WAIT}"


@pytest.fixture
def rounds_early(tmp_path):
    """The forward's module with P of the next product in the registers of the last one's."""
    pieces = WAIT + COMMENT + ROUND + LATER, EARLY + LATER.splitlines(keepends=True)[0]
    return changed(tmp_path, "sparse_attn.kernel_fwd_sm90", *pieces)


@pytest.mark.nightly
def test_p_that_is_rounded_early_fails_r8(rounds_early):
    entry = launch.entry(CONFIG)
    (expect,) = (e for kernel, _, e in launch.catalogue() if kernel == entry)
    mutant = type(entry)(entry.name, entry.constexpr, lambda: rounds_early.build(CONFIG))
    found = certified.certify(mutant, "A", expect).findings
    assert any(f.rule == "R8" and "operand A" in f.text for f in found), found


@pytest.mark.sim
@pytest.mark.nightly
def test_p_that_is_rounded_early_shows(rounds_early):
    """Its bytes are right when products are immediate."""
    compiled = rounds_early.build(CONFIG, compile=ptxsim.compile)
    inputs = case(BlockMask.full(64, 600), (1, 1, 1, 64), seed=1)
    want = run(inputs)
    assert same(run(inputs, forward=lambda _: compiled), want)
    assert not same(run(inputs, forward=lambda _: compiled, wgmma_mode="late"), want)
    assert same(run(inputs, wgmma_mode="late"), want)
