"""One of three ranks of torch's data parallel wrappers, over gloo on a CPU.

`report` has what was refused, and digests of what was computed; test_data_parallel.py compares.
"""

from __future__ import annotations

import hashlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, CuteKernelsError
from cute_kernels.gemm import op
from cute_kernels.integrations.main_grad import MainGradAdamW, reduce_main_grads
from cute_kernels.runtime import plan_cache, process_groups

WORLD, N, K, TOKENS = 3, 24, 40, 48


class Linear(torch.nn.Linear):
    """The layer of the README, and one that is given its gradient's memory by hand."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = getattr(self.weight, "main_grad", None) if self.state is None else self.state
        return ck.linear(x, self.weight, None, main_grad=state)


def layer() -> Linear:
    torch.manual_seed(1)
    return Linear(K, N, bias=False)


def tokens(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(rank))


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def alone(rank: int) -> torch.Tensor:
    """The main_grad of one rank, without a wrapper."""
    model = layer()
    model.weight.main_grad = torch.zeros(N, K)
    loss(model(tokens(rank))).backward()
    return model.weight.main_grad


def digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest()


def refusal(call) -> str:
    try:
        call()
    except ArgumentValueError as error:
        return str(error)
    return ""


def ddp_refused(rank: int) -> dict:
    model = layer()
    model.weight.main_grad = torch.zeros(N, K)
    wrapped = DDP(model)
    message = refusal(lambda: wrapped(tokens(rank)))
    cast = refusal(lambda: autocast(wrapped, tokens(rank)))
    with torch.no_grad():
        allowed = refusal(lambda: wrapped(tokens(rank)))
    return {
        "said": message,
        "cast": cast,
        "no_grad": allowed,
        "untouched": not model.weight.main_grad.any(),
    }


def autocast(module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


def reduced(rank: int, cuts: list[int]) -> torch.Tensor:
    """main_grad after the recipe of docs/gemm.md, of micro-batches of so many tokens."""
    model = layer()
    model.weight.main_grad = torch.zeros(N, K)
    wrapped = DDP(model)
    with wrapped.no_sync():
        for piece in tokens(rank).split(cuts):
            loss(wrapped(piece)).backward()
    assert model.weight.grad is None
    reduce_main_grads(model.parameters(), dist.group.WORLD)
    return model.weight.main_grad


def ddp_recipe(rank: int) -> dict:
    """The mean in the order of ranks, for any micro-batches; and the mutant: in another order."""
    cuts = [[48], [16, 32], [32, 16], [16, 16, 16]]
    means = [digest(reduced(rank, cuts[(rank + shift) % 4])) for shift in range(4)]
    first, *others = (alone(each) for each in range(WORLD))
    for part in others:
        first += part
    theirs = process_groups.start_all_to_all

    def arrived_last_first(out, mine, received, sent, group):
        def finish():
            wait()
            out.copy_(out.view(WORLD, -1).flip(0).reshape(-1))

        wait = theirs(out, mine, received, sent, group)
        return finish

    with mock.patch.object(process_groups, "start_all_to_all", arrived_last_first):
        mutant = digest(reduced(rank, cuts[0]))
    return {"means": means, "want": digest(first * (1 / WORLD)), "mutant": mutant}


def optimizer_steps(rank: int) -> dict:
    """Two steps of `MainGradAdamW` over ranks whose micro-batches differ; one weight has a grad."""
    found = []
    for cuts in ([48], [16, 32]):
        model = layer()
        model.other = torch.nn.Parameter(torch.ones(N))
        optimizer = MainGradAdamW(model.parameters(), 1.0, group=dist.group.WORLD, lr=0.1)
        for step in range(2):
            for piece in tokens(rank + step).split(cuts):
                loss(model(piece)).backward()
            model.other.grad = torch.arange(N) + float(rank)
            optimizer.step()
        assert not model.weight.main_grad.any() and model.other.grad is None
        assert not (model.other == 1).any()
        found.append(digest(model.weight))
    return {"weights": found, "start": digest(layer().weight)}


def main_grads_that_differ(rank: int) -> dict:
    """Ranks with other weights, and a rank without a main_grad, raise together."""
    said = []
    for attribute, size in ((rank > 0, N), (True, N + rank)):
        weight = torch.nn.Parameter(torch.ones(size))
        if attribute:
            weight.main_grad = torch.zeros(size)
        try:
            reduce_main_grads([weight], dist.group.WORLD)
        except CuteKernelsError as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said}


def ddp_elsewhere(rank: int) -> dict:
    """A wrapper that leaves this parameter alone, and one that is not running."""
    model = torch.nn.Sequential(layer(), torch.nn.Linear(N, 3))
    model[0].weight.main_grad = torch.zeros(N, K)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    loss(DDP(model)(tokens(rank))).backward()
    return {"digest": digest(model[0].weight.main_grad), "want": want(model, rank)}


def want(made, rank: int) -> str:
    state = torch.zeros(N, K)
    loss(made[1](ck.linear(tokens(rank), made[0].weight, main_grad=state))).backward()
    return digest(state)


def fsdp_refused(rank: int) -> dict:
    """Refusals of fully_shard: a main_grad given by hand, and one set on the parameter."""
    model = layer()
    fully_shard(model)
    model.state = torch.zeros(N, K)
    without_grad = refusal(lambda: model(tokens(rank)))
    model = layer()
    fully_shard(model)
    model.weight.main_grad = torch.zeros(N, K)
    lost = refusal(lambda: model(tokens(rank)))
    return {"given": without_grad, "lost": lost}


def fsdp_without(rank: int) -> dict:
    model = layer()
    fully_shard(model)
    loss(model(tokens(rank))).backward()
    grad = model.weight.grad.full_tensor()
    want = torch.zeros(N, K)
    for each in range(WORLD):
        other = layer()
        loss(other(tokens(each))).backward()
        want += other.weight.grad / WORLD
    return {"error": (grad - want).abs().max().item(), "size": want.abs().max().item()}


class Plain(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ck.linear(x, self.weight)


def fsdp_with_plans(rank: int) -> dict:
    """Three steps, whose later ones run cached plans as on a GPU; then a main_grad is set."""

    def steps() -> list[str]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(Plain(K, N, bias=False), Plain(N, N, bias=False))
        for part in (*model, model):
            fully_shard(part)
        optimizer, recorded = torch.optim.SGD(model.parameters(), lr=0.01), []
        for step in range(3):
            loss(model(tokens(rank + step))).backward()
            recorded += [digest(p.grad.to_local()) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        model[0].weight.main_grad = torch.zeros(N, K)
        return [*recorded, refusal(lambda: model(tokens(rank)))]

    planned_anew = steps()
    calls, checked = [0], op.linear.planned.check

    def counted(*args, **options):
        calls[0] += 1
        return checked(*args, **options)

    with (
        mock.patch.object(plan_cache, "on_gpu", lambda t: True),
        mock.patch.object(op.linear.planned, "check", counted),
    ):
        cached = steps()
    return {"steps": planned_anew, "cached": cached, "checked": calls[0]}


CASES = (
    ddp_refused,
    ddp_recipe,
    optimizer_steps,
    main_grads_that_differ,
    ddp_elsewhere,
    fsdp_refused,
    fsdp_without,
    fsdp_with_plans,
)


def report() -> dict:
    return {case.__name__: case(dist.get_rank()) for case in CASES}
