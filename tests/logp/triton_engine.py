"""Runner of the Triton linear_logp."""

from __future__ import annotations

import cute_kernels.logp.triton as package
from cute_kernels.cpu import ieee
from tests import triton_in_numpy
from tests.triton_runner import Runner


def _exponentials_of_the_cpu(monkeypatch) -> None:
    triton_in_numpy.power_of_two(monkeypatch, ieee.exp2)


#: In the interpreter 2^y is the CPU backend's, and so are the bytes of states.
RUNNER = Runner(
    package,
    {
        **dict.fromkeys(("states_kernel", "gradients_kernel", "scale_kernel"), ("out_ptr",)),
        "finish_kernel": ("logp_ptr", "lse2_ptr", "entropy_ptr"),
    },
    arithmetic=(triton_in_numpy.round_as_gpus_do, _exponentials_of_the_cpu),
)
RUNNERS = (RUNNER,)
