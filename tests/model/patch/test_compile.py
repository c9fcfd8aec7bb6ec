"""torch.compile(fullgraph=True) of patched models: the bytes of eager, and what its graphs call."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import cute_kernels as ck
from tests import plans
from tests.contract import same_bytes
from tests.model.patch import families

#: Operations of torch whose host part needs values, and ops of ours that read a device.
WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
OUR_WAITS = ("seen_columns", "kv_ranges", "varlen_offsets", "cut_kv_ranges")
#: Copies that no author wrote.
COPIES = ("clone", "copy", "copy_", "contiguous", "_to_copy")
#: Calls of our ops in a Llama: in each layer, and besides.
FORWARD = {
    "linear": (7, 1),
    "norm": (1, 1),
    "norm_in_steps": (1, 0),
    "rotary_pair": (1, 0),
    "block_sparse_attention": (1, 0),
    "gated": (1, 0),
    "embedding": (0, 1),
    "rotary_table": (0, 1),
    "linear_logp": (0, 1),
}
BACKWARD = {
    "linear_gradients": (7, 0),
    "norm_gradients": (2, 1),
    "rotary_pair_backward": (1, 0),
    "block_sparse_attention_backward": (1, 0),
    "gated_backward": (1, 0),
    "linear_dx": (0, 1),
    "linear_logp_backward": (0, 1),
    "embedding_gradient": (0, 1),
}
#: On a CPU an op makes the spans; on a GPU the graph itself.
DECODING = FORWARD | {"kv_ranges": (0, 1), "sequence_attention": (1, 0)}
for _name in ("linear_logp", "block_sparse_attention"):
    del DECODING[_name]
#: At every commit: a family that has a Llama's ops, and sliding windows.
BY_DAY = "mistral"
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.nightly] * (name != BY_DAY)) for name in families.FAMILIES
]
SHAPES = ((2, 21), (3, 40))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs():
    """(backend, {"forward": ops, "backward": ops}): the names of what each graph calls."""
    calls: dict[str, Counter] = {}

    def recorder(direction: str):
        def compile_graph(graph, inputs):
            assert direction not in calls, "a second graph"
            calls[direction] = Counter(map(name_of, graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"))
    return backend, calls


def name_of(node: torch.fx.Node) -> str:
    """Name of an operation; ours begin with their namespace."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        if "auto_functionalized" in str(node.target):
            return node.args[0]._name.replace("::", ".").removesuffix(".default")
        return ""
    namespace, name = node.target._schema.name.split("::")
    return f"{namespace}.{name}" if namespace == "cute_kernels" else name


def ours(calls: Counter) -> dict[str, int]:
    return {n.split(".")[1]: k for n, k in calls.items() if n.startswith("cute_kernels.")}


def expected(table: dict[str, tuple[int, int]], layers: int = 1) -> dict[str, int]:
    return {name: layers * layer + besides for name, (layer, besides) in table.items()}


def assert_nothing_waits(calls: Counter) -> None:
    assert not [n for n in (*WAITS, *COPIES) if calls[n]], calls
    assert not [n for n in OUR_WAITS if calls[f"cute_kernels.{n}"]]


def assert_one_graph() -> None:
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and not counters["recompiles"]
    assert counters["stats"]["unique_graphs"] == 1


def patched(name: str = "llama", layers: int = 1, **options: bool) -> torch.nn.Module:
    net = families.model(name, num_hidden_layers=layers)
    ck.patch(net, strict=True, **options)
    return net


def compiled(net: torch.nn.Module, **options: object):
    options = options or ck.compile_options()
    return torch.compile(net, fullgraph=True, dynamic=True, options=options)


