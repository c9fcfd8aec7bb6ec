"""One of two ranks of a patched model under FSDP2 and DDP, or under ZeRO-3, over gloo on a CPU.

test_engines.py runs `report` on both.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  (before ranks are forked)

import cute_kernels as ck
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.model.patch import families

RANKS = 2
TOKENS = families.ids(4, 24)
ORDERS = ("patch first", "engine first")


def fresh(zero: bool, name: str = "qwen3") -> torch.nn.Module:
    """For ZeRO in fp32, so that the engine's gradients are those of autograd."""
    net = families.model(name)
    return net.float() if zero else net


def stepped(run, tokens: torch.Tensor) -> torch.Tensor:
    return run.train()(tokens, labels=tokens, use_cache=False).loss


@functools.cache
def alone(
    zero: bool, name: str = "qwen3"
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits, each half's loss, and the mean of their gradients, by one process."""
    net, losses, halves = fresh(zero, name), [], []
    ck.patch(net)
    logits = families.logits(net, TOKENS)
    for half in TOKENS.chunk(RANKS):
        net.zero_grad()
        loss = stepped(net, half)
        loss.backward()
        losses.append(loss.detach())
        halves.append({n: p.grad.clone() for n, p in net.named_parameters()})
    return logits, losses, {n: (halves[0][n] + halves[1][n]) / RANKS for n in halves[0]}


def failing(want: tuple, gradients: dict[str, torch.Tensor], **checks: bool) -> list[str]:
    """Names of checks that do not hold, and of gradients that are not those of one process."""
    wrong = [name for name, right in checks.items() if not right]
    want = want[2]
    return wrong + [n for n in want if not same_bytes(gradients[n], want[n])]


def compared(
    net: torch.nn.Module, run: torch.nn.Module, rank: int, name: str = "qwen3", **checks: bool
) -> list[str]:
    """Logits, loss and gradients of this rank's half that are not those of one process."""
    logits, losses, _ = alone(False, name)
    half = TOKENS.chunk(RANKS)[rank]
    checks["logits"] = same_bytes(
        families.logits(run.eval(), half), logits.chunk(RANKS)[rank].contiguous()
    )
    loss = stepped(run, half)
    loss.backward()
    checks["loss"] = same_bytes(loss.detach(), losses[rank])
    whole = {
        n: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for n, p in net.named_parameters()
    }
    return failing(alone(False, name), whole, **checks)


def under_ddp(rank: int) -> list[str]:
    net = fresh(False)
    ck.patch(net, strict=True)
    return compared(net, DistributedDataParallel(net), rank)


def under_fsdp(rank: int, order: str) -> list[str]:
    """FSDP2's class stays outermost, and unpatch takes ours out below it."""
    net, mesh = fresh(False), init_device_mesh("cpu", (RANKS,))
    if order == "patch first":
        ck.patch(net, strict=True)
    linear = net.model.layers[0].mlp.up_proj
    for layer in net.model.layers:
        fully_shard(layer.mlp.up_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(net.lm_head, mesh=mesh)
    net = fully_shard(net, mesh=mesh)
    if order == "engine first":
        ck.patch(net, strict=True)
    wrong = compared(
        net,
        net,
        rank,
        kinds=[state.kind_of(linear), state.kind_of(net.lm_head)] == ["linear", "head"],
        classes=isinstance(linear, FSDPModule) and isinstance(linear, torch.nn.Linear),
        outermost=type(linear).__name__ == "FSDPLinear",
    )
    ck.unpatch(net)
    left = state.kind_of(linear) is None and isinstance(linear, FSDPModule)
    families.logits(net, TOKENS.chunk(RANKS)[rank])
    return wrong + ["unpatched"] * (not left)


def of_hybrid() -> list[str]:
    """Under FSDP2, a mixer's convolution gathered by itself."""
    rank = dist.get_rank()
    net, mesh = fresh(False, "olmo_hybrid"), init_device_mesh("cpu", (RANKS,))
    ck.patch(net, strict=True)
    mixer = net.model.layers[0].linear_attn
    fully_shard(mixer.conv1d, mesh=mesh)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    net = fully_shard(net, mesh=mesh)
    kinds = [state.kind_of(m) for m in (mixer, mixer.conv1d, mixer.o_norm)]
    ours = kinds == ["gated_delta_net", "causal_conv1d", "gated_rms_norm"]
    return compared(net, net, rank, "olmo_hybrid", kinds=ours)


def under_zero(rank: int, order: str) -> list[str]:
    """Torch's attention is left in fp32; every parameter is in parts in between."""
    from tests.integrations import tiny as engines

    _, losses, _ = alone(True)
    net = fresh(True).train()
    if order == "patch first":
        ck.patch(net)
    engine = engines.engine_of(net, 3)
    if order == "engine first":
        ck.patch(engine)
    half = TOKENS.chunk(RANKS)[rank]
    loss = stepped(engine, half)
    between = engines.left_over(net)
    engine.backward(loss)
    from deepspeed.utils import safe_get_full_grad

    gradients = {name: safe_get_full_grad(p).clone() for name, p in net.named_parameters()}
    engine.step()
    wrong = failing(
        alone(True),
        gradients,
        loss=same_bytes(loss.detach(), losses[rank]),
        kinds=[state.kind_of(m) for m in (net.lm_head, net.model.norm)] == ["head", "rms_norm"],
        between=between == [],
        learnt=stepped(engine, half).item() < loss.item(),
    )
    engine.destroy()
    return wrong


def report(zero: bool) -> dict[str, list[str]]:
    """What is wrong on this rank, by the way that a model is patched and wrapped."""
    under, rank = under_zero if zero else under_fsdp, dist.get_rank()
    wrong = {order: under(rank, order) for order in ORDERS}
    return wrong if zero else wrong | {"ddp": under_ddp(rank)}
