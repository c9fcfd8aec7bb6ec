"""`python -m perf tune-norm`: who holds the rows of a norm on an SM, their bits, their times.

A variant replaces what `config.forward_residency` or `config.backward_residency` says, of which no
bit follows: threads of a CTA, CTAs of an SM, stages of each one's ring (0: none, and a CTA for
every row or few); of a backward, stages, and whether the copy engine fills them (bulk: 0 or 1).
Each must give the bytes of the shipped one before it is timed; all are timed in turns with a copy
of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import torch

from ..core import record, timing
from ..core.bits import same_bytes
from .cases import ROWS, Case

#: Worth a try on a new card; "" is the shipped one.
VARIANTS = (
    "",
    *(f"threads=128,ctas={n},stages=0" for n in (6, 8, 10)),
    *(f"threads=256,ctas={n},stages=0" for n in (4, 5, 6)),
    *(f"threads=512,ctas={n},stages=0" for n in (2, 3)),
    *(f"threads=128,ctas={n},stages={stages}" for n, stages in ((6, 2), (8, 2), (6, 3))),
    *(f"threads=256,ctas={n},stages={stages}" for n, stages in ((3, 2), (4, 2), (5, 2), (3, 3))),
    *(f"threads=512,ctas={n},stages={stages}" for n, stages in ((1, 3), (2, 2), (2, 3))),
)
BACKWARD_VARIANTS = ("", *(f"stages={n},bulk={bulk}" for n in (2, 3) for bulk in (0, 1)))
_EPS = 1e-6


class Variant(NamedTuple):
    """Variant of a `config.Residency`; 0, 0, -1 and -1: as shipped."""

    threads: int = 0
    ctas: int = 0
    stages: int = -1
    bulk: int = -1


def parse(text: str) -> Variant:
    """``"ctas=4,stages=0"`` -> a Variant; ValueError names an unknown field."""
    fields = {}
    for assignment in filter(None, text.split(",")):
        name, _, value = assignment.partition("=")
        if name not in Variant._fields or not value.isdigit():
            names = ", ".join(Variant._fields)
            raise ValueError(f"variant: expected NAME=NUMBER of {names}, got {assignment!r}")
        fields[name] = int(value)
    return Variant(**fields)


def started(text: str, case: Case, sms: int, build: Callable | None = None) -> Callable:
    """The results of a case's inputs, by one variant; ``build``: a kernel of a configuration."""
    return (forward if case.direction == "fwd" else backward)(text, case, sms, build)


