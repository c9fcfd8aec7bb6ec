"""Host time of a patched Llama's training step, on a CPU, with SM90 kernels that do nothing.

    python -m perf.model.idle_host [--layers 8] [--steps 60] [--sort tottime] [--compile] [--ops]

Prints the CPU time of forward and backward; with ``--sort`` a profile of each instead, with
``--ops`` the time of each op that a compiled step calls, by ``torch.ops`` and by the dispatcher.
It says what the way to a launch costs, without the launch: compare two commits on one machine.  The
model is small, so that torch's own ops on a CPU cost little.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import tvm_ffi
from triton.runtime.jit import JITFunction

import cute_kernels as ck
from cute_kernels import arch
from cute_kernels.compile import cache
from cute_kernels.runtime import plan_cache

from . import llama

_GPU = arch.Device("cuda:0", "cuda", "sm_90a", 132)


class _Idle:
    """A Triton kernel, compiled or not: its launch does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Context in which CPU tensors count as those of an SM90 GPU, and kernels do nothing."""
    nothing = tvm_ffi.get_global_func("testing.nop")
    idle = _Idle()
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (arch, "describe", lambda device: _GPU),
            # Spans and token ids stay on the CPU.
            (plan_cache, "on_gpu", lambda t: t.dtype != torch.int32),
            (cache, "get", lambda *args, **options: nothing),
            (JITFunction, "__getitem__", lambda self, grid: idle[grid]),
            (JITFunction, "warmup", lambda self, *args, **options: idle),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def step(net: torch.nn.Module, ids: torch.Tensor, profiles=(None, None)) -> tuple[float, float]:
    """CPU milliseconds of forward and of backward."""
    ends = [time.process_time()]
    with profiles[0] or contextlib.nullcontext():
        loss = net(ids, labels=ids, use_cache=False).loss
    ends.append(time.process_time())
    with profiles[1] or contextlib.nullcontext():
        loss.backward()
    ends.append(time.process_time())
    net.zero_grad(set_to_none=True)
    return tuple(1e3 * (b - a) for a, b in itertools.pairwise(ends))


def recorded(run: Callable[[], object]) -> dict[torch._ops.OpOverload, list[tuple]]:
    """The arguments of each call of an op of ours that ``run`` makes by ``torch.ops``."""
    calls: dict[torch._ops.OpOverload, list[tuple]] = {}
    with contextlib.ExitStack() as stack:
        for name in dir(torch.ops.cute_kernels):
            packet = getattr(torch.ops.cute_kernels, name)
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue
            op = packet.default
            if type(op) is torch._ops.OpOverload:
                continue  # one that writes an argument

            def record(*args, op=op):
                calls.setdefault(op, []).append(args)
                return op._op(*args)

            changed = mock.patch.object(type(op), "__call__", staticmethod(record), create=True)
            stack.enter_context(changed)
        run()
    return calls


def microseconds(call: Callable[[], object], turns: int = 30, calls: int = 300) -> float:
    """CPU time of a call: the least of the turns."""
    least = float("inf")
    for _ in range(turns):
        start = time.process_time()
        for _ in range(calls):
            call()
        least = min(least, time.process_time() - start)
    return 1e6 * least / calls


def print_ops(run: Callable[[], object]) -> None:
    """Print the time of the last call of each op, and how many there are."""
    recordings = recorded(run)
    with torch.no_grad():
        for op, calls in recordings.items():
            args = calls[-1]
            direct, by_dispatcher = (
                microseconds(functools.partial(way, *args)) for way in (op, op._op)
            )
            name = op._schema.name.partition("::")[2]
            print(f"{name:34} {len(calls):4} {direct:8.2f} us {by_dispatcher:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true", dest="compiled")
    parser.add_argument("--ops", action="store_true", help="print each op of a compiled step")
    parser.add_argument("--sort", help="print a profile, sorted by this column of pstats")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A profile sees one thread.
    torch.autograd.set_multithreading_enabled(False)
    ids = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(1))
    size = llama.Size(256, 512, options.layers, heads=4, key_heads=2, vocab=256)
    net = llama.built(size, "cpu", patched=False).train()
    with pretended():
        ck.patch(net, strict=True)
        if options.compiled or options.ops:
            net = torch.compile(net, options=ck.compile_options())
        for _ in range(5):
            step(net, ids)
        if options.ops:
            print_ops(lambda: step(net, ids))
            return
        if options.sort:
            profiles = cProfile.Profile(), cProfile.Profile()
            for _ in range(options.steps):
                step(net, ids, profiles)
            for profile in profiles:
                pstats.Stats(profile).sort_stats(options.sort).print_stats(40)
            return
        times = zip(*(step(net, ids) for _ in range(options.steps)), strict=True)
    for phase, ms in zip(("forward", "backward"), times, strict=True):
        print(f"{phase}: {min(ms):.2f} ms at least, {statistics.median(ms):.2f} in the median")


if __name__ == "__main__":
    main()
