"""A model with hyper-connections trains: the loss falls, and a second run has the same bytes."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.demo import compare, model, rollout, training
from cute_kernels.mhc import cpu
from tests.contract import same_bytes
from tests.demo.tiny import SETUP, SIZE
from tests.mhc import streams

STREAMS = 4
SMALL = model.Size(hidden=64, inner=64, layers=2, heads=1, key_heads=1, capacity=64)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(size: model.Size) -> model.Side:
    side = model.ours(size, torch.device("cpu"), seed=1)
    streams.hyper_connected(side.model, STREAMS, seed=2)
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


@pytest.mark.parametrize("steps", [12, pytest.param(100, marks=pytest.mark.nightly)])
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

    few = 2
    assert not differing(trained(few)[0], trained(few)[0])
    monkeypatch.setattr(cpu, name, wrong)
    assert differing(trained(few)[0], trained(few)[0])


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
