"""One of two ranks of DeepSpeed engines, over gloo on a CPU.

``python -m tests.integrations.zero_rank RANK STORE`` prints one JSON object; test_deepspeed.py
starts both.  ``KILL`` in the environment: rank 1 kills itself in the middle of a step of stage 3.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, ManifestError
from cute_kernels.integrations import deepspeed as ours
from cute_kernels.integrations import gathering, publish, sharded_head
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.logp.api import linear_logp
from tests.contract import same_bytes
from tests.integrations import tiny
from tests.ranks import joined

STEPS = int(os.environ.get("STEPS", "3"))
#: (stage or what a config has in its place, tied head)
CASES = [(False, False), (1, False), (2, False), (3, False), (3, True), (2, True)]


def engine_of(model: torch.nn.Module, zero: object, **more: object):
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
        model=model, optimizer=tiny.optimizer(model), config=config, dist_init_required=False
    )
    return engine


def mixed(zero: int, how: str, rank: int) -> dict:
    """bf16 weights, or autocast; with checkpointing, and two batches for one step."""
    model = tiny.llama().train()
    model.gradient_checkpointing_enable()
    single, rotary = copy.deepcopy(model), copy.deepcopy(model.model.rotary_emb)
    if how == "bf16":
        # DeepSpeed casts parameters, and leaves this buffer.
        single.bfloat16().model.rotary_emb = rotary
    asked = {"enabled": True} if how == "bf16" else {"enabled": True, "dtype": "bfloat16"}
    engine = engine_of(model, zero, gradient_accumulation_steps=2, **{how: asked})
    half = tiny.part(tiny.batch(0), rank)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how != "bf16"):
        want, got = (
            token_logps(m, half["input_ids"], attention_mask=half["attention_mask"])
            for m in (single, engine)
        )
    losses = []
    for _ in range(3):
        mask = half["attention_mask"]
        loss = -token_logps(engine, half["input_ids"], attention_mask=mask).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    kept = left_over(engine.module) if zero == 3 else []
    engine.destroy()
    return {"case": [zero, how], "same": same_bytes(got, want), "losses": losses, "kept": kept}


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        with gathering.whole((parameter,)):
            found[name] = parameter.detach().clone()
    return found


def left_over(module: torch.nn.Module) -> list[str]:
    """Parameters of stage 3 that are still there."""
    return [name for name, p in module.named_parameters() if p.numel()]


def trained(zero: object, tied: bool, rank: int, folder: Path) -> dict:
    """Steps against one process's, byte for byte; releases; an evaluation; publication."""
    start = tiny.llama(tied)
    single = copy.deepcopy(start)
    engine = engine_of(start, zero)
    stage = ours.zero_stage(engine)
    shard = tiny.Sharded(
        engine,
        functools.partial(backward, engine),
        engine.step,
        lambda: whole(engine.module),
        lambda: left_over(engine.module) if stage == 3 else [],
    )
    report = {"stage": stage, **tiny.trained(shard, single, rank, STEPS)}
    report["evaluation"] = evaluated(engine, single, rank)
    report["kept"] += shard.left_over()
    if stage == 3:
        report["direct"] = direct(engine, single)
    report["refused"] = refused(engine)
    report["published"] = published(engine, single, folder)
    report["fused"] = tiny.differing_policy_loss(shard, single, rank)
    engine.destroy()
    return report


