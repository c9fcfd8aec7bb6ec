"""A model with hyper-connections trains: the loss falls, and a second run has the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import cute_kernels as ck
from cute_kernels.demo import compare, model, rollout, training
from cute_kernels.mhc import cpu
from tests.contract import same_bytes
from tests.demo.tiny import SETUP, SIZE

STREAMS = 4
SMALL = model.Size(hidden=64, inner=64, layers=2, heads=1, key_heads=1, capacity=64)


class Attention(nn.Module):
    """The norm and the attention of a layer, without the attention's weights in what it returns."""

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        return self.attention(hidden_states=self.norm(x), **given)[0]


class Layer(nn.Module):
    """A decoder layer of streams [B, T, C, n]; the first one makes them of an embedding."""

    def __init__(self, layer: nn.Module, channels: int, n: int, first: bool) -> None:
        super().__init__()
        self.n = n
        self.first = first
        branch = Attention(layer.input_layernorm, layer.self_attn)
        self.attention = ck.mhc.HyperConnection(branch, channels, n)
        mlp = nn.Sequential(layer.post_attention_layernorm, layer.mlp)
        self.mlp = ck.mhc.HyperConnection(mlp, channels, n)

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        if self.first:
            x = ck.mhc.expand_from_embedding(x, self.n)
        return self.mlp(self.attention(x, **given))


def hyper_connected(model: LlamaForCausalLM, n: int, seed: int) -> LlamaForCausalLM:
    """Puts n streams through the layers of ``model``, in place; its weights stay as they are.

    A site around each attention and each MLP, a head before the last norm; fp32 weights of theirs,
    drawn from ``seed``.
    """
    torch.manual_seed(seed)
    base, channels = model.model, model.config.hidden_size
    layers = [Layer(layer, channels, n, i == 0) for i, layer in enumerate(base.layers)]
    base.layers = nn.ModuleList(layers).to(model.device)
    base.norm = nn.Sequential(ck.mhc.HyperHead(channels, n).to(model.device), base.norm)
    return model


def build(size: model.Size) -> model.Side:
    side = model.ours(size, torch.device("cpu"), seed=1)
    hyper_connected(side.model, STREAMS, seed=2)
    return side


def trained(steps: int, size: model.Size = SMALL) -> tuple[model.Side, training.Trained]:
    learn, _ = training.split(training.corpus())
    side = build(size)
    run = training.train(
        side, learn, seconds=0, steps=steps, seed=1, progress=lambda done, words: None
    )
    return side, run


def differing(one: model.Side, other: model.Side) -> list[str]:
    theirs = other.model.state_dict()
    return [n for n, w in one.model.state_dict().items() if not same_bytes(w, theirs[n])]


@pytest.mark.parametrize("steps", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_steps_repeat_byte_for_byte_and_learn(steps):
    (one, run), (other, again) = trained(steps), trained(steps)
    assert not differing(one, other)
    assert run.steps == steps and run.first_loss == again.first_loss
    assert run.last_loss < run.first_loss
    if steps >= 100:
        # Knows more than how often each byte comes.
        learn, _ = training.split(training.corpus())
        often = learn.bincount().double() / len(learn)
        assert run.last_loss < torch.special.entr(often).sum() < run.first_loss
    start = build(SMALL).model.state_dict()
    moved = {name for name, w in one.model.state_dict().items() if not same_bytes(w, start[name])}
    sites = [
        f"model.layers.{i}.{site}.{weight}"
        for i in range(SMALL.layers)
        for site in ("attention", "mlp")
        for weight in ("phi", "alpha", "beta")
    ]
    assert {*sites, "model.norm.0.phi", "model.norm.0.alpha", "model.norm.0.beta"} <= moved


@pytest.mark.parametrize("name", ["_channel_sum", pytest.param("_sum", marks=pytest.mark.nightly)])
def test_a_sum_in_random_order_is_caught(name, monkeypatch):
    """Of channels, or of any last dimension: each call in another order."""
    right = getattr(cpu, name)
    # Training seeds torch's own generator, which would give both runs the same orders.
    orders = torch.Generator().manual_seed(3)

    def wrong(t: torch.Tensor) -> torch.Tensor:
        return right(t[..., torch.randperm(t.shape[-1], generator=orders)])

    monkeypatch.setattr(cpu, name, wrong)
    assert differing(trained(2)[0], trained(2)[0])


def test_rollout_and_training_have_the_same_bytes():
    """The demo's claim, with streams: log-probs of any batch, and gradients of Llama's weights."""
    side, _ = trained(3, SIZE)
    _, heldout = training.split(training.corpus())
    work = compare.tasks(SETUP, heldout, seed=2)
    choose = rollout.sample(2, len(work))
    column, _ = compare.measure(side, SETUP, work, choose, 2, lambda: None)
    total = column.total()
    assert total.differing_bytes == 0 and total.numbers > 100_000


def test_streams_start_as_the_model_without_them():
    """Equal streams with gates at their start compute the residual model, but for alpha."""
    batch = torch.randint(1, model.VOCAB, (2, 64), generator=torch.Generator().manual_seed(4))
    plain = model.ours(SMALL, torch.device("cpu"), seed=1)
    side = build(SMALL)
    with torch.no_grad():
        want = plain.hidden(input_ids=batch).float()
        got = side.hidden(input_ids=batch).float()
        for name, weight in side.model.named_parameters():
            if name.endswith("alpha"):
                weight.zero_()
        exact = side.hidden(input_ids=batch).float()
    # Roundings to bf16, 2^-9 each: of a stream and a collapse at each of 4 sites, in either model.
    scale = want.norm()
    assert (exact - want).norm() < 16 * 2.0**-9 * scale
    assert not same_bytes(got, exact)
