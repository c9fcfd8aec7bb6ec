"""The SM90 launcher of logp on this CPU: its kernels for sm_90a, run by ptxsim."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import ptxsim
from cute_kernels.logp import launch, tiles
from tests import kernel_store
from tests.plans import patched


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
    launching = {"_few": few, "_forward": forward, "_gradient": gradient, "_finish": finish}
    launching["most_ctas"] = lambda device: 2 * clusters
    launching["max_clusters"] = lambda device: clusters
    choices = {"few": lambda *sizes: None} if wide else {}
    choices |= {} if runs is None else {"runs": lambda *sizes: runs}
    with patched(launch, **launching), patched(tiles, **choices), ptxsim.options(**options):
        yield
