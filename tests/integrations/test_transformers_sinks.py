"""gpt-oss's attention sinks through the integration: values, gradients, bits."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.integrations import transformers as ours
from tests.contract import same_bytes

transformers = pytest.importorskip("transformers")

HEADS, LENGTH, WINDOW = 4, 150, 60


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()


def model(attention: str, dtype: torch.dtype):
    """A layer that slides and one that sees all; sinks that count."""
    config = transformers.GptOssConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 4, HEADS))
    return made.to(dtype)


def layer_results(attention: str, dtype: torch.dtype, index: int):
    """Output of a layer's attention, and the gradients of its input and sinks, in fp64."""
    made = model(attention, dtype)
    layer, inner = made.model.layers[index].self_attn, made.model
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, LENGTH, 128, generator=g).to(torch.bfloat16).to(dtype).requires_grad_()
    positions = torch.arange(LENGTH)[None]
    make = transformers.masking_utils
    make = (make.create_sliding_window_causal_mask, make.create_causal_mask)[index]
    mask = make(made.config, x, None, None, position_ids=positions)
    out, _ = layer(x, inner.rotary_emb(x, positions), mask)
    upstream = torch.randn(out.shape, generator=g).to(dtype)
    grads = torch.autograd.grad(out, (x, layer.sinks), upstream)
    return [t.detach().double() for t in (out, *grads)]


def apart(one, other) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_computes_what_eager_computes(index):
    """Our bf16 against transformers' own in fp32, on one set of weights; 2**-8 is half an ulp."""
    want = layer_results("eager", torch.float32, index)
    assert max(apart(layer_results(ours.NAME, torch.bfloat16, index), want)) < 2.0**-5


def test_sinks_that_are_dropped_are_seen(monkeypatch):
    true = ours.attention

    def without(*args, **others):
        return true(*args, **(others | {"s_aux": others["s_aux"] * 0 - 30}))

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, ours.NAME, without)
    want = layer_results("eager", torch.float32, 1)
    assert max(apart(layer_results(ours.NAME, torch.bfloat16, 1), want)) > 2.0**-4


@torch.no_grad()
def test_decoding_has_the_bytes_of_one_pass():
    """Of the attention; gpt-oss's experts are not ours."""
    made = model(ours.NAME, torch.bfloat16)
    layer = made.model.layers[1].self_attn
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, LENGTH, 64, generator=g).bfloat16() for n in (HEADS, 2, 2))

    def run(first: int, last: int):
        mask = ours.spans(1, last - first, last, q_offset=first)
        part = q[:, :, first:last], k[:, :, :last], v[:, :, :last]
        return ours.attention(layer, *part, mask, s_aux=layer.sinks)[0]

    whole = run(0, LENGTH)
    parts = [run(0, 64), run(64, 131), run(131, LENGTH - 1), run(LENGTH - 1, LENGTH)]
    assert same_bytes(torch.cat(parts, dim=1), whole)
