"""Times of a small training step: python -m perf.model.step

A Llama of 8 layers (hidden 2048) on 2 sequences of 1024 tokens, patched and not, in turns in one
process: milliseconds of the host in the forward and in the backward, and of the whole step.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import transformers

import cute_kernels as ck

BATCH, LENGTH, LAYERS = 2, 1024, 8
WARM_UP, STEPS = 3, 25


def model() -> torch.nn.Module:
    """The same random Llama at every call, in bf16 on the GPU."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return net.train()


def step(net: torch.nn.Module, ids: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of the host in the forward, in the backward, and of both with the GPU's work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = net(ids, labels=ids, use_cache=False).loss
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    for parameter in net.parameters():
        parameter.grad = None
    return forward - start, backward - forward, end - start


def main() -> None:
    """Print medians of each system, in milliseconds."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(32000, (BATCH, LENGTH), device="cuda", generator=generator)
    nets = {"torch": model(), "ours": model()}
    ck.patch(nets["ours"], strict=True)
    times = {name: [] for name in nets}
    for i in range(WARM_UP + STEPS):
        for name, net in nets.items():
            seconds = step(net, ids)
            if i >= WARM_UP:
                times[name].append(seconds)
    names = ("forward_ms", "backward_ms", "step_ms")
    for name, samples in times.items():
        medians = (1e3 * statistics.median(column) for column in zip(*samples, strict=True))
        result = dict(zip(names, (round(ms, 2) for ms in medians), strict=True))
        print(json.dumps({"system": name, **result, "gpu": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
