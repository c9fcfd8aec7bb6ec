"""The SM90 launcher of logp on this CPU: its kernels for sm_90a, run by tests/ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from cute_kernels.logp import launch, tiles
from tests import ptxsim


@functools.cache
def forward(chosen):
    """The forward kernel, compiled once per process."""
    from cute_kernels.logp import kernel_fwd_sm90

    return kernel_fwd_sm90.build(chosen, compile=ptxsim.compile)


@functools.cache
def few(chosen):
    """The forward kernel for few tokens, likewise."""
    from cute_kernels.logp import kernel_few_sm90

    return kernel_few_sm90.build(chosen, compile=ptxsim.compile)


@functools.cache
def gradient(chosen):
    """The gradient kernel, likewise."""
    from cute_kernels.logp import kernel_grad_sm90

    return kernel_grad_sm90.build(chosen, compile=ptxsim.compile)


@functools.cache
def finish(chosen):
    """What states end in, likewise."""
    from cute_kernels.logp import kernel_finish_sm90

    return kernel_finish_sm90.build(chosen, compile=ptxsim.compile)


@contextlib.contextmanager
def simulated(
    clusters: int = 3, runs: int | None = None, wide: bool = True, **options
) -> Iterator[None]:
    """Inside, `launch`'s functions take CPU tensors and run in the simulator.

    ``runs``: of the vocabulary; None: the launcher's choice.  ``wide``: whether few tokens too take
    the wide tiles.  Others: of the simulator.
    """
    patches = {
        (launch, "_few"): few,
        (launch, "most_ctas"): lambda device: 2 * clusters,
        (launch, "_forward"): forward,
        (launch, "_gradient"): gradient,
        (launch, "_finish"): finish,
        (launch, "max_clusters"): lambda device: clusters,
    }
    if runs is not None:
        patches[(tiles, "runs")] = lambda *sizes: runs
    if wide:
        patches[(tiles, "few")] = lambda *sizes: None
    before = {(module, name): getattr(module, name) for module, name in patches}
    for (module, name), value in patches.items():
        setattr(module, name, value)
    try:
        with ptxsim.options(**options):
            yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
