"""A policy step, an evaluation and a loss of one's own under FSDP2; then the weights are published.

torchrun --nproc-per-node 2 examples/recipes/fsdp2.py
"""

import gc

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import cute_kernels as ck
from cute_kernels.integrations.fsdp import publish_weights
from cute_kernels.integrations.transformers import policy_loss, token_logps


def main() -> None:
    torch.distributed.init_process_group()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = torch.distributed.init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    input_ids = torch.randint(0, 512, (2, 16), generator=draw).to(device)
    policy_loss(
        model, input_ids, loss="grpo", advantages=torch.ones(2, device=device)
    ).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    # An evaluation, and a loss of your own: token_logps calls the sharded model.
    with torch.no_grad():
        logps = token_logps(model, input_ids)
    assert logps.shape == (2, 15)
    token_logps(model, input_ids).mean().backward()
    optimizer.zero_grad()

    ids = {"linear_logp": ck.contract_id("linear_logp", device, torch.float32)}
    publish_weights("weights", model, contract_ids=ids)


main()
# Modules and their hooks are cycles; what is left of them holds the group, whose threads then end
# the process by an abort.
gc.collect()
torch.distributed.destroy_process_group()
