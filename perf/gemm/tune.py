"""`python -m perf tune gemm`: variants of the SM90 GEMM's Config, their bits, then their times.

A variant is a Config with fields replaced: ``tile_n=192`` or ``cluster_m=1,raster_group=4``.  Each
must give the bytes of the shipped configuration before it is timed (the tile may follow M only
where that holds), and all are timed in turns with cuBLAS, as `bench` does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from ..core import record, timing
from ..core.bits import same_bytes
from ..core.work import ratios
from .cases import Case, Inputs
from .rivals import RIVALS

#: Worth a try on a new card; "" is the shipped configuration.
VARIANTS = (
    "",
    "raster_group=4",
    "raster_group=16",
    "cluster_m=1",
    "cluster_m=1,cluster_n=2",
    "tile_n=192",
    "tile_n=128",
)


def parse(text: str):
    """``"tile_n=192,cluster_m=1"`` -> the fields to replace; ValueError names an unknown one."""
    from cute_kernels.gemm.config import Config

    tunable = {f.name for f in dataclasses.fields(Config) if f.type == "int"}
    changes = {}
    for assignment in filter(None, text.split(",")):
        name, _, value = assignment.partition("=")
        if name not in tunable or not value.isdigit():
            names = ", ".join(sorted(tunable))
            raise ValueError(f"variant: expected NAME=NUMBER of {names}, got {assignment!r}")
        changes[name] = int(value)
    return changes


@functools.cache
def kernel(text: str, a_major: str, b_major: str, epilogue: str, dtype=torch.bfloat16):
    """The compiled kernel of one variant, and the CTAs of its cluster."""
    from cute_kernels.gemm import kernel_sm90, launch

    shipped = launch.Dense(launch.Config.tile_n)
    kernel_config = launch.dense_config(dtype, a_major, b_major, epilogue, shipped)
    kernel_config = dataclasses.replace(kernel_config, **parse(text))
    return kernel_sm90.build(kernel_config), kernel_config.cluster_m * kernel_config.cluster_n


def product(text: str, which: str, units: int) -> Callable[[Inputs], torch.Tensor]:
    """One product of the bench (fwd, dx, dw) through one variant."""

    def run(t: Inputs) -> torch.Tensor:
        from cute_kernels.runtime.operands import matrix

        a, b = {
            "fwd": lambda: (t["x"], t["w"]),
            "dx": lambda: (t["dy"], t["w"].mT),
            "dw": lambda: (t["dy"].mT, t["x"].mT),
        }[which]()
        matrices = [matrix(t, "gemm", "operand") for t in (a, b)]
        a, b = (t if h.adapt is None else h.adapt(t) for t, h in zip((a, b), matrices, strict=True))
        a_major, b_major = (h.major for h in matrices)
        out = t["main_grad"] if which == "dw" else a.new_empty(a.shape[0], b.shape[0])
        epilogue = "accumulate" if which == "dw" else "plain"
        call, cluster = kernel(text, a_major, b_major, epilogue)
        call(a, b, out, None, max(1, units // cluster))
        return out

    return run


def bits_agree(call: Callable, shipped: Callable, t: Inputs) -> bool:
    """Whether a variant writes the bytes of the shipped configuration."""
    clone = lambda: {name: value.clone() for name, value in t.items()}  # noqa: E731
    return same_bytes(call(clone()), shipped(clone()))


def gemm(
    case: Case, variants: list[str], *, units: int, rounds: int, clock=None, device: str = "cuda"
) -> Iterator[dict]:
    """Yields one record body per variant, and one for cuBLAS, all from one interleaved run."""
    t = case.inputs(0, device)
    calls = {text: product(text, case.product, units) for text in variants}
    shipped = product("", case.product, units)
    bodies: dict[str, dict] = {}
    for text, call in calls.items():
        same_bits = bits_agree(call, shipped, t)
        bodies[text] = {"system": f"ours[{text}]", "bits_of_shipped": same_bits, "status": "ok"}
        if not same_bits:
            bodies[text] |= {"status": "failed", "why": "other bits than the shipped configuration"}
    timed = {f"ours[{x}]": calls[x] for x, body in bodies.items() if body["status"] == "ok"}
    timed["cublas"] = RIVALS["cublas"].start[case.product](case)
    draw = functools.partial(case.inputs, device=device)
    times, _ = timing.in_turns(timed, t, draw, rounds=rounds, device=device, clock=clock)
    medians = {name: stats.median for name, stats in times.items()}
    bodies["cublas"] = {"system": "cublas", "status": "ok"}
    for body in bodies.values():
        if body["status"] == "ok":
            stats = times[body["system"]]
            body |= {"median_us": stats.median, "p10_us": stats.p10, "p90_us": stats.p90}
            body |= {"tflops": case.flops / stats.median / 1e6, "backlog": stats.backlog}
            body["ratio"] = ratios(medians, body["system"])
        yield {"kind": "tune", "kernel": "gemm"} | case.items() | body


def line(body: dict) -> str:
    """One line for the terminal."""
    head = f"{body['product']:<4} {body['shape']:<14} {body['system']:<32}"
    if body["status"] != "ok":
        return f"{head} {body['why']}"
    against = body["ratio"].get("cublas", 1.0)
    spread = f"[{body['p10_us']:.1f}, {body['p90_us']:.1f}]"
    return (
        f"{head} {body['median_us']:9.1f} us {spread} {body['tflops']:6.1f} TFLOP/s {against:5.3f}x"
    )


def write(case: Case, variants: list[str], output, rounds: int, commit: str | None) -> list[str]:
    """Measures one case on the card, appends its records, returns their lines."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    common, lines = record.environment(commit), []
    for body in gemm(case, variants, units=sms, rounds=rounds):
        record.append(output, body | common)
        lines.append(line(body))
    return lines