def forward(text: str, case: Case, sms: int, build: Callable | None) -> Callable:
    """Call of a forward: returns y, or h and y."""
    from cute_kernels.norm import config, kernel_fwd_sm90, launch
    from cute_kernels.norm.config import LAYER, RMS
    from cute_kernels.norm.tensors import Rule

    tried, dtype = parse(text), torch.bfloat16
    residual, layer = case.op == "add_rms_norm", case.op == "layer_norm"
    rule = Rule(LAYER if layer else RMS, _EPS)
    kernel_config = launch.forward_config(rule.kind, dtype, dtype, residual, case.width)
    shipped = config.forward_residency(kernel_config)
    residency = config.Residency(
        max(tried.threads or shipped.threads, kernel_config.threads),
        tried.ctas or shipped.ctas,
        shipped.stages if tried.stages < 0 else tried.stages,
    )
    with mock.patch.object(kernel_fwd_sm90, "forward_residency", lambda of: residency):
        kernel = (build or kernel_fwd_sm90.build)(kernel_config)
    ctas = -(-case.rows // (residency.threads // kernel_config.threads))
    ctas = min(ctas, sms * residency.ctas) if residency.stages else ctas

    def run(t: dict) -> tuple[torch.Tensor, ...]:
        x = t["x"]
        y = x.new_empty(1 + residual, *x.shape)
        statistics = x.new_empty(1 + layer, case.rows, dtype=torch.float32)
        operands = x, t.get("residual"), t["weight"], t.get("bias")
        outputs = y[1] if residual else None, y[0], statistics[1] if layer else None, statistics[0]
        kernel(*operands, *outputs, *launch.forward_numbers(rule, case.width), ctas)
        return (y,)

    return run


def backward(text: str, case: Case, sms: int, build: Callable | None) -> Callable:
    """Call of a backward: dx, and dweight summed over its partials; of a layer norm dbias too."""
    from cute_kernels.norm import config, kernel_bwd_sm90, kernel_sums_sm90, launch
    from cute_kernels.norm.config import LAYER, RMS

    tried, dtype = parse(text), torch.bfloat16
    layer = case.op == "layer_norm"
    upstream = case.op == "add_rms_norm"
    kernel_config = launch.backward_config(
        LAYER if layer else RMS, dtype, dtype, upstream, case.width
    )
    shipped = config.backward_residency(kernel_config)
    residency = shipped if tried.stages < 0 else replace(shipped, stages=tried.stages)
    residency = residency if tried.bulk < 0 else replace(residency, bulk=tried.bulk == 1)
    with mock.patch.object(kernel_bwd_sm90, "backward_residency", lambda of: residency):
        kernel = (build or kernel_bwd_sm90.build)(kernel_config)
    adding = config.SumConfig(config.DTYPE_NAMES[dtype], pair=layer)
    added = (build or kernel_sums_sm90.build)(adding)
    count = -(-case.rows // config.part_rows(case.width))

    def run(t: dict) -> tuple[torch.Tensor, ...]:
        x = t["x"]
        dx = torch.empty_like(x)
        sums = x.new_empty(1 + layer, count, case.width, dtype=torch.float32)
        outputs = x.new_empty(1 + layer, case.width)
        operands = t["d0"], t.get("d1"), x, t["mean"] if layer else None, t["rstd"], t["weight"]
        of_bias = sums[1] if layer else None
        kernel(*operands, dx, sums[0], of_bias, 0.0, 1 / case.width, min(count, sms))
        added(sums[0], outputs[0], *((sums[1], outputs[1]) if layer else (None, None)))
        return dx, outputs

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

    def drawn(seed: int) -> dict:
        out = {name: t.detach() for name, t in case.inputs(seed, device).items()}
        if case.direction == "bwd":
            out |= _statistics(out["x"], case.op == "layer_norm")
        # As many bytes as the norm moves: half of them are read.
        size = ROWS[case.op, case.direction] * case.rows * case.width // 2
        return out | {"copied": out["x"].new_empty(size).normal_()}

    for text in variants:
        parse(text)  # A slip of the caller's ends the run; what a row cannot have is told below.
    t = drawn(0)
    expected = started("", case, sms, build)(t)
    failed, timed = {}, {}
    for text in variants:
        try:
            call = started(text, case, sms, build)
        except ValueError as error:
            failed[text] = {"why": str(error)}
            continue
        if all(map(same_bytes, call(t), expected)):
            timed[f"ours[{text}]"] = call
        else:
            failed[text] = {"why": "other bits than the shipped one", "bits_of_shipped": False}
    timed["copy"] = lambda t: torch.empty_like(t["copied"]).copy_(t["copied"])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 10
    count = timing.set_count(t["copied"].nbytes, l2, len(timed))
    sets = [t, *map(drawn, range(1, count))]
    times = timing.interleave(timing.rotating(timed, sets), rounds=rounds, clock=clock)
    head = {"kind": "tune", "kernel": "norm"} | case.items()
    for text, why in failed.items():
        yield head | {"system": f"ours[{text}]", "status": "failed"} | why
    for name, stats in times.items():
        spread = {"median_us": stats.median, "p10_us": stats.p10, "p90_us": stats.p90}
        share = {"copy_share": times["copy"].median / stats.median, "backlog": stats.backlog}
        extra = {} if name == "copy" else {"bits_of_shipped": True}
        yield head | {"system": name, "status": "ok"} | spread | share | extra


def _statistics(x: torch.Tensor, layer: bool) -> dict[str, torch.Tensor]:
    """Row statistics of a backward, fp32."""
    values = x.float()
    mean = values.mean(-1) if layer else torch.zeros_like(values[:, 0])
    variance = (values - mean[:, None]).square().mean(-1)
    return {"mean": mean, "rstd": (variance + _EPS).rsqrt()}


def line(body: dict) -> str:
    """One line for the terminal."""
    head = f"{body['product']:<16} {body['shape']:<12} {body['system']:<36}"
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
