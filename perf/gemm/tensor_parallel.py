"""`torchrun --nproc-per-node 4 -m perf bench tensor-parallel`: a row-parallel linear beside NCCL.

All ranks run the same calls in the same order, which each round draws; a sample is `INNER` calls
in a row after a barrier, and the slowest rank counts.  Systems:

    nccl        x Wᵀ by cuBLAS, then all_reduce: bf16 partial sums, whose bits follow the ranks
    ours        `row_parallel_linear`, on the path that the sizes choose
    gathered, scattered, chained     the same on one path of `leaf_exchange`; a chain has two ranks
    verified    ours with verify=True: what the ranks' talk costs
    matmul, all_reduce               the parts of nccl
    leaf_sums                        of ours, the product of all rows
    add_leaves                       of the scattered path: all ranks' leaves of a rank's rows
    add_leaves/torch                 the same by torch, a launch for each leaf

Before it is timed, each of ours must have the bytes of `ck.linear(order="tree")` on one rank.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.gemm import op
from cute_kernels.integrations import leaf_exchange
from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.schedulers.tiles import leaves

from ..core import record, timing
from ..core.bits import same_bytes

INNER = 8
#: `gathered` is left out beyond so many bytes of all ranks' leaves: no size would choose it.
MOST_GATHERED = 1 << 27
#: Systems that are not a whole sum over ranks.
PARTS = ("matmul", "all_reduce", "leaf_sums", "add_leaves", "add_leaves/torch")


class Case(NamedTuple):
    """y [rows, n] = x [rows, k] Wᵀ, k cut over the ranks, in bf16."""

    rows: int
    n: int
    k: int

    def sizes(self, ranks: int) -> leaf_exchange.Sizes:
        """Sizes of the sum over ranks."""
        return leaf_exchange.Sizes(self.rows, self.n, leaves.count(self.k) // ranks, ranks)


class Inputs(NamedTuple):
    """A rank's columns of x and of the weight."""

    x: torch.Tensor
    weight: torch.Tensor