def backward(engine, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of all ranks, by name."""
    from deepspeed.utils import safe_get_full_grad

    engine.backward(loss)
    named = engine.module.named_parameters()
    return {name: safe_get_full_grad(p).clone() for name, p in named}


def evaluated(engine, single, rank: int) -> list[str]:
    half = tiny.part(tiny.batch(7), rank)
    engine.eval()
    with torch.no_grad():
        got, want = (
            token_logps(m, half["input_ids"], return_entropy=True, temperature=0.7)
            for m in (engine, single)
        )
    engine.train()
    return [
        n for n, a, b in zip(("logp", "entropy"), got, want, strict=True) if not same_bytes(a, b)
    ]


def direct(engine, single) -> dict:
    """The head by itself, with nobody's hooks: gathered around its forward and its backward."""
    from deepspeed import zero

    gathers = []
    true = zero.GatheredParameters

    def counted(parameters, **options):
        gathers.append(len(parameters))
        return true(parameters, **options)

    zero.GatheredParameters = counted
    head, other = engine.module.lm_head, single.lm_head
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 5, tiny.WIDTH, generator=generator).requires_grad_()
    target = torch.randint(0, tiny.VOCAB, (2, 5), generator=generator)
    target[0, 1] = -100
    scoring = sharded_head.Scoring(return_entropy=True, softcap=5.0)
    upstream = [torch.randn(2, 5, generator=generator) for _ in range(2)]

    def run(module, held) -> tuple:
        weight = module.weight
        if held:
            out = sharded_head.head_logp(module, hidden, target, scoring)
        else:
            out = linear_logp(hidden, weight, target, **vars(scoring))
        sizes.append(weight.numel())
        gradients = torch.autograd.grad(out, [hidden, weight], upstream)
        sizes.append(weight.numel())
        return *out, *gradients

    sizes = []
    want = run(other, False)
    got, sizes = None, []
    got = run(head, True)
    report = {"sizes": list(sizes), "gathers": list(gathers)}
    report["same"] = [same_bytes(a.detach(), b.detach()) for a, b in zip(got, want, strict=True)]
    # What is there already is neither gathered nor released.
    gathers.clear()
    sizes.clear()
    with true([head.weight]):
        gathers.clear()
        again = run(head, True)
        report["inside"] = {"sizes": list(sizes), "gathers": list(gathers)}
    same = [same_bytes(a.detach(), b.detach()) for a, b in zip(again, want, strict=True)]
    report["same"] += same
    with gathering.whole((head.weight, None, head.weight, engine.module.model.embed_tokens.weight)):
        report["twice"] = list(gathers)
    zero.GatheredParameters = true
    # The mutant: the backward trusts the forward's gather.
    whole_, calls = gathering.whole, []

    def only_in_forward(parameters):
        calls.append(1)
        return whole_(parameters) if len(calls) == 1 else contextlib.nullcontext()

    gathering.whole = only_in_forward
    try:
        mutant = run(head, True)
        same = [same_bytes(a.detach(), b.detach()) for a, b in zip(mutant, want, strict=True)]
        report["mutant"] = "survives" if all(same) else "differs"
    except Exception as error:
        report["mutant"] = f"{type(error).__name__}"
    finally:
        gathering.whole = whole_
    report["after"] = head.weight.numel()
    return report


def refused(engine) -> str:
    """Ids outside of the vocabulary: an error on every rank, before any collective."""
    try:
        token_logps(engine, torch.full((2, 4), tiny.VOCAB))
    except ArgumentValueError as error:
        return str(error)
    return "nothing"


def published(engine, single, folder: Path) -> dict:
    path = folder / f"{ours.zero_stage(engine)}-{single.config.tie_word_embeddings}"
    claims = {"zero_stage": 9, "world_size": 9, "step": STEPS}
    ids = {"linear_logp": ck.contract_id("linear_logp", "cpu", torch.float32)}
    made = ours.publish_weights(path, engine, claims, contract_ids=ids)
    dist.barrier()
    tensors, manifest = publish.read_weights(path, contract_ids=ids)
    want = single.state_dict()
    report = {"manifest": manifest == made, "count": manifest.tensor_count, "tied": manifest.tied}
    report |= {"layout": [manifest.zero_stage, manifest.world_size, manifest.rank]}
    report |= {"metadata": manifest.metadata, "names": sorted(tensors) == sorted(want)}
    report["differing"] = tiny.differing(tensors, want)
    try:
        ours.publish_weights(path, engine, version=0)
        report["again"] = "nothing"
    except ManifestError as error:
        report["again"] = str(error)
    report["kept"] = left_over(engine.module) if ours.zero_stage(engine) == 3 else []
    return report


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tiny.RANKS)}
    with joined(rank, store, tiny.RANKS):
        folder = Path(store).parent
        cases = [(3, False)] if os.environ.get("KILL") else CASES
        reports = [trained(*case, rank, folder) | {"tied": case[1]} for case in cases]
        hows = [] if os.environ.get("KILL") else ["bf16", "torch_autocast"]
        amp = [mixed(zero, how, rank) for zero in (1, 3) for how in hows]
        # Modules and their hooks are cycles, and hold the group.
        gc.collect()
    print(json.dumps({"trained": reports, "mixed": amp}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
