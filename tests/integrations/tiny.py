"""A tiny Llama, batches for a policy gradient, and the steps that one process takes alone.

Its sums in front of the head are all ones whose bytes nothing around them changes: `ck.patch` makes
each linear layer and each norm one autograd node.  (LlamaRMSNorm is several, whose gradients meet
that of the residual in an order that hooks of ZeRO-3 change: three terms, other bits.)
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cute_kernels as ck
from cute_kernels.integrations import gathering
from cute_kernels.integrations.publish import read_weights
from cute_kernels.integrations.token_logps import policy_loss, token_logps
from cute_kernels.runtime import data_parallel
from tests.contract import same_bytes

VOCAB, WIDTH, RANKS = 96, 64, 2
RATE, KL = 1e-3, 0.1


def llama(tied: bool = False, seed: int = 0, **settings: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    given = {"vocab_size": VOCAB, "tie_word_embeddings": tied, **sizes, **heads, **settings}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**given))
    # fp32 has no attention of ours; the head is what is tested.
    ck.patch(model.model, attention=False)
    return model


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, foreach=False)


def batch(step: int, length: int = 11, rows: int = 2 * RANKS) -> dict[str, torch.Tensor]:
    """All ranks' rows: ids, padding on the left of one, a mask, advantages, old log-probs."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    seen = torch.ones(rows, length, dtype=torch.long)
    seen[1, :3] = 0
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, :4] = 0
    return {
        "input_ids": ids,
        "attention_mask": seen,
        "mask": mask,
        "advantages": torch.randn(rows, generator=generator),
        "old_logps": -4.5 + torch.randn(rows, length - 1, generator=generator) / 4,
    }


