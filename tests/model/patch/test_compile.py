"""torch.compile(fullgraph=True) of patched models: the bytes of eager, forward and backward."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.patch import families

BY_DAY = "llama"
each = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == BY_DAY else pytest.mark.nightly)
        for name in families.FAMILIES
    ],
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(net: torch.nn.Module, **options: object):
    options = options or ck.compile_options()
    return torch.compile(net, fullgraph=True, dynamic=True, options=options)


def stepped(net, run, tokens) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss = run(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in net.named_parameters()}


def assert_steps_agree(net: torch.nn.Module, run) -> None:
    """Loss and gradients, for any batch and length: one graph from two of each on, no break."""
    for batch, length in ((2, 21), (3, 40)):
        tokens = families.ids(batch, length)
        want, got = stepped(net, net, tokens), stepped(net, run, tokens)
        assert [n for n in want if not same_bytes(got[n], want[n])] == []
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@each
def test_graphs_of_training(name):
    """What inductor would get, run op by op."""
    net = families.model(name, num_hidden_layers=1).train()
    ck.patch(net, strict=True)
    assert_steps_agree(net, torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", families.FAMILIES)
def test_training(name):
    net = families.model(name, num_hidden_layers=1).train()
    ck.patch(net, strict=True)
    assert_steps_agree(net, compiled(net))


@pytest.mark.nightly
@pytest.mark.parametrize("name", families.FAMILIES)
def test_inference(name):
    net = families.model(name, num_hidden_layers=1)
    ck.patch(net, strict=True)
    run = compiled(net)
    for batch, length in ((2, 21), (3, 40)):
        tokens = families.ids(batch, length)
        assert same_bytes(families.logits(run, tokens), families.logits(net, tokens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.nightly
def test_main_grads():
    """Into main_grad, over two batches of one graph: the bytes of eager."""
    net = families.model("gemma3", num_hidden_layers=1).train()
    ck.patch(net, main_grad=True)
    found = []
    for run in (net, torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")):
        for parameter in net.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
        for batch, length in ((2, 24), (3, 40)):
            tokens = families.ids(batch, length)
            run(tokens, labels=tokens, use_cache=False).loss.backward()
        assert all(p.grad is None for p in net.parameters())
        found.append({name: p.main_grad for name, p in net.named_parameters()})
    eager, graph = found
    assert [n for n in eager if not same_bytes(eager[n], graph[n])] == []
    assert all(t.any() for t in eager.values())


@pytest.mark.nightly
def test_without_the_options_bytes_differ():
    """The mutant: inductor keeps fp32 inside of what it fuses, here a chain of residuals."""
    net = families.model("gpt_neox", num_hidden_layers=1)
    ck.patch(net)
    run = compiled(net, emulate_precision_casts=False)
    tokens = families.ids(2, 21)
    assert not same_bytes(families.logits(run, tokens), families.logits(net, tokens))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_with_a_static_cache(name):
    """transformers' decoding step, compiled, against eager with a dynamic cache."""
    net = families.model(name, num_hidden_layers=1)
    ck.patch(net, strict=True)
    tokens = families.ids(2, 17)
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    want = net.generate(tokens, return_dict_in_generate=True, **given)
    net.forward = torch.compile(net.forward, fullgraph=True, options=ck.compile_options())
    given |= {"cache_implementation": "static", "disable_compile": True}
    got = net.generate(tokens, return_dict_in_generate=True, **given)
    assert same_bytes(got.sequences, want.sequences)
    assert all(same_bytes(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_guards_on_a_model_stay():
    """Those on this package's globals are dropped; a changed eps is another graph."""
    seen = []

    def keep(entries):
        kept = ck.compile_options()["guard_filter_fn"](entries)
        seen.append(([e.name for e in entries], kept))
        return kept

    net = families.model("llama", num_hidden_layers=1)
    ck.patch(net, strict=True)
    run = torch.compile(net, backend="eager", options={"guard_filter_fn": keep})
    tokens = families.ids(2, 5)
    with torch.no_grad():
        for eps in (1e-6, 0.5):
            net.model.norm.variance_epsilon = eps
            assert same_bytes(run(tokens).logits, net(tokens).logits)
    dropped = [name for names, kept in seen for name, k in zip(names, kept, strict=True) if not k]
    assert len(dropped) > 100 and all("cute_kernels" in name for name in dropped)
    # The pre-hook of the patched model is looked at in a frame without a graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 == len(seen) - 1


def test_options_are_ones_own():
    options = ck.compile_options()
    options["max_autotune"] = True
    assert "max_autotune" not in ck.compile_options()