class HostClock:
    """The clock of a CPU, with the interface of `timing.CudaClock`."""

    def mark(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        """Nothing is in flight."""

    def between(self, start: float, stop: float) -> float:
        return (stop - start) * 1e6


def drawn(case: Case, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole x and weight, the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (case.rows, case.k), (case.n, case.k)
    return tuple(
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        for shape in shapes
    )


def systems(case: Case, group, device: str) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    """Every call that is timed, by name."""
    length = leaves.length(case.k)
    sizes = case.sizes(group.size())

    def ours(inputs: Inputs, verify: bool = False) -> torch.Tensor:
        return tp.row_parallel_linear(*inputs, mesh=group, verify=verify)

    def on(path: str) -> Callable[[Inputs], torch.Tensor]:
        def call(inputs: Inputs) -> torch.Tensor:
            with mock.patch.object(leaf_exchange, "choose", lambda *sizes: path):
                return ours(inputs)

        return call

    def nccl(inputs: Inputs) -> torch.Tensor:
        y = torch.nn.functional.linear(*inputs)
        dist.all_reduce(y, group=group)
        return y

    def all_reduce(inputs: Inputs) -> torch.Tensor:
        dist.all_reduce(partial, group=group)
        return partial

    partial = torch.zeros(case.rows, case.n, dtype=torch.bfloat16, device=device)
    calls = {"nccl": nccl, "ours": ours}
    calls["scattered"] = on(leaf_exchange.SCATTERED)
    if sizes.ranks == 2:
        calls["chained"] = on(leaf_exchange.CHAINED)
    if sizes.all_leaves() <= MOST_GATHERED:
        calls["gathered"] = on(leaf_exchange.GATHERED)
    calls["verified"] = lambda inputs: ours(inputs, verify=True)
    calls["matmul"] = lambda inputs: torch.nn.functional.linear(*inputs)
    calls["all_reduce"] = all_reduce
    calls["leaf_sums"] = lambda inputs: op.leaf_sums(*inputs, length)
    return calls | scattered_parts(sizes, group, device)


def scattered_parts(
    sizes: leaf_exchange.Sizes, group, device: str
) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    """Parts of the scattered path after its messages: the adds."""
    ranks, rank = sizes.ranks, group.rank()
    share, n = -(-sizes.rows // ranks), sizes.columns
    generator = torch.Generator(device).manual_seed(rank)
    every = torch.randn(ranks * sizes.leaves, share, n, generator=generator, device=device)
    rounded = torch.empty(share, n, dtype=torch.bfloat16, device=device)

    def add_leaves(inputs: Inputs) -> torch.Tensor:
        return op.add_leaves_into(rounded, (every,), None)

    def add_by_torch(inputs: Inputs) -> torch.Tensor:
        with mock.patch.object(op, "_adds_by_triton", lambda device: False):
            return add_leaves(inputs)

    return {"add_leaves": add_leaves, "add_leaves/torch": add_by_torch}


def differing(calls: dict, inputs: Inputs, want: torch.Tensor) -> list[str]:
    """Systems whose result is wrong on this rank: other bytes than one rank's, or nccl's values.

    Of the parts, ``add_leaves`` must have the bytes of torch's adds.
    """
    names = []
    for name, call in calls.items():
        if name == "nccl":
            error = (call(inputs).float() - want.float()).norm() / want.float().norm()
            if not error < 0.02:
                names.append(name)
        elif name not in PARTS and not same_bytes(call(inputs), want):
            names.append(name)
    by_torch = calls["add_leaves/torch"](inputs).clone()
    if not same_bytes(calls["add_leaves"](inputs), by_torch):
        names.append("add_leaves")
    return names


def in_turns(
    calls: dict[str, Callable[[int], object]], rounds: int, clock, barrier: Callable[[], object]
) -> dict[str, list[tuple[float, float]]]:
    """(device us, host us) of a call, a pair for each round, by name."""
    order = random.Random(0)  # the same on every rank
    samples = {name: [] for name in calls}
    number = 0
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            barrier()
            begun, start = time.perf_counter(), clock.mark()
            for _ in range(INNER):
                calls[name](number)
                number += 1
            host, stop = time.perf_counter() - begun, clock.mark()
            clock.finish()
            samples[name].append((clock.between(start, stop) / INNER, host * 1e6 / INNER))
    return samples


def captured(
    calls: dict[str, Callable[[Inputs], object]], sets: list[Inputs]
) -> dict[str, Callable[[int], object]]:
    """Each call as one that replays a CUDA graph; the graphs share memory."""
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[str, list] = {}
    for name, call in calls.items():
        graphs[name] = []
        for inputs in sets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                call(inputs)
            graphs[name].append(graph)

    def replay(name: str) -> Callable[[int], object]:
        return lambda number: graphs[name][number % len(sets)].replay()

    return {name: replay(name) for name in calls}


def bench(
    todo: list[Case],
    group: dist.ProcessGroup,
    device: str,
    *,
    rounds: int = timing.MIN_ROUNDS,
    graph: bool = False,
    commit: str | None = None,
) -> Iterator[dict]:
    """A record for each system at each case, the same on every rank."""
    ranks, rank = group.size(), group.rank()
    clock = timing.CudaClock() if device == "cuda" else HostClock()
    fields = record.environment(commit)
    for case in todo:
        calls = systems(case, group, device)
        if graph:
            del calls["verified"]  # it waits for other hosts
        part_bytes = 2 * case.k // ranks * (case.rows + case.n)
        sets_wanted = 2
        if device == "cuda":
            l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
            sets_wanted = timing.set_count(part_bytes, l2_bytes, len(calls))
        sets, want = [], None
        for seed in range(sets_wanted):
            x, weight = drawn(case, seed, device)
            sets.append(Inputs(*(t.chunk(ranks, 1)[rank].contiguous() for t in (x, weight))))
            want = ck.linear(x, weight, order="tree") if want is None else want
        reports: list = [None] * ranks
        dist.all_gather_object(reports, differing(calls, sets[0], want), group=group)
        wrong = {name for names in reports for name in names}
        good = {name: call for name, call in calls.items() if name not in wrong}
        numbered = captured(good, sets) if graph else timing.rotating(good, sets)
        timing.warm_up(numbered, max(3, len(sets)))
        samples = in_turns(numbered, rounds, clock, lambda: dist.barrier(group=group))
        dist.all_gather_object(reports, samples, group=group)
        chosen = leaf_exchange.choose(case.sizes(ranks), tp.GATHER_BYTES)
        for name in calls:
            body = fields | {"kind": "bench", "kernel": "tensor_parallel", "system": name}
            body |= {"shape": f"{case.rows}x{case.n}x{case.k}", "ranks": ranks, "graph": graph}
            body |= {"path": chosen if name == "ours" else None}
            if name in wrong:
                yield body | {"status": "wrong"}
            else:
                yield body | {"status": "ok"} | _times([report[name] for report in reports])


def _times(samples: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Medians over rounds of the slowest rank, in us; ``samples``: of each rank."""
    rounds = list(zip(*samples, strict=True))
    slowest, hosts = ([max(pair[i] for pair in one) for one in rounds] for i in (0, 1))
    return {
        "us": timing.quantile(slowest, 0.5),
        "p10": timing.quantile(slowest, 0.1),
        "p90": timing.quantile(slowest, 0.9),
        "host_us": timing.quantile(hosts, 0.5),
    }


def lines(bodies: list[dict]) -> list[str]:
    """A table of one case, and its records as JSON."""
    first = bodies[0]
    of_nccl = next((b["us"] for b in bodies if b["system"] == "nccl" and "us" in b), None)
    how = "graphs" if first["graph"] else "eager"
    table = [f"{first['shape']}, {first['ranks']} ranks, {first['gpu']}, {how}"]
    table.append(f"{'system':<18}{'us':>10}{'p10':>10}{'p90':>10}{'host us':>10}{'of nccl':>9}")
    for body in bodies:
        if body["status"] != "ok":
            table.append(f"{body['system']:<18}{'wrong result, not timed':>30}")
            continue
        times = "".join(f"{body[key]:>10.1f}" for key in ("us", "p10", "p90", "host_us"))
        share = f"{body['us'] / of_nccl:>9.2f}" if of_nccl else ""
        path = f"  {body['path']}" if body["path"] else ""
        table.append(f"{body['system']:<18}{times}{share}{path}")
    return table + [json.dumps(body, sort_keys=True) for body in bodies]
