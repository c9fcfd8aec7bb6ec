"""Counts of a patched model's compiled graphs: our calls, waits for a device, and new plans."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import cute_kernels as ck
from cute_kernels.runtime import dispatch, plan_cache
from tests.model.patch import families

LAYERS = 2
#: Operations of torch whose host part needs values, and ops of ours that read a device.
WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
OUR_WAITS = ("seen_columns", "kv_ranges", "varlen_offsets", "cut_kv_ranges")
#: Copies that no author wrote.
COPIES = ("clone", "copy", "copy_", "contiguous", "_to_copy")

#: Calls of our ops: for each layer, and besides.
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


def expected(table: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: LAYERS * layer + besides for name, (layer, besides) in table.items()}


def assert_nothing_waits(calls: Counter) -> None:
    assert not [n for n in (*WAITS, *COPIES) if calls[n]], calls
    assert not [n for n in OUR_WAITS if calls[f"cute_kernels.{n}"]]


def assert_one_graph() -> None:
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and not counters["recompiles"]
    assert counters["stats"]["unique_graphs"] == 1


def patched(name: str = "llama") -> torch.nn.Module:
    net = families.model(name, num_hidden_layers=LAYERS)
    ck.patch(net, strict=True)
    return net


def stepped(run, tokens) -> None:
    run(tokens, labels=tokens, use_cache=False).loss.backward()


def counted_plans(monkeypatch) -> list[str]:
    """Names of the kernels that are planned from now on, for CPU tensors that count as a GPU's."""
    names, plan = [], dispatch.plan

    def counted(name, *args):
        names.append(name)
        return plan(name, *args)

    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    monkeypatch.setattr(dispatch, "plan", counted)
    plan_cache.clear()
    return names


def test_training_step(graphs, monkeypatch):
    """One graph each way, its calls, and a second step that plans nothing."""
    backend, calls = graphs
    planned, net, tokens = counted_plans(monkeypatch), patched().train(), families.ids(2, 24)
    run = torch.compile(net, backend=backend)
    stepped(run, tokens)
    assert ours(calls["forward"]) == expected(FORWARD)
    assert ours(calls["backward"]) == expected(BACKWARD)
    for graph in calls.values():
        assert_nothing_waits(graph)
    assert len(set(planned)) > 8
    planned.clear()
    stepped(run, tokens)
    assert planned == []
    assert_one_graph()
    plan_cache.clear()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_sliding_windows_wait_for_nothing(graphs, name):
    backend, calls = graphs
    net, tokens = patched(name).train(), families.ids(2, 24)
    stepped(torch.compile(net, backend=backend), tokens)
    for graph in calls.values():
        assert_nothing_waits(graph)
    assert_one_graph()


def test_the_count_sees_a_mask(graphs):
    """Position ids of a caller may hold packs: the graph makes a mask and waits for its ranges."""
    backend, calls = graphs
    net, tokens = patched(), families.ids(2, 24)
    run = torch.compile(net, backend=backend)
    with torch.no_grad():
        run(tokens, use_cache=False, position_ids=torch.arange(24)[None])
    assert ours(calls["forward"])["seen_columns"] == 1
    with pytest.raises(AssertionError):
        assert_nothing_waits(calls["forward"])


def test_decoding(graphs):
    """One token more in a static cache: the calls of a step, and one graph for all tokens."""
    backend, calls = graphs
    net, tokens = patched(), families.ids(2, 9)
    cache = transformers.StaticCache(config=net.config, max_cache_len=32)
    run = torch.compile(net, backend=backend)
    with torch.no_grad():
        net(tokens, past_key_values=cache, use_cache=True)
        for _ in range(2):
            run(tokens[:, :1], past_key_values=cache, use_cache=True)
    assert ours(calls["forward"]) == expected(DECODING)
    assert not [name for name in WAITS if calls["forward"][name]]
    assert_one_graph()
