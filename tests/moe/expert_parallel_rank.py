"""One of several ranks with experts cut over them, over gloo on a CPU.

`report` has which results differed from one rank's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from tests.contract import same_bytes
from tests.moe import gpu_expert_parallel as script
from tests.moe.cases import BF16, drawn
from tests.moe.parallel_cases import Case, cases, differing, layer, parameters, random_case, whole


def groups(world: int) -> list:
    """The default group as a mesh; of four ranks also neighbours and others, two of each."""
    one = [init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))]
    if world < 4:
        return one
    two = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))
    return [*one, two["ep"], two["dp"]]


def group_of(value) -> dist.ProcessGroup:
    return value if isinstance(value, dist.ProcessGroup) else value.get_group()


def bytes_compared(world: int, seeds: int) -> dict:
    wrong, compared = [], 0
    for value in groups(world):
        group = group_of(value)
        degree, rank = group.size(), group.rank()
        listed = [(case, False) for case in cases(degree)] + [(cases(degree)[0], True)]
        listed += [(random_case(seed, degree), seed % 3 == 0) for seed in range(seeds)]
        for case, twice in listed:
            of = whole(case, twice=twice)
            wrong += [f"{case}: {n}" for n in differing(case, of, value, rank, degree, twice)]
            compared += 1
    return {"differing": wrong, "compared": compared}


def recomputed(world: int) -> dict:
    """Under no_grad, and recomputed under activation checkpointing."""
    rank, group = dist.get_rank(), dist.group.WORLD
    case = Case(((6,) * world,), 2 * world, 3, "router", BF16)
    p = {
        name: t.chunk(world)[rank] if name != "router" else t
        for name, t in parameters(case).items()
    }
    x, dy = (drawn(6, case.width, seed=30 + rank + i, dtype=BF16) for i in (0, 100))

    def results(run) -> list[torch.Tensor]:
        leaves = {name: t.clone().requires_grad_() for name, t in p.items()}
        rows = x.clone().requires_grad_()
        y = run(lambda rows: layer(rows, leaves, case, None, group)[0], rows)
        return [y.detach(), *torch.autograd.grad(y, [rows, *leaves.values()], dy)]

    def stored(run) -> list[torch.Tensor]:
        leaves = {name: t.clone().requires_grad_() for name, t in p.items()}
        rows = x.clone().requires_grad_()
        y = run(lambda rows: layer(rows, leaves, case, None, group)[0], rows)
        y.backward(dy)
        return [y.detach(), rows.grad, *(t.grad for t in leaves.values())]

    want = results(lambda f, rows: f(rows))
    with torch.no_grad():
        alone = layer(x, p, case, None, group)[0]
    report = {"no_grad": same_bytes(alone, want[0])}
    for reentrant in (False, True):
        got = stored(lambda f, rows, r=reentrant: checkpoint(f, rows, use_reentrant=r))
        report[f"reentrant {reentrant}"] = all(map(same_bytes, got, want))
    return report


def after_a_refusal(world: int) -> dict:
    """All ranks raise where one refuses, and nothing is left over of it."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x, indices = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int32)
    indices[0, 0] = 2 * world if rank == 1 else 0
    try:
        ck.moe.dispatch(x, indices, 2 * world, group=group)
        said = "nothing"
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    case = cases(world)[0]
    return {"said": said, "differing": differing(case, whole(case), group, rank, world)}


def report(seeds: int) -> dict:
    world = dist.get_world_size()
    report = {"bytes": bytes_compared(world, seeds), "recomputed": recomputed(world)}
    report["refusal"] = after_a_refusal(world)
    return report | {"script": script.compare("cpu", script.listed(world, cpu=True)[:2])}
