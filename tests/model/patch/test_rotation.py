"""q and k of a patched model rotate in one launch: which modules, and the bytes of torch's ops."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import types

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

import cute_kernels as ck
from cute_kernels.model.patch import decisions, state
from cute_kernels.model.patch.forwards import authors
from tests.anchors import replaced
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch

each = pytest.mark.parametrize("name", families.FAMILIES)
TOKENS = families.ids(2, 17)
OP = "ck.apply_rotary_pos_emb"


def rotations(report: ck.model.patch.report.Report) -> list[str]:
    return [part.name for part in report.replaced if part.by == OP]


def results(net: torch.nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of a step, then logits that were decoded with a cache."""
    net.zero_grad()
    loss = net(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    step = [loss.detach(), *(p.grad.clone() for p in net.parameters())]
    return [*step, families.cached(net, TOKENS, [9, 10], "dynamic")]


def launches(net: torch.nn.Module) -> bool:
    """Whether a forward pass rotates by our op."""
    with Watch() as watch:
        families.logits(net, TOKENS)
    return "rotary_pair" in watch.ours


@each
def test_the_bytes_are_those_of_torchs_ops(monkeypatch, name):
    net, other = families.model(name), families.model(name)
    assert len(rotations(ck.patch(net, strict=True))) == net.config.num_hidden_layers
    monkeypatch.setitem(decisions.CONDITIONS, "attention", lambda *_: False)
    assert rotations(ck.patch(other, strict=True)) == []
    assert launches(net) and not launches(other)
    assert all(map(same_bytes, results(net), results(other)))


def test_another_rotation_changes_bytes(monkeypatch):
    """The mutant: one that is rounded once."""
    net, other = families.model("llama"), families.model("llama")
    monkeypatch.setattr(
        authors.op,
        "rotate_if_taken",
        lambda q, k, cos, sin, dim, dtype: ck.apply_rotary(q, k, cos, sin, unsqueeze_dim=dim),
    )
    ck.patch(net)
    monkeypatch.setitem(decisions.CONDITIONS, "attention", lambda *_: False)
    ck.patch(other)
    assert not all(map(same_bytes, results(net), results(other)))


def test_other_models_and_the_authors_file_are_as_they_were():
    forward, function = llama.LlamaAttention.forward, llama.apply_rotary_pos_emb
    net, other = families.model("llama"), families.model("llama")
    want = families.logits(other, TOKENS)
    ck.patch(net)
    assert llama.LlamaAttention.forward is forward and llama.apply_rotary_pos_emb is function
    assert not launches(other) and same_bytes(families.logits(other, TOKENS), want)
    ck.unpatch(net)
    assert not launches(net) and same_bytes(families.logits(net, TOKENS), want)


def test_copies_and_pickles_rotate_as_well():
    net = families.model("llama")
    ck.patch(net)
    want = results(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert launches(other) and all(map(same_bytes, results(other), want))


def test_without_attention_it_is_left():
    net = families.model("llama")
    assert rotations(ck.patch(net, attention=False)) == [] and not launches(net)


# ---- which functions are known -------------------------------------------------------------------

#: Model -> (class, whether columns are passed through, whether results keep q's dtype); None: the
#: function is not known.
KNOWN = {
    "llama": ("LlamaAttention", False, False),
    "mixtral": ("MixtralAttention", False, False),
    "olmo2": ("Olmo2Attention", False, True),
    "gpt_neox": ("GPTNeoXAttention", True, False),
    "phi3": ("Phi3Attention", True, False),
    "nemotron": ("NemotronAttention", True, False),
    "cohere": ("CohereAttention", None, None),
    "glm": ("GlmAttention", None, None),
    "gpt_oss": ("GptOssAttention", None, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_which_are_known(name):
    cls, partial, keeps_dtype = KNOWN[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    known = authors.pos_emb(getattr(module, cls))
    if partial is None:
        assert known is None
    else:
        assert known == (module.apply_rotary_pos_emb, partial, keeps_dtype)


#: What is changed in a function of transformers, so that it computes something else.
OTHERS = {
    "a sign": ("rotate_half", "torch.cat((-x2, x1)", "torch.cat((x2, x1)"),
    "another cut": ("rotate_half", ": x.shape[-1] // 2]", ": x.shape[-1] // 3]"),
    "another half": ("rotate_half", "(-x2, x1)", "(-x1, x2)"),
    "another dimension": ("rotate_half", "dim=-1", "dim=-2"),
    "cos for sin": ("apply_rotary_pos_emb", "(rotate_half(k) * sin)", "(rotate_half(k) * cos)"),
    "q for k": ("apply_rotary_pos_emb", "(k * cos)", "(q * cos)"),
    "a difference": ("apply_rotary_pos_emb", "(q * cos) + ", "(q * cos) - "),
    "positions first": ("apply_rotary_pos_emb", "sin, unsqueeze_dim=1", "sin, unsqueeze_dim=2"),
    "one more argument": (
        "apply_rotary_pos_emb",
        "sin, unsqueeze_dim=1",
        "sin, unsqueeze_dim=1, scale=1",
    ),
    "any options": (
        "apply_rotary_pos_emb",
        "sin, unsqueeze_dim=1",
        "sin, unsqueeze_dim=1, **options",
    ),
    "swapped": ("apply_rotary_pos_emb", "return q_embed, k_embed", "return k_embed, q_embed"),
}


@pytest.fixture
def rewritten(monkeypatch):
    """``rewritten(name, old, new)`` puts a changed function into Llama's file."""

    def rewrite(name: str, old: str, new: str) -> None:
        source = inspect.getsource(getattr(llama, name))
        source = source[source.index("def ") :]
        names = dict(vars(llama))
        exec(replaced({"": source}, old, new)[""], names)
        changed = names[name]
        function = types.FunctionType(
            changed.__code__, vars(llama), name, changed.__defaults__, changed.__closure__
        )
        monkeypatch.setattr(llama, name, function)

    return rewrite


@pytest.mark.parametrize("change", OTHERS)
def test_another_formula_is_not_known(rewritten, change):
    rewritten(*OTHERS[change])
    assert authors.pos_emb(llama.LlamaAttention) is None
    net = families.model("llama")
    assert rotations(ck.patch(net)) == []
    assert state.kind_of(net.model.layers[0].self_attn) is None


def test_local_variables_may_have_any_names():
    known = authors.pos_emb(llama.LlamaAttention).function
    code = known.__code__
    code = code.replace(co_varnames=tuple(f"v{i}" for i in range(code.co_nlocals)))
    renamed = types.FunctionType(code, vars(llama), known.__name__, known.__defaults__)
    assert authors._agrees(renamed, authors._FORMULAS[0][0])
    assert not any(authors._agrees(renamed, formula) for formula, *_ in authors._FORMULAS[1:])


def test_a_name_of_torch_that_is_not_torchs_is_not_known(monkeypatch):
    other = types.ModuleType("torch")
    vars(other).update(vars(torch))
    monkeypatch.setattr(llama, "torch", other)
    assert authors.pos_emb(llama.LlamaAttention) is None


# ---- what is put into the author's file later ----------------------------------------------------


def test_a_function_that_replaces_the_authors_is_called(monkeypatch):
    """As Liger's, before the patch and after it."""
    calls = []

    def theirs(q, k, cos, sin, unsqueeze_dim=1):
        calls.append(q.shape)
        return q, k

    before, after = families.model("llama"), families.model("llama")
    ck.patch(after)
    true = llama.apply_rotary_pos_emb
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", theirs)
    assert rotations(ck.patch(before)) == []
    calls.clear()  # of the observation
    for net in (before, after):
        families.logits(net, TOKENS)
        assert len(calls) == net.config.num_hidden_layers
        calls.clear()
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", true)
    assert launches(after) and not calls


def test_other_globals_of_the_file_stay_live(monkeypatch):
    net, calls = families.model("llama"), []
    ck.patch(net)
    true = llama.ALL_ATTENTION_FUNCTIONS

    class Interfaces:
        @staticmethod
        def get_interface(name, default):
            calls.append(name)
            return true.get_interface(name, default)

    monkeypatch.setattr(llama, "ALL_ATTENTION_FUNCTIONS", Interfaces)
    assert launches(net) and calls == ["cute_kernels"] * net.config.num_hidden_layers


def test_a_class_whose_formula_is_not_known_keeps_its_forward(monkeypatch):
    """As a pickle from another version of transformers."""
    monkeypatch.setattr(authors, "pos_emb", lambda cls: None)
    assert authors.forward_of("attention", llama.LlamaAttention) is llama.LlamaAttention.forward


# ---- calls ---------------------------------------------------------------------------------------


def operands(width: int = 64, tables: int = 2, **options) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(**options)

    return drawn(1, 4, 9, 64), drawn(1, 2, 9, 64), *(drawn(tables, 9, width) for _ in range(2))


def test_a_call_that_the_op_does_not_take_is_the_authors():
    """Tables of a larger batch, fp64, and a transform of functorch."""
    known = authors.pos_emb(llama.LlamaAttention)
    ours = authors._rotation(known)
    for args in (operands(), operands(dtype=torch.float64, tables=1)):
        assert all(map(same_bytes, ours(*args), known.function(*args)))
    q, k, cos, sin = operands(tables=1)
    for function in (ours, known.function):
        gradient = torch.func.grad(lambda x, f=function: f(x, k, cos, sin)[0].square().sum())(q)
        assert gradient.shape == q.shape
    with pytest.raises(RuntimeError, match="must match the size"):
        ours(*operands(32, 1))  # the op would copy the other columns


def rotations_of_a_graph(net) -> int:
    """Calls of our op in a compiled graph, whose bytes are those of eager."""
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    got = families.logits(torch.compile(net, fullgraph=True, backend=backend), TOKENS)
    torch._dynamo.reset()
    assert any("linear" in t for t in targets)
    assert same_bytes(got, families.logits(net, TOKENS))
    return sum("rotary_pair" in t for t in targets)


def test_graphs_rotate_in_one_launch(monkeypatch):
    """Unless the file has another function, or another global that the forward reads."""
    net = families.model("llama", num_hidden_layers=1)
    ck.patch(net)
    assert rotations_of_a_graph(net) == 1
    interfaces = copy.copy(llama.ALL_ATTENTION_FUNCTIONS)
    true = llama.apply_rotary_pos_emb
    for name, value in (
        ("ALL_ATTENTION_FUNCTIONS", interfaces),
        ("apply_rotary_pos_emb", lambda q, k, cos, sin: true(q, k, cos, sin)),
    ):
        with monkeypatch.context() as replaced:
            replaced.setattr(llama, name, value)
            assert rotations_of_a_graph(net) == 0
    assert rotations_of_a_graph(net) == 1


def test_the_class_is_of_its_own_kind():
    net = families.model("llama")
    ck.patch(net)
    layer = net.model.layers[0].self_attn
    assert state.kind_of(layer) == "attention" and isinstance(layer, llama.LlamaAttention)
    assert state.user_class(layer) is llama.LlamaAttention
    assert inspect.signature(layer.forward) == inspect.signature(
        llama.LlamaAttention(net.config, 0).forward
    )
