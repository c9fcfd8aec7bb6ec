"""Times of a small training step: python -m perf.model.step [--compile] [--length 2048 --batch 4]

``--graphs``: compiled, and replayed as CUDA graphs (inductor's ``triton.cudagraphs``).
``--no-asserts``: both compiled without inductor's ``size_asserts`` and ``alignment_asserts``.
``--profile``: the functions that the host spends most of its time in, in place of times.

A Llama of 8 layers (hidden 2048) on 2 sequences of 1024 tokens, patched and not, in turns in one
process: milliseconds of the host in the forward and in the backward, and of the whole step.  Under
``torchrun --nproc-per-node N -m perf.model.step`` every layer is an FSDP2 module over N ranks, all
of them in step, and rank 0 prints its times.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from contextlib import nullcontext

import torch

import cute_kernels as ck

from ..core.room import with_room
from . import llama

LAYERS = 8
WARM_UP, STEPS = 3, 25


def model() -> torch.nn.Module:
    """A random Llama, alike at every call, in bf16 on the GPU."""
    size = llama.Size(inner=5632, layers=LAYERS)
    return llama.built(size, "cuda", patched=False).train()


def step(
    net: torch.nn.Module, ids: torch.Tensor, profiles=(nullcontext(), nullcontext())
) -> tuple[float, float, float]:
    """Seconds of the host in the forward, in the backward, and of both with the GPU's work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with profiles[0]:
        loss = net(ids, labels=ids, use_cache=False).loss
    forward = time.perf_counter()
    with profiles[1]:
        loss.backward()
    backward = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    for parameter in net.parameters():
        parameter.grad = None
    return forward - start, backward - forward, end - start


def sharded(net: torch.nn.Module, ranks: int) -> torch.nn.Module:
    """Make each layer, and the model around them, an FSDP2 module over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (ranks,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def profiled(net: torch.nn.Module, ids: torch.Tensor, steps: int = 10) -> None:
    """Print where the host's time goes in the forward and in the backward, in this thread."""
    torch.autograd.set_multithreading_enabled(False)
    profiles = cProfile.Profile(), cProfile.Profile()
    for _ in range(steps):
        step(net, ids, profiles)
    for phase, profile in zip(("forward", "backward"), profiles, strict=True):
        print(f"{phase}, {steps} steps", flush=True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def systems(ranks: int, compiled: bool, extra: dict[str, bool]) -> dict[str, torch.nn.Module]:
    """The models that are timed, by name; extra: more options of inductor, for both."""
    nets = {"torch": model(), "ours": model()}
    ck.patch(nets["ours"], strict=True)
    if ranks:
        nets = {name: sharded(net, ranks) for name, net in nets.items()}
    if compiled:
        options = {"torch": {**extra} or None, "ours": {**ck.compile_options(), **extra}}
        nets = {name: torch.compile(net, options=options[name]) for name, net in nets.items()}
    return nets


def main() -> None:
    """Print medians of each system, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--compile", action="store_true", dest="compiled")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--no-asserts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    extra = {"triton.cudagraphs": True} if arguments.graphs else {}
    if arguments.no_asserts:
        extra |= {"size_asserts": False, "alignment_asserts": False}
    compiled = arguments.compiled or bool(extra)
    ranks, rank = int(os.environ.get("WORLD_SIZE", 0)), int(os.environ.get("RANK", 0))
    if ranks:
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl")
    generator = torch.Generator("cuda").manual_seed(1 + rank)
    shape = (arguments.batch, arguments.length)
    ids = torch.randint(32000, shape, device="cuda", generator=generator)
    nets = systems(ranks, compiled, extra)
    if arguments.profile:
        for name, net in nets.items():
            for _ in range(WARM_UP):
                with_room(step, net, ids)
            print(name, flush=True)
            with_room(profiled, net, ids)
        return
    times = {name: [] for name in nets}
    for i in range(WARM_UP + STEPS):
        for name, net in nets.items():
            if ranks:
                torch.distributed.barrier()
            seconds = with_room(step, net, ids)
            if i >= WARM_UP:
                times[name].append(seconds)
    names = ("forward_ms", "backward_ms", "step_ms")
    common = {"ranks": ranks, "tokens": shape, "compiled": compiled, **extra}
    common["gpu"] = torch.cuda.get_device_name()
    for name, samples in times.items() if rank == 0 else ():
        medians = (1e3 * statistics.median(column) for column in zip(*samples, strict=True))
        result = dict(zip(names, (round(ms, 2) for ms in medians), strict=True))
        print(json.dumps({"system": name, **result, **common}), flush=True)
    if ranks:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
