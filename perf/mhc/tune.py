"""`python -m perf.mhc.tune project`: configurations of one kernel, their bits, their times.

A variant replaces what `config` chooses, of which no bit follows.  Each must give the bytes of the
first one before it is timed; all are timed in turns with a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from cute_kernels.mhc import launch
from cute_kernels.mhc.config import CombineConfig, ProjectWgmmaConfig, project_wgmma_config
from cute_kernels.mhc.tensors import Expand, Mapping, Reduced, Streams, Upstream
from cute_kernels.runtime.plan_cache import Plan

from ..core import timing
from ..core.bits import same_bytes
from .cases import Case, Inputs

Run = Callable[[Inputs], tuple[torch.Tensor, ...]]
#: (consumer warpgroups, stages of x, stages of psi, panels at once); "mma": without TMA.
PROJECT = ("mma", (4, 4, 4, 2), (4, 4, 4, 1), (4, 4, 4, 4), (4, 5, 5, 1), (2, 8, 4, 2),
           (2, 8, 4, 4), (3, 6, 4, 2))  # fmt: skip
POST_PRE = ("mma", (2, 6, 4, 2), (2, 6, 4, 1), (2, 4, 4, 4), (2, 6, 6, 6), (1, 8, 4, 2))
#: (packed, threads, vectors in flight, CTAs an SM).
EXPAND = ((False, 256, 4, 4), (True, 256, 4, 3), (True, 256, 5, 3), (True, 128, 4, 6),
          (True, 128, 5, 6), (True, 128, 4, 5))  # fmt: skip
AGGREGATE = ((False, 256, 4, 4), (True, 256, 4, 4), (True, 256, 7, 4), (True, 128, 4, 8),
             (True, 128, 5, 8), (True, 128, 7, 8))  # fmt: skip
PACKED = (False, True)


@dataclass(frozen=True)
class Variant:
    """A launcher with another configuration.

    changed:  names of `launch` that are replaced while it is planned.
    planner:  makes the launch plan of the operands.
    operands: of a case's inputs.  results: tensors of what the plan returns.
    """

    changed: dict[str, Any]
    planner: Callable[..., Plan]
    operands: Callable[[Inputs], tuple]
    results: Callable[..., tuple[torch.Tensor, ...]]

    def planned(self, first: Inputs) -> Run:
        """Plan once, for inputs like ``first``; return the call."""
        patched = mock.patch.multiple(launch, **self.changed) if self.changed else nullcontext()
        with patched:
            plan = self.planner(*self.operands(first))
        return lambda t: self.results(plan.run(*self.operands(t)))


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(len(t), -1)


def _project(case: Case, fields: str | tuple[int, ...]) -> Variant:
    if fields == "mma":
        changed: dict[str, Any] = {"project_by_tma": lambda *fields: False}
    else:
        names = ("warpgroups", "x_stages", "psi_stages", "burst")
        sizes: dict[str, Any] = dict(zip(names, fields, strict=True))

        def chosen(*flags) -> ProjectWgmmaConfig:
            return dataclasses.replace(project_wgmma_config(*flags), **sizes)

        changed = {"project_wgmma_config": chosen}

    def operands(t: Inputs) -> tuple:
        mapping = Mapping(t["phi"], t.get("norm_weight"), "bf16x2")
        rows = _flat(t["x"]), mapping, Streams(case.n, case.layout)
        if not case.next_site:
            return rows
        by = Expand(_flat(t["f"]), None, _flat(t["post"]), _flat(t["res"]))
        return *rows, by, _flat(t["pre"])

    def results(out: tuple) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in out if t is not None)

    return Variant(changed, launch.plan_project, operands, results)


def _combine(case: Case, fields: tuple) -> Variant:
    packed, threads, ahead, blocks = fields

    def chosen(dtype, n, layout, wide, expand, bias, _, channels) -> CombineConfig:
        plain = CombineConfig(dtype, n, layout, wide, expand, bias, packed)
        return dataclasses.replace(plain, threads=threads, ahead=ahead, blocks=blocks)

    def operands(t: Inputs) -> tuple:
        x, streams = _flat(t["x"]), Streams(case.n, case.layout)
        if case.op == "aggregate":
            return x, streams, _flat(t["pre"]), None
        by = Expand(_flat(t["f"]), t.get("bias"), _flat(t["post"]), _flat(t["res"]))
        return x, streams, None, by

    def results(out: tuple) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in out if t is not None)

    return Variant({"combine_config": chosen}, launch.plan_combine, operands, results)


def _reduce(case: Case, packed: bool) -> Variant:
    def operands(t: Inputs) -> tuple:
        x, streams, d = _flat(t["x"]), Streams(case.n, case.layout), _flat(t["d0"])
        if case.op == "aggregate":
            return x, streams, Upstream(d_out=d, pre=_flat(t["pre"])), None, True
        by = Expand(_flat(t["f"]), t.get("bias"), _flat(t["post"]))
        return x, streams, Upstream(d, res=_flat(t["res"])), by, True

    def results(out: Reduced) -> tuple[torch.Tensor, ...]:
        parts = () if out.d_bias is None else (out.d_bias.values,)
        return (*(t for t in out[:5] if t is not None), *parts)

    changed: dict[str, Any] = {} if packed else {"_packed": lambda *tensors: False}
    return Variant(changed, launch.plan_reduce_channels, operands, results)


#: Kernel -> (ops and direction of its cases, variants by op, what makes one).
KERNELS: dict[str, tuple[tuple[tuple[str, str], ...], Callable, Callable[..., Variant]]] = {
    "project": ((("projection", "fwd"),), lambda op: PROJECT, _project),
    "post_pre": ((("post_pre_shifted", "fwd"),), lambda op: POST_PRE, _project),
    "combine": (
        (("aggregate", "fwd"), ("expand", "fwd")),
        lambda op: AGGREGATE if op == "aggregate" else EXPAND,
        _combine,
    ),
    "reduce": (
        (("aggregate", "bwd"), ("expand", "bwd"), ("expand_bias", "bwd")),
        lambda op: PACKED,
        _reduce,
    ),
}


def tuned(kernel: str, case: Case, rounds: int) -> Iterator[str]:
    """Lines of one case: the variants with the bytes of the first, in turns with a copy."""
    _, variants, make = KERNELS[kernel]

    def drawn(seed: int) -> Inputs:
        inputs = {name: t.detach() for name, t in case.inputs(seed, "cuda").items()}
        return inputs | {"copied": inputs["x"].new_empty(case.work.bytes // 4).normal_()}

    first = drawn(0)
    size, expected = sum(t.nbytes for t in first.values()), None
    timed: dict[str, Callable] = {}
    for variant in variants(case.op):
        try:
            call = make(case, variant).planned(first)
            out = call(first)
        except Exception as error:
            yield f"{case.product} {case.label} {variant}: failed, {str(error)[:200]}"
            continue
        expected = expected or out
        if all(map(same_bytes, out, expected)):
            timed[str(variant)] = call
        else:
            yield f"{case.product} {case.label} {variant}: OTHER BYTES"
    timed["copy"] = lambda t: torch.empty_like(t["copied"]).copy_(t["copied"])
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [first, *map(drawn, range(1, timing.set_count(size, l2_bytes, len(timed))))]
    rotated = timing.rotating(timed, sets)
    timing.warm_up(rotated, len(sets))
    times = timing.interleave(rotated, rounds=rounds)
    copy = times["copy"].median
    for name, taken in sorted(times.items(), key=lambda item: item[1].median):
        share = f"{copy / taken.median:.0%} of the copy"
        yield f"{case.product} {case.label} {name}: {taken.median:.1f} us, {share}"


def main(
    kernel: str,
    shape: Annotated[str, typer.Option(help="tokens x channels")] = "4096x4096,8192x7168",
    layout: str = "cn",
    rounds: int = 30,
) -> None:
    """Time the variants of a kernel on this GPU."""
    print(torch.cuda.get_device_name())
    for text in shape.split(","):
        tokens, channels = map(int, text.split("x"))
        for op, direction in KERNELS[kernel][0]:
            case = Case(op, direction, tokens, channels, layout)
            for line in tuned(kernel, case, rounds):
                print(line, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
