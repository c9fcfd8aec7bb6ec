"""The SM90 launcher of logp on this CPU: its kernels for sm_90a, run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import ptxsim
from cute_kernels.logp import launch, tiles
from tests import kernel_store


def _compiled(name: str) -> Callable:
    """Function that returns ``kernel_<name>_sm90`` of a configuration, compiled once."""
    module = f"cute_kernels.logp.kernel_{name}_sm90"
    return functools.cache(functools.partial(kernel_store.simulated, module))


forward, few, gradient, finish = map(_compiled, ("fwd", "few", "grad", "finish"))


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
    with contextlib.ExitStack() as stack:
        for (module, name), value in patches.items():
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(ptxsim.options(**options))
        yield