def stepped(net: torch.nn.Module, run, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss of a step, and its gradients, by name; main_grads where there are some."""
    net.zero_grad()
    families.give_main_grads(net)
    loss = run(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {n: p.main_grad if p.grad is None else p.grad for n, p in net.named_parameters()}
    return {"loss": loss.detach()} | {n: g.clone() for n, g in gradients.items()}


def assert_steps_agree(net: torch.nn.Module, run) -> None:
    """For any batch and length: one graph from two of each on, no break."""
    for shape in SHAPES:
        tokens = families.ids(*shape)
        want, got = stepped(net, net, tokens), stepped(net, run, tokens)
        assert [n for n in want if not same_bytes(got[n], want[n])] == []
        assert all(t.any() for t in want.values())
    assert_one_graph()


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_of_training(graphs, name):
    """What inductor would get, run op by op; sliding windows wait for nothing."""
    backend, calls = graphs
    net = patched(name).train()
    assert_steps_agree(net, torch.compile(net, fullgraph=True, dynamic=True, backend=backend))
    for graph in calls.values():
        assert_nothing_waits(graph)


def test_calls_of_a_training_step(graphs, monkeypatch):
    """One graph each way, its calls, and a second step that plans nothing."""
    backend, calls = graphs
    net, tokens = patched().train(), families.ids(2, 24)
    with plans.cached(monkeypatch) as planned:
        run = torch.compile(net, backend=backend)
        got = stepped(net, run, tokens)
        assert ours(calls["forward"]) == expected(FORWARD)
        assert ours(calls["backward"]) == expected(BACKWARD)
        for graph in calls.values():
            assert_nothing_waits(graph)
        assert len(set(planned)) > 8
        planned.clear()
        again = stepped(net, run, tokens)
    assert planned == [] and all(map(same_bytes, got.values(), again.values()))
    assert_one_graph()


def test_the_count_sees_a_mask(graphs):
    """Position ids of a caller may hold packs: the graph makes a mask and waits for its ranges."""
    backend, calls = graphs
    run = torch.compile(patched(), backend=backend)
    with torch.no_grad():
        run(families.ids(2, 24), use_cache=False, position_ids=torch.arange(24)[None])
    assert ours(calls["forward"])["seen_columns"] == 1
    with pytest.raises(AssertionError):
        assert_nothing_waits(calls["forward"])


def test_decoding(graphs):
    """One token more in a static cache: the calls of a step, and one graph for all tokens."""
    backend, calls = graphs
    net, tokens = patched(layers=2), families.ids(2, 9)
    cache = transformers.StaticCache(config=net.config, max_cache_len=32)
    run = torch.compile(net, backend=backend)
    with torch.no_grad():
        net(tokens, past_key_values=cache, use_cache=True)
        for _ in range(2):
            run(tokens[:, :1], past_key_values=cache, use_cache=True)
    assert ours(calls["forward"]) == expected(DECODING, layers=2)
    assert not [name for name in WAITS if calls["forward"][name]]
    assert_one_graph()


@pytest.mark.nightly
@pytest.mark.parametrize("name", families.FAMILIES)
def test_inductor(name):
    net = patched(name)
    run = compiled(net)
    for shape in SHAPES:
        tokens = families.ids(*shape)
        assert same_bytes(families.logits(run, tokens), families.logits(net, tokens))
    assert_one_graph()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_steps_agree(net.train(), compiled(net))


@pytest.mark.nightly
def test_main_grads():
    net = patched("gemma3", main_grad=True).train()
    assert_steps_agree(net, torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager"))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.nightly
def test_without_the_options_bytes_differ():
    """The mutant: inductor keeps fp32 inside of what it fuses, here a chain of residuals."""
    net, tokens = patched("gpt_neox"), families.ids(2, 21)
    run = compiled(net, emulate_precision_casts=False)
    assert not same_bytes(families.logits(run, tokens), families.logits(net, tokens))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_with_a_static_cache(name):
    """transformers' decoding step, compiled, against eager with a dynamic cache."""
    net, tokens = patched(name), families.ids(2, 17)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    want = net.generate(tokens, return_dict_in_generate=True, **options)
    net.forward = torch.compile(net.forward, fullgraph=True, options=ck.compile_options())
    options |= {"cache_implementation": "static", "disable_compile": True}
    got = net.generate(tokens, return_dict_in_generate=True, **options)
    assert same_bytes(got.sequences, want.sequences)
    assert all(same_bytes(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_guards_on_a_model_stay():
    """Those on this package's globals are dropped; a changed eps is another graph."""
    seen = []

    def keep(entries):
        flags = ck.compile_options()["guard_filter_fn"](entries)
        seen.append(([e.name for e in entries], flags))
        return flags

    ck.compile_options()["max_autotune"] = True
    assert "max_autotune" not in ck.compile_options()  # a caller's own
    net, tokens = patched(), families.ids(2, 5)
    run = torch.compile(net, backend="eager", options={"guard_filter_fn": keep})
    with torch.no_grad():
        for eps in (1e-6, 0.5):
            net.model.norm.variance_epsilon = eps
            assert same_bytes(run(tokens).logits, net(tokens).logits)
    dropped = [name for names, flags in seen for name, k in zip(names, flags, strict=True) if not k]
    assert len(dropped) > 100 and all("cute_kernels" in name for name in dropped)
    # The pre-hook of the patched model is looked at in a frame without a graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 == len(seen) - 1
