"""The SM90 launchers on this CPU: their kernels compiled for sm_90a and run by tests/ptxsim.

Everything but the compile is the product's own code: copies, workspace, launches.  What a kernel is
to write starts poisoned.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from unittest import mock

from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from cute_kernels.sparse_attn.paged import launch as paged
from tests import ptxsim, sim


def forward_module(config):
    """The kernel that the launcher takes for a configuration."""
    return _module(launch.forward_entry(config))


def backward_module(config):
    """Module of the backward kernel of a configuration."""
    return _module(launch.backward_entry(config))


def _module(entry):
    name = entry.name.removeprefix("sparse_attn_")
    return importlib.import_module(f"{launch.__package__}.kernel_{name}")


@functools.cache
def forward_kernel(config):
    """One configuration, compiled once per process."""
    return forward_module(config).build(config, compile=ptxsim.compile)


@functools.cache
def pack_kernel(config):
    """What places sequences, likewise."""
    from cute_kernels.sparse_attn import kernel_varlen_tables_sm90

    return kernel_varlen_tables_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def pre_kernel(config):
    """The kernel before the backward, likewise."""
    from cute_kernels.sparse_attn import kernel_bwd_pre_sm90

    return kernel_bwd_pre_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def backward_kernel(config):
    """One backward, likewise."""
    return backward_module(config).build(config, compile=ptxsim.compile)


@functools.cache
def post_kernel(config):
    """The kernel after the backward, likewise."""
    from cute_kernels.sparse_attn import kernel_bwd_post_sm90

    return kernel_bwd_post_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def paged_kernel(config):
    """The kernel over paged caches, likewise."""
    from cute_kernels.sparse_attn import kernel_paged_sm90

    return kernel_paged_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def scores_kernel(config):
    """The first kernel of long contexts, likewise."""
    from cute_kernels.sparse_attn import kernel_paged_scores_sm90

    return kernel_paged_scores_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def values_kernel(config):
    """The second kernel of long contexts, likewise."""
    from cute_kernels.sparse_attn import kernel_paged_values_sm90

    return kernel_paged_values_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def buffer_scores_kernel(config):
    """The first kernel of long key buffers, likewise."""
    from cute_kernels.sparse_attn import kernel_buffer_scores_sm90

    return kernel_buffer_scores_sm90.build(config, compile=ptxsim.compile)


@functools.cache
def buffer_values_kernel(config):
    """The second kernel of long key buffers, likewise."""
    from cute_kernels.sparse_attn import kernel_buffer_values_sm90

    return kernel_buffer_values_sm90.build(config, compile=ptxsim.compile)


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

    Gives the list of the workspaces used so far.  ``ctas``: SMs; ``poison``: see `sim.poisoned`;
    None: plans allocate as they do on a card.  ``forward`` and so on: in place of the functions
    above.
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
        return lambda: sim.poisoned(shape, dtype, pattern)

    allocator = launch.allocator if poison is None else poisoned

    names = {
        "_pack_kernel": pack or pack_kernel,
        "forward_kernel": forward or forward_kernel,
        "_pre_kernel": pre or pre_kernel,
        "_backward_kernel": backward or backward_kernel,
        "_post_kernel": post or post_kernel,
        "most_ctas": lambda device: ctas,
        "allocator": allocator,
        "plan_workspace": plan_workspace,
    }
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(launch, name, value))
        both = {"most_ctas": lambda device: ctas, "allocator": allocator}
        of_paged = {
            "paged_kernel": paged_kernel,
            "scores_kernel": scores_kernel,
            "values_kernel": values_kernel,
        }
        for name, value in (of_paged | both).items():
            stack.enter_context(mock.patch.object(paged, name, value))
        of_buffer = {"scores_kernel": buffer_scores_kernel, "values_kernel": buffer_values_kernel}
        for name, value in (of_buffer | both).items():
            stack.enter_context(mock.patch.object(key_buffer, name, value))
        stack.enter_context(ptxsim.options(**options))
        yield used
