"""`python -m perf tune-norm`: who holds the rows of the forward on an SM, their bits, their times.

A variant replaces what `config.forward_residency` says, of which no bit follows: CTAs of an SM,
stages of each one's ring (0: none), threads of a CTA that has several rows, and whether CTAs stay
(``stays=0``: as many as there are rows to take).  Each must give the bytes of the shipped one
before it is timed; all are timed in turns with a copy of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

from ..core import record, timing
from ..core.bits import same_bytes
from .cases import Case

#: Worth a try on a new card; "" is the shipped one.
VARIANTS = (
    "",
    "stays=0",
    *(f"ctas={n},stages=0{grid}" for n in (4, 5, 6, 8) for grid in ("", ",stays=0")),
    *(f"ctas={n},stages={stages}" for n, stages in ((4, 2), (3, 3), (2, 4), (6, 2))),
    *(f"threads={t},ctas={n},stages=0,stays=0" for t, n in ((128, 8), (128, 12), (512, 2))),
)
_EPS = 1e-6


class Variant(NamedTuple):
    """``ctas`` and ``stages`` 0 and -1: as shipped."""

    ctas: int = 0
    stages: int = -1
    threads: int = 256
    stays: int = 1


def parse(text: str) -> Variant:
    """``"ctas=4,stages=0"`` -> a Variant; ValueError names an unknown field."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in Variant._fields or not value.isdigit():
            known = ", ".join(Variant._fields)
            raise ValueError(f"variant: expected NAME=NUMBER of {known}, got {part!r}")
        found[name] = int(value)
    return Variant(**found)


def forward(text: str, case: Case, sms: int, build: Callable | None = None) -> Callable:
    """y of x and weight, by one variant; ``build``: a kernel of its configuration."""
    from cute_kernels.norm import config, kernel_fwd_sm90, launch

    tried = parse(text)
    dtype = torch.bfloat16
    chosen = launch.forward_config("rms", dtype, dtype, False, case.width)
    with mock.patch.object(kernel_fwd_sm90, "FORWARD_THREADS", tried.threads):
        shipped = config.forward_residency(chosen)
        held = config.Residency(
            tried.ctas or shipped.ctas, shipped.stages if tried.stages < 0 else tried.stages
        )
        with mock.patch.object(kernel_fwd_sm90, "forward_residency", lambda of: held):
            kernel = (build or kernel_fwd_sm90.build)(chosen)
    ctas = -(-case.rows // max(1, tried.threads // chosen.threads))
    ctas = min(ctas, sms * held.ctas) if tried.stays else ctas

    def run(t: dict) -> torch.Tensor:
        y, rstd = torch.empty_like(t["x"]), t["x"].new_empty(case.rows, dtype=torch.float32)
        given = t["x"], None, t["weight"], None, None, y, None, rstd
        kernel(*given, _EPS, 0.0, case.width, ctas)
        return y

    return run


def norm(
    case: Case,
    variants: list[str],
    *,
    sms: int,
    rounds: int,
    device: str = "cuda",
    clock=None,
    build: Callable | None = None,
) -> Iterator[dict]:
    """Yields one record body per variant, and one of the copy, all from one interleaved run."""
    generator = torch.Generator(device).manual_seed(5)

    def drawn() -> dict:
        x, weight = (
            torch.randn(*size, device=device, generator=generator).to(torch.bfloat16)
            for size in ((case.rows, case.width), (case.width,))
        )
        return {"x": x, "weight": weight}

    t = drawn()
    calls = {text: forward(text, case, sms, build) for text in variants}
    want = forward("", case, sms, build)(t)
    found = {text: same_bytes(call(t), want) for text, call in calls.items()}
    timed = {f"ours[{text}]": call for text, call in calls.items() if found[text]}
    timed["copy"] = lambda t: torch.empty_like(t["x"]).copy_(t["x"])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 10
    sets = [t]
    while len(sets) < timing.set_count(t["x"].nbytes, l2, len(timed)):
        sets.append(drawn())
    times = timing.interleave(timing.rotating(timed, sets), rounds=rounds, clock=clock)
    head = {"kind": "tune", "kernel": "norm"} | case.items()
    for text in variants:
        if not found[text]:
            why = {"status": "failed", "why": "other bits than the shipped one"}
            yield head | {"system": f"ours[{text}]", "bits_of_shipped": False} | why
    for name, taken in times.items():
        spread = {"median_us": taken.median, "p10_us": taken.p10, "p90_us": taken.p90}
        share = {"copy_share": times["copy"].median / taken.median, "backlog": taken.backlog}
        same = {} if name == "copy" else {"bits_of_shipped": True}
        yield head | {"system": name, "status": "ok"} | spread | share | same


def line(body: dict) -> str:
    """One line for the terminal."""
    head = f"{body['shape']:<12} {body['system']:<44}"
    if body["status"] != "ok":
        return f"{head} {body['why']}"
    spread = f"[{body['p10_us']:.1f}, {body['p90_us']:.1f}]"
    return f"{head} {body['median_us']:8.1f} us {spread} {body['copy_share']:.0%} of the copy"


def write(
    case: Case, variants: list[str], output, rounds: int, commit: str | None
) -> Iterator[str]:
    """Measures one case on the card, appends its records, yields their lines, fastest first."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    common = record.environment(commit)
    bodies = list(norm(case, variants, sms=sms, rounds=rounds))
    for body in bodies:
        record.append(output, body | common)
    yield from map(line, sorted(bodies, key=lambda body: body.get("median_us", 0.0)))
