"""Policy steps with a reference under DeepSpeed, ZeRO-3; then the weights are published and read.

torchrun --nproc-per-node 2 examples/recipes/deepspeed_zero3.py
"""

import gc

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import cute_kernels as ck
from cute_kernels.integrations.deepspeed import publish_weights
from cute_kernels.integrations.publish import read_weights
from cute_kernels.integrations.transformers import policy_loss, token_logps


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config)
    reference = AutoModelForCausalLM.from_config(config)
    reference.load_state_dict(model.state_dict())

    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
    )
    reference = reference.to(engine.device, engine.module.dtype).eval()

    rank = torch.distributed.get_rank()
    draw = torch.Generator().manual_seed(rank)
    for _ in range(2):
        input_ids = torch.randint(0, 512, (2, 16), generator=draw).to(engine.device)
        mask = torch.zeros(2, 15, device=engine.device)
        mask[:, 7:] = 1  # the answer's tokens
        with torch.no_grad():
            old = token_logps(engine, input_ids)  # in a trainer: when the tokens were drawn
            ref = token_logps(reference, input_ids)
        gains = torch.randn(2, generator=draw).to(engine.device)
        out = policy_loss(
            engine,
            input_ids,
            loss="grpo",
            advantages=gains,
            old_logp=old,
            mask=mask,
            reference_logp=ref,
            kl_weight=0.05,
        )
        engine.backward(out.loss)
        engine.step()

    # All ranks call it; rank 0 writes a new version, whole or not at all.
    ids = {"linear_logp": ck.contract_id("linear_logp", engine.device, engine.module.dtype)}
    publish_weights("weights", engine, {"step": 2}, contract_ids=ids)
    torch.distributed.barrier()

    # A rollout engine: every byte is verified, and so is that it computes as the trainer does.
    tensors, manifest = read_weights("weights", contract_ids=ids)
    assert tensors and manifest.version == 0 and manifest.metadata["step"] == 2


main()
# Modules and their hooks are cycles; what is left of them holds the group, whose threads then end
# the process by an abort.
gc.collect()
torch.distributed.destroy_process_group()