def part(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """One rank's rows."""
    return {name: t.chunk(RANKS)[rank] for name, t in whole.items()}


def learnt(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens of ``input_ids[:, 1:]`` that count: neither they nor those before are padding."""
    seen = batch["attention_mask"] != 0
    return (batch["mask"][:, 1:] != 0) & seen[:, 1:] & seen[:, :-1]


def scored(
    model: torch.nn.Module, reference: torch.nn.Module, half: dict[str, torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, loss) of one rank's rows: clipped ratios, and the KL to a reference."""
    inputs = {"input_ids": half["input_ids"], "attention_mask": half["attention_mask"]}
    with torch.no_grad():
        away = token_logps(reference, **inputs)
    logps = token_logps(model, **inputs)
    away = away - logps
    ratio = (logps - half["old_logps"]).exp()
    advantages = half["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = KL * (away.exp() - away - 1) - gain
    return logps.detach(), loss[learnt(half)].sum() / count


def alone(model: torch.nn.Module, steps: int) -> Iterator[tuple[list, dict, torch.nn.Module]]:
    """Steps of one process: both ranks' halves, one after the other, added in rank order.

    Yields (log-probs of each half, gradients by name, the model after the step).
    """
    reference = copy.deepcopy(model).eval()
    steady = optimizer(model)
    for step in range(steps):
        whole = batch(step)
        count = int(learnt(whole).sum())
        logps, parts = [], []
        for rank in range(RANKS):
            half = part(whole, rank)
            new, loss = scored(model, reference, half, count)
            logps.append(new)
            parts.append(torch.autograd.grad(loss * RANKS, list(model.parameters())))
        gradients = {}
        for (name, parameter), *halves in zip(model.named_parameters(), *parts, strict=True):
            parameter.grad = (halves[0] + halves[1]) / RANKS
            gradients[name] = parameter.grad.clone()
        steady.step()
        steady.zero_grad()
        yield logps, gradients, model


def fused(model: torch.nn.Module, half: dict[str, torch.Tensor]):
    """`token_logps.policy_loss` of one rank's rows, on policy."""
    scored = {"attention_mask": half["attention_mask"]}
    with torch.no_grad():
        old = token_logps(model, half["input_ids"], **scored)
    scored |= {"advantages": half["advantages"], "mask": learnt(half), "old_logp": old}
    return policy_loss(model, half["input_ids"], loss="ppo", **scored)


# ---- a sharded model, rank by rank, against one process -----------------------------------------


class Sharded(NamedTuple):
    """A rank's model, whose parameters it shares with the others, and what it does with it."""

    model: torch.nn.Module
    backward: Callable[[torch.Tensor], dict[str, torch.Tensor]]  # of a loss -> whole gradients
    step: Callable[[], object]  # of the optimizer
    weights: Callable[[], dict[str, torch.Tensor]]  # whole, by name
    left_over: Callable[[], list[str]]  # parameters of which it holds more than its part


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, t in want.items() if not same_bytes(got[name].view(t.shape), t)]


def differing_steps(
    shard: Sharded, single: torch.nn.Module, rank: int, steps: int, killed: int | None = None
) -> list[str]:
    """Names of what differs from one process's steps, and of whole parameters that are kept.

    killed: a rank that kills itself in the middle of the first step.
    """
    reference, wrong = copy.deepcopy(single), []
    for step, (logps, gradients, after) in enumerate(alone(single, steps)):
        whole = batch(step)
        count = int(learnt(whole).sum())
        new, loss = scored(shard.model, reference, part(whole, rank), count)
        wrong += shard.left_over()
        reduced = shard.backward(loss * RANKS)
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        shard.step()
        wrong += shard.left_over()
        wrong += [f"step {step}: log-probs"] * (not same_bytes(new, logps[rank]))
        wrong += [f"step {step}: gradient of {name}" for name in differing(reduced, gradients)]
        names = differing(shard.weights(), dict(after.named_parameters()))
        wrong += [f"step {step}: {name}" for name in names]
    return wrong


def kill_one(sharded: Callable[[torch.nn.Module], Sharded]) -> None:
    """Rank 1 kills itself in the middle of a step."""
    single = llama()
    differing_steps(sharded(copy.deepcopy(single)), single, dist.get_rank(), 3, killed=1)


def differing_policy_loss(shard: Sharded, single: torch.nn.Module, rank: int) -> list[str]:
    """Names of what differs in `policy_loss` of each rank's half from one process's."""
    outs = [fused(single, part(batch(9), each)) for each in range(RANKS)]
    halves = [torch.autograd.grad(out.loss, list(single.parameters())) for out in outs]
    pairs = zip(single.named_parameters(), *halves, strict=True)
    means = {name: (a + b) / RANKS for (name, _), a, b in pairs}
    out = fused(shard.model, part(batch(9), rank))
    kept = shard.left_over()
    gradients = shard.backward(out.loss)
    wrong = [] if out.metrics.ratio.item() == 1.0 else ["ratio"]
    wrong += [] if same_bytes(out.logp, outs[rank].logp) else ["log-probs"]
    return wrong + differing(gradients, means) + kept + shard.left_over()


def check_training(shard: Sharded, single: torch.nn.Module, rank: int, steps: int) -> None:
    """Steps, an evaluation and a policy loss have one process's bytes; nothing whole is kept."""
    wrong = differing_steps(shard, single, rank, steps)
    ids = part(batch(7), rank)["input_ids"]
    options = {"return_entropy": True, "temperature": 0.7}
    shard.model.eval()
    with torch.no_grad():
        got, want = (token_logps(m, ids, **options) for m in (shard.model, single.eval()))
    wrong += ["evaluation"] * (not all(map(same_bytes, got, want))) + shard.left_over()
    shard.model.train()
    wrong += differing_policy_loss(shard, single.train(), rank)
    assert not wrong, wrong


def check_publication(shard: Sharded, single: torch.nn.Module, publish, folder, stage: int) -> None:
    """All ranks publish the whole weights, and have what rank 0 wrote."""
    ids = {"linear_logp": ck.contract_id("linear_logp", "cpu", torch.float32)}
    claims = {"zero_stage": 9, "world_size": 9, "step": 3}
    manifest_of_rank = publish(folder, shard.model, claims, contract_ids=ids)
    dist.barrier()
    tensors, manifest = read_weights(folder, contract_ids=ids)
    want = single.state_dict()
    assert manifest == manifest_of_rank and manifest.metadata == {"step": 3}
    assert tensors.keys() == want.keys() and not differing(tensors, want)
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (stage, RANKS, 0)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    assert manifest.tied == (tied if single.config.tie_word_embeddings else {})
    assert not shard.left_over()


# ---- models that FSDP2 and DeepSpeed shard ------------------------------------------------------


def fully_sharded(model: torch.nn.Module, which: str, device: str = "cpu") -> Sharded:
    """A model of which ``which`` modules are sharded by themselves besides the whole."""
    mesh = init_device_mesh(device, (RANKS,))
    if "layers" in which:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    if "head" in which:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    steady = optimizer(model)

    def backward(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    def step() -> None:
        steady.step()
        steady.zero_grad()

    return Sharded(model, backward, step, lambda: gathered(model), lambda: left_over_of_fsdp(model))


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def left_over_of_fsdp(model: torch.nn.Module) -> list[str]:
    """Parameters of which this rank holds more than its part, and memory of whole ones."""
    names = []
    for name, p in model.named_parameters():
        if not hasattr(p, "to_local") or p.to_local().numel() * RANKS != p.numel():
            names.append(name)
    mine = {id(p) for p in model.parameters()}
    for one in data_parallel._gathered(sys.modules[data_parallel.FSDP2_STATES]):
        whole = getattr(one, "_unsharded_param", None)
        if id(one.sharded_param) in mine and whole is not None:
            names += ["a whole one"] * (whole.untyped_storage().size() > 0)
    return names


def engine_of(model: torch.nn.Module, zero: object, **more: object):
    os.environ |= {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(RANKS)}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank()))
    import deepspeed
    from deepspeed.comm import torch as transport

    # A kernel for all_reduce in shared memory, which is compiled at first use (30 s).
    transport.build_shm_op = lambda: None
    if zero:
        # DeepSpeed would keep as small a model as this whole, for the next use.
        names = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero = {"stage": zero} | {f"stage3_{name}": 0 for name in names}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Its default of 1 would scale them.
        "gradient_clipping": 0.0,
        **more,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(model), config=config, dist_init_required=False
    )
    return engine


def left_over(module: torch.nn.Module) -> list[str]:
    """Parameters of ZeRO's stage 3 that are still there."""
    return [name for name, p in module.named_parameters() if p.numel()]


def zero_sharded(model: torch.nn.Module, stage: int) -> Sharded:
    """A model in a DeepSpeed engine."""
    engine = engine_of(model, stage or False)
    module = engine.module

    def backward(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        engine.backward(loss)
        return {name: safe_get_full_grad(p).clone() for name, p in module.named_parameters()}

    def weights() -> dict[str, torch.Tensor]:
        with gathering.whole(module.parameters()):
            return {name: p.detach().clone() for name, p in module.named_parameters()}

    kept = left_over if stage == 3 else lambda module: []
    return Sharded(engine, backward, engine.step, weights, lambda: kept(module))
