"""A Llama of random weights, as transformers has it and patched, and the steps that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Who runs: transformers with torch's ops, the same compiled, patched, patched and compiled.
SYSTEMS = ("torch", "torch_compiled", "ours", "ours_compiled")


@dataclass(frozen=True)
class Size:
    """Size of the model, which decides the parameter count; heads of 64."""

    hidden: int = 2048
    inner: int = 8192
    layers: int = 16
    heads: int = 32
    key_heads: int = 8
    vocab: int = 32000
    longest: int = 4096

    @property
    def label(self) -> str:
        return f"Llama {self.hidden}x{self.layers}"


def built(size: Size, device: str, patched: bool) -> torch.nn.Module:
    """Build the model in bf16, patched or not; both have the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.longest,
        initializer_range=size.hidden**-0.5,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    # Weights are drawn where they stay: a CPU takes half a minute for them.
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if patched:
        import cute_kernels as ck

        ck.patch(model, main_grad=True, strict=True)
    return model


def _as(system: str, model: torch.nn.Module) -> Callable:
    """The model as a system runs it; ours is compiled to the bytes of eager."""
    if not system.endswith("compiled"):
        return model
    import cute_kernels as ck

    return torch.compile(model, options=ck.compile_options() if system == "ours_compiled" else None)


def training(size: Size, device: str, system: str, batch: int, length: int) -> Callable:
    """One forward and backward of a batch of random tokens; no optimizer."""
    model = built(size, device, system.startswith("ours")).train()
    run = _as(system, model)
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, size.vocab, (batch, length), generator=generator, device=device)

    def step() -> torch.Tensor:
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def _decoding(size: Size, device: str, system: str, shape: tuple[int, int]) -> tuple:
    """A model, the same as a system runs it, and random tokens."""
    model = built(size, device, system.startswith("ours")).eval()
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(0, size.vocab, shape, generator=generator, device=device)
    return model, _as(system, model), ids


def generating(size: Size, device: str, system: str, batch: int, past: int) -> Callable:
    """One token more for each sequence, behind ``past`` tokens in a dynamic cache."""
    from transformers import DynamicCache

    model, run, prompt = _decoding(size, device, system, (batch, past))
    token = prompt[:, :1].contiguous()
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def step() -> torch.Tensor:
        outputs = run(input_ids=token, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return outputs.logits

    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache, use_cache=True)
    return step


def replaying(size: Size, device: str, system: str, batch: int, past: int) -> Callable:
    """Decode as `generating` in a CUDA graph, on a static cache with room for 128 tokens more.

    The step's ``in_one_pass()`` gives the logits of its token from one pass over all tokens.
    """
    from transformers import StaticCache

    model, run, ids = _decoding(size, device, system, (batch, past + 1))
    token = ids[:, past:].contiguous()
    cache = StaticCache(config=model.config, max_cache_len=past + 128)

    @torch.no_grad()
    def decode() -> torch.Tensor:
        logits = run(input_ids=token, past_key_values=cache, use_cache=True).logits
        # The next replay makes the same token again.
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)
        return logits

    with torch.no_grad():
        model(input_ids=ids[:, :past], past_key_values=cache, use_cache=True, logits_to_keep=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode()

    def step() -> torch.Tensor:
        graph.replay()
        return logits

    @torch.no_grad()
    def in_one_pass() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    step.in_one_pass = in_one_pass
    # The graph knows the addresses of these, and nobody else keeps them.
    step.used = (cache, token)
    return step
