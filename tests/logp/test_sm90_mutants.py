"""Defects put into the SM90 kernels of logp on purpose: values or the simulator notice each one."""

from __future__ import annotations

import pytest

import ptxsim
from cute_kernels.logp import kernel_few_sm90, kernel_fwd_sm90, kernel_grad_sm90, launch
from ptxsim.modes import RACES
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels import ring_defects
from tests.kernels.edited import changed
from tests.kernels.ring_defects import (
    LIMITS,
    half_the_bytes,
    no_release,
    no_wait_for_empty_stages,
    released_before_read,
    wrong_phase,
)
from tests.logp import simulated as doubles
from tests.logp.simulated import simulated
from tests.logp.sm90_cases import (
    case,
    gradients_oracle,
    same_exp2,
    same_states,
    states_of,
    states_oracle,
)
from tests.logp.sm90_cases import upstream as upstream_of
from tests.logp.sm90_defects import (
    bins_not_lowered,
    exponent_rounded_up,
    lanes_do_not_meet,
    lse_left_out,
    neighbours_two_apart_first,
    nothing_chosen,
    one_warp_is_forgotten,
    padding_not_masked,
)

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_mutants_are_killed"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("logp", often=EACH_COMMIT)]

WIDE = launch.config_of("bf16", "chain", False, False, False)
FEW = next(c for c in launch.few_configs() if c.tile_m == 16)
#: Two warpgroups, of which one may still multiply when the other has its states.
FEW_OF_TWO = next(c for c in launch.few_configs() if c.tile_n == 128)
#: Kernel -> (its module, a configuration, the name of the launcher's getter, its double).
KERNELS = {
    "fwd": (kernel_fwd_sm90, WIDE, "_forward", doubles.forward),
    "few": (kernel_few_sm90, FEW, "_few", doubles.few),
    "few of two": (kernel_few_sm90, FEW_OF_TWO, "_few", doubles.few),
    "grad": (kernel_grad_sm90, WIDE, "_gradient", doubles.gradient),
}
SETTINGS = [*ring_defects.SETTINGS, *(mode.options for mode in RACES)]
#: Several tiles and D blocks; more of them than a ring has stages.
SHAPES = {
    "fwd": (130, 520, 328),
    "few": (13, 520, 712),
    "few of two": (90, 200, 192),
    "grad": (130, 520, 328),
}


def survives(which: str, kernel, monkeypatch) -> bool:
    """Whether every run under every setting is right; `kernel` is a compiled function."""
    _, chosen, getter, _ = KERNELS[which]
    given = case(chosen, *SHAPES[which])
    with same_exp2(monkeypatch):
        want = states_oracle(given, False)
        of = upstream_of(given, want[None], False)
        gradients = gradients_oracle(given, of)
    known = ~gradients.isnan()
    for options in SETTINGS:
        options = {"wgmma_math": "exact", "clusters": 1, **LIMITS, **options}
        try:
            with (
                monkeypatch.context() as patch,
                simulated(wide=which in ("fwd", "grad"), **options),
            ):
                patch.setattr(launch, getter, lambda chosen: kernel)
                if which == "grad":
                    got = launch.gradients(given.hidden, given.head, given.rows, of)
                else:
                    got = states_of(given, False)
        except ptxsim.PtxsimError:
            return False
        if ptxsim.report()["fence_warnings"]["count"] or ptxsim.report()["races"]:
            return False
        if which == "grad":
            if not contract.same_bytes(got[known], gradients[known]):
                return False
        elif not same_states(got, want):
            return False
    return True


MUTANTS = [
    (no_wait_for_empty_stages, "fwd"),
    (no_release, "few"),
    (wrong_phase, "fwd"),
    (half_the_bytes, "few"),
    (released_before_read, "fwd"),
    (neighbours_two_apart_first, "fwd"),
    (bins_not_lowered, "fwd"),
    (bins_not_lowered, "few"),
    (padding_not_masked, "fwd"),
    (padding_not_masked, "few"),
    (padding_not_masked, "grad"),
    (nothing_chosen, "fwd"),
    (nothing_chosen, "few"),
    (lanes_do_not_meet, "fwd"),
    (exponent_rounded_up, "few"),
    (one_warp_is_forgotten, "few"),
    (lse_left_out, "grad"),
]


@pytest.mark.parametrize("which", KERNELS)
def test_the_intact_kernel_survives(which, monkeypatch):
    _, chosen, _, double = KERNELS[which]
    assert survives(which, double(chosen), monkeypatch)


@pytest.mark.parametrize(("mutant", "which"), MUTANTS, ids=lambda x: getattr(x, "__name__", x))
def test_mutants_are_killed(mutant, which, monkeypatch):
    module, chosen, *_ = KERNELS[which]
    with monkeypatch.context() as patch:
        mutant(patch, module)
        kernel = module.build(chosen, compile=ptxsim.compile)
    assert not survives(which, kernel, monkeypatch)


#: Of the kernel for few tokens: states written over what the other warpgroup still multiplies;
#: states added before every warp has written its own.
MEETINGS = {
    "states over the ring": (
        "        self.sync_consumers()\n        column.store_warp",
        "        column.store_warp",
    ),
    "states of others not awaited": (
        "self.columns)\n        self.sync_consumers()\n",
        "self.columns)\n",
    ),
}


@pytest.mark.parametrize(
    ("name", "which"), [*((name, "few of two") for name in MEETINGS), (list(MEETINGS)[1], "few")]
)
def test_meetings_of_warps_are_needed(tmp_path, monkeypatch, name, which):
    made = changed(tmp_path, "logp.kernel_few_sm90", *MEETINGS[name])
    kernel = made.build(KERNELS[which][1], compile=ptxsim.compile)
    assert not survives(which, kernel, monkeypatch)
