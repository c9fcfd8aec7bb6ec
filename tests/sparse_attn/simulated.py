"""The SM90 launchers on this CPU: their kernels compiled for sm_90a and run by ptxsim.

Everything but the compile is the product's own code: copies, workspace, launches.  What a kernel is
to write starts poisoned.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from torch import Tensor

import ptxsim
from cute_kernels.sparse_attn import config, launch
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from cute_kernels.sparse_attn.paged import launch as paged
from ptxsim import modes
from tests import kernel_store
from tests.contract import same_bytes
from tests.plans import patched


def widths(*often: int) -> list:
    """Head sizes: those of every commit if a kernel changed, and the others by night."""
    others = [d for d in config.HEAD_DIMS if d not in often]
    return [*often, *(pytest.param(d, marks=pytest.mark.nightly) for d in others)]


def module_of(chosen):
    """Module of the kernel that the launcher takes for a configuration."""
    name = launch.entry(chosen).name.removeprefix("sparse_attn_")
    return importlib.import_module(f"{launch.__package__}.kernel_{name}")


@functools.cache
def kernel(chosen):
    """One configuration, compiled once per process."""
    return kernel_store.simulated(module_of(chosen).__name__, chosen)


def compiling():
    """`kernel` that compiles anew, as modules are now."""
    return functools.cache(lambda chosen: module_of(chosen).build(chosen, compile=ptxsim.compile))


@contextlib.contextmanager
def simulated(
    ctas: int = 132,
    poison: str | None = "nan",
    pack=None,
    forward=None,
    pre=None,
    backward=None,
    post=None,
    **options,
) -> Iterator[list[launch.Workspace]]:
    """Inside, `launch.forward` and `launch.backward` take CPU tensors and run in the simulator.

    Gives the list of the workspaces used so far.  ``ctas``: SMs; ``poison``: see `modes.poisoned`;
    None: plans allocate as they do on a card.  ``forward`` and so on: in place of
    `kernel`.
    """
    used: list[launch.Workspace] = []
    true_plan = launch.plan_workspace

    def plan_workspace(*args):
        new = true_plan(*args)

        def new_poisoned() -> launch.Workspace:
            lse2, delta, total, semaphore, counter = new()
            semaphore.fill_(-77), counter.fill_(12345)
            used.append(launch.Workspace(lse2, delta, total, semaphore, counter))
            return used[-1]

        return new_poisoned

    def poisoned(shape, dtype, device):
        pattern = poison if dtype.is_floating_point else "0x7f"
        return lambda: modes.poisoned(shape, dtype, pattern)

    allocator = launch.allocator if poison is None else poisoned

    replaced = {
        config.VarlenTablesConfig: pack,
        config.ForwardConfig: forward,
        config.PreConfig: pre,
        config.BackwardConfig: backward,
        config.PostConfig: post,
    }
    names = {
        "kernel": lambda chosen: (replaced.get(type(chosen)) or kernel)(chosen),
        "most_ctas": lambda device: ctas,
        "allocator": allocator,
    }
    with (
        patched(launch, **names, plan_workspace=plan_workspace),
        patched(paged, **names),
        patched(key_buffer, allocator=allocator),
        ptxsim.options(**options),
    ):
        yield used


def is_right(run: Callable[[], Sequence[Tensor]], want: Sequence[Tensor], **options) -> bool:
    """Whether a run ends, with these bytes, no missing fence and no race in any launch."""
    ptxsim.clear_launches()
    try:
        with ptxsim.options(**options):
            got = run()
    except (ptxsim.PtxsimError, AssertionError):
        return False
    reports = [one["report"] for one in ptxsim.launches()]
    clean = not any(one["races"] or one["fence_warnings"]["count"] for one in reports)
    return clean and all(map(same_bytes, got, want))
