"""One of two ranks of a patched model in DeepSpeed's ZeRO-3, over gloo on a CPU.

`report` has what each does; test_zero.py compares.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.integrations import tiny
from tests.integrations import zero_rank as engines
from tests.model.patch import families

RANKS = 2
TOKENS = families.ids(4, 24)


def fresh() -> torch.nn.Module:
    """In fp32, so that the engine's gradients are those of autograd; torch's attention is left."""
    return families.model("qwen3").float().train()


def stepped(run, tokens: torch.Tensor) -> torch.Tensor:
    return run(tokens, labels=tokens, use_cache=False).loss


def alone() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Each half's loss, and the mean of their gradients, by one process."""
    net, losses, halves = fresh(), [], []
    ck.patch(net)
    for half in TOKENS.chunk(RANKS):
        net.zero_grad()
        losses.append(stepped(net, half))
        losses[-1].backward()
        halves.append({n: p.grad.clone() for n, p in net.named_parameters()})
    return losses, {n: (halves[0][n] + halves[1][n]) / RANKS for n in halves[0]}


def ran(order: str, rank: int) -> dict:
    """Patched before the engine or after it."""
    losses, gradients = alone()
    net = fresh()
    if order == "patch first":
        ck.patch(net)
    engine = engines.engine_of(net, 3)
    if order == "engine first":
        ck.patch(engine)
    loss = stepped(engine, TOKENS.chunk(RANKS)[rank])
    between = engines.left_over(net)
    engine.backward(loss)
    from deepspeed.utils import safe_get_full_grad

    got = {name: safe_get_full_grad(p).clone() for name, p in net.named_parameters()}
    engine.step()
    after = stepped(engine, TOKENS.chunk(RANKS)[rank])
    report = {
        "loss": same_bytes(loss.detach(), losses[rank].detach()),
        "differing": tiny.differing(got, gradients),
        "kinds": [state.kind_of(m) for m in (net.lm_head, net.model.norm)],
        "between": between,
        "learnt": after.item() < loss.item(),
    }
    engine.destroy()
    return report


def report() -> list[dict]:
    return [ran(order, dist.get_rank()) for order in ("patch first", "engine first")]
