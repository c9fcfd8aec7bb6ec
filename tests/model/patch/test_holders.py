"""Steps of what holds other modules in one launch: in which, when not, and with which bytes.

A decoder layer adds and normalises, an MLP multiplies its gate, attention rotates q and k, and is
told that nothing is packed.  test_families.py has the bytes of every family.
"""

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
from cute_kernels.errors import ArgumentValueError, PatchError
from cute_kernels.integrations import transformers as integration
from cute_kernels.model.patch import classes, decisions, state
from cute_kernels.model.patch.forwards import authors, layers
from cute_kernels.norm import op
from cute_kernels.norm.config import RMS
from cute_kernels.rowwise import op as rowwise_op
from tests.anchors import replaced
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.families import HOLDERS, POSITIONS, TOKENS, Watch, agree, step

each = pytest.mark.parametrize("kind", HOLDERS)


def count(report, kind: str) -> int:
    return sum(part.by == classes.FORWARDS[kind].by for part in report.replaced)


def launches(net: torch.nn.Module, kind: str) -> bool:
    with Watch() as watch:
        families.logits(net, TOKENS)
    return HOLDERS[kind][0] in watch.ours


def patched(**options) -> torch.nn.Module:
    net = families.model("llama", num_hidden_layers=1)
    ck.patch(net, **options)
    return net


def apart(monkeypatch, kind: str, **options) -> torch.nn.Module:
    """A model without the forward."""
    with monkeypatch.context() as left:
        left.setitem(decisions.CONDITIONS, kind, lambda *_: False)
        return patched(**options)


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(monkeypatch, reentrant):
    """There transformers leaves its cache out, and would look for packs."""
    net, want = patched(), step(apart(monkeypatch, "residual"))
    calls = families.calls_of(monkeypatch, (op, "norm_in_steps"), *families.ATTENDING)
    net.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert agree(step(net), want)
    # Once in the forward of the layer, once more in its backward.
    assert sorted(calls) == ["causal_attention"] * 2 + ["norm_in_steps"] * 2


def test_main_grad(monkeypatch):
    sums = []
    for net in (patched(main_grad=True), apart(monkeypatch, "residual", main_grad=True)):
        for parameter in net.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.37)
        step(net)
        sums.append([p.main_grad for p in net.parameters()])
    assert agree(*sums)


def _rotated(q, k, cos, sin, dim, dtype):
    return ck.apply_rotary(q, k, cos, sin, unsqueeze_dim=dim)


#: Kind -> (where, name, what rounds once): of a norm only the gradient differs.
ROUNDED_ONCE = {
    "residual": (op, "norm_in_steps", lambda true: op.norm),
    "mlp": (rowwise_op, "gated", lambda true: lambda *args: true(*args[:3], False)),
    "attention": (authors.op, "rotate_if_taken", lambda true: _rotated),
}


@each
def test_one_rounding_changes_bytes(monkeypatch, kind):
    net, want = patched(), step(apart(monkeypatch, kind))
    holder, name, make = ROUNDED_ONCE[kind]
    monkeypatch.setattr(holder, name, make(getattr(holder, name)))
    got = step(patched() if kind == "attention" else net)
    assert not agree(got, want)
    assert kind != "residual" or agree(got[:3], want[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("uses", ["both", "norm", "sum"])
def test_gradients_of_a_norm_in_steps(dtype, uses):
    generator = torch.Generator().manual_seed(3)
    shapes = (5, 3, 96), (5, 3, 96), (96,), (5, 3, 96), (5, 3, 96)
    *tensors, d_y, d_h = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    d_h[0] = -0.0
    d_y[0] = 0.0
    results = []
    for in_steps in (True, False):
        x, residual, weight = leaves = [t.clone().requires_grad_() for t in tensors]
        if in_steps:
            y, h, *_ = op.norm_in_steps(x, residual, weight, None, None, None, RMS, 1e-6, 0.0)
        else:
            h = residual + x
            y = ck.rms_norm(h, weight, 1e-6)
        roots = {"both": ([y, h], [d_y, d_h]), "norm": ([y], [d_y]), "sum": ([h], [d_h])}[uses]
        torch.autograd.backward(*roots)
        gradients = [torch.ones(1) if t.grad is None else t.grad for t in leaves]
        results.append([y.detach(), h.detach(), *gradients])
    assert agree(*results)


# ---- where both steps run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "inside"), [("residual", authors.NORM), ("mlp", f"mlp.{authors.ACTIVATION}")]
)
def test_a_hook_inside_sees_both_steps(monkeypatch, kind, inside):
    net, want, outputs = patched(), step(apart(monkeypatch, kind)), []
    module = net.model.layers[0].get_submodule(inside)
    handle = module.register_forward_hook(lambda module, args, y: outputs.append((*args, y)))
    assert agree(step(net), want)
    ((x, y),) = outputs
    assert same_bytes(y, module(x))
    handle.remove()
    outputs.clear()
    assert agree(step(net), want) and outputs == []


def test_hooks_of_each_kind_and_additions_with_rules_of_their_own_ask_for_both_steps():
    norm, x = torch.nn.RMSNorm(8), torch.randn(2, 3, 8)
    for hook in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handle = getattr(norm, f"register_{hook}_hook")(lambda *args: None)
        assert not layers.is_bare(norm)
        handle.remove()
    assert layers.is_bare(norm) and layers.is_plain_pair(x, x + 1)
    for other in (x[:1], x.double(), x.to("meta"), torch.nn.Parameter(x)):
        assert not layers.is_plain_pair(x, other) and not layers.is_plain_pair(other, x)


@each
def test_copies_pickles_options_and_unpatch(kind):
    net = patched()
    copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    want = step(net)
    for copied in copies:
        assert launches(copied, kind) and agree(step(copied), want)
    ck.unpatch(net)
    assert not launches(net, kind)
    report = ck.patch(net, **{"attention" if kind == "attention" else "norm": False})
    assert not count(report, kind) and not launches(net, kind)


def test_the_authors_file_and_other_models_are_as_they_were():
    forward, function = llama.LlamaAttention.forward, llama.apply_rotary_pos_emb
    net, other = (families.model("llama", num_hidden_layers=1) for _ in range(2))
    want = families.logits(other, TOKENS)
    ck.patch(net)
    assert llama.LlamaAttention.forward is forward and llama.apply_rotary_pos_emb is function
    assert not launches(other, "attention") and same_bytes(families.logits(other, TOKENS), want)
    layer = net.model.layers[0].self_attn
    assert state.kind_of(layer) == "attention" and isinstance(layer, llama.LlamaAttention)
    assert state.user_class(layer) is llama.LlamaAttention
    assert inspect.signature(layer.forward) == inspect.signature(
        other.model.layers[0].self_attn.forward
    )


# ---- which are known ----------------------------------------------------------------------------

#: Model -> (class, whether columns are passed through, whether results keep q's dtype); None: the
#: function is not known.
ROTATIONS = {
    "llama": ("LlamaAttention", False, False),
    "olmo2": ("Olmo2Attention", False, True),
    "gpt_neox": ("GPTNeoXAttention", True, False),
    "nemotron": ("NemotronAttention", True, False),
    "cohere": ("CohereAttention", None, None),
    "gpt_oss": ("GptOssAttention", None, None),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_which_rotations_are_known(name):
    cls, partial, keeps_dtype = ROTATIONS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    known = (module.apply_rotary_pos_emb, partial, keeps_dtype)
    assert authors.pos_emb(getattr(module, cls)) == (None if partial is None else known)


def test_which_layers_and_mlps_are_known():
    module = importlib.import_module("transformers.models.nemotron.modeling_nemotron")
    assert not authors.is_pre_norm(module.NemotronDecoderLayer)  # its attention gets no kwargs
    layer = llama.LlamaDecoderLayer
    own = type("Own", (layer,), {"forward": lambda self, hidden_states: hidden_states})
    assert authors.is_pre_norm(layer) and not authors.is_pre_norm(own)

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2

    class Alike(torch.nn.Module):
        def forward(self, h):
            out = self.down_proj(self.act_fn(self.gate_proj(h)) * self.up_proj(h))
            return out

    assert authors.is_gated(Alike) and not authors.is_gated(Doubled)


ROTATE = "apply_rotary_pos_emb"
#: What is changed in a function of transformers, so that it computes something else.
OTHERS = [
    ("rotate_half", "torch.cat((-x2, x1)", "torch.cat((x2, x1)"),
    ("rotate_half", ": x.shape[-1] // 2]", ": x.shape[-1] // 3]"),
    ("rotate_half", "(-x2, x1)", "(-x1, x2)"),
    ("rotate_half", "dim=-1", "dim=-2"),
    (ROTATE, "(rotate_half(k) * sin)", "(rotate_half(k) * cos)"),
    (ROTATE, "(k * cos)", "(q * cos)"),
    (ROTATE, "(q * cos) + ", "(q * cos) - "),
    (ROTATE, "sin, unsqueeze_dim=1", "sin, unsqueeze_dim=2"),
    (ROTATE, "sin, unsqueeze_dim=1", "sin, unsqueeze_dim=1, scale=1"),
    (ROTATE, "sin, unsqueeze_dim=1", "sin, unsqueeze_dim=1, **options"),
    (ROTATE, "return q_embed, k_embed", "return k_embed, q_embed"),
]


@pytest.mark.parametrize(("name", "old", "new"), OTHERS)
def test_another_formula_is_not_known(monkeypatch, name, old, new):
    """A changed function is put into Llama's file."""
    source = inspect.getsource(getattr(llama, name))
    names = dict(vars(llama))
    exec(replaced({"": source[source.index("def ") :]}, old, new)[""], names)
    code, defaults = names[name].__code__, names[name].__defaults__
    monkeypatch.setattr(llama, name, types.FunctionType(code, vars(llama), name, defaults))
    assert authors.pos_emb(llama.LlamaAttention) is None


def test_names_of_variables_do_not_matter_and_torchs_does(monkeypatch):
    known = authors.pos_emb(llama.LlamaAttention).function
    code = known.__code__
    code = code.replace(co_varnames=tuple(f"v{i}" for i in range(code.co_nlocals)))
    renamed = types.FunctionType(code, vars(llama), known.__name__, known.__defaults__)
    assert authors._agrees(renamed, authors._FORMULAS[0][0])
    assert not any(authors._agrees(renamed, formula) for formula, *_ in authors._FORMULAS[1:])
    other = types.ModuleType("torch")
    vars(other).update(vars(torch))
    monkeypatch.setattr(llama, "torch", other)
    assert authors.pos_emb(llama.LlamaAttention) is None


def test_what_replaces_names_of_the_authors_file_is_called(monkeypatch):
    """As Liger's, before the patch and after it; a class whose formula is not known keeps all."""
    calls, true = [], llama.apply_rotary_pos_emb
    before, after = families.model("llama", num_hidden_layers=1), patched()

    def theirs(q, k, cos, sin, unsqueeze_dim=1):
        calls.append("theirs")
        return q, k

    monkeypatch.setattr(llama, ROTATE, theirs)
    assert not count(ck.patch(before), "attention")
    assert state.kind_of(before.model.layers[0].self_attn) is None
    for net in (before, after):
        calls.clear()
        families.logits(net, TOKENS)
        assert calls == ["theirs"]
    monkeypatch.setattr(llama, ROTATE, true)
    calls.clear()
    interface = llama.ALL_ATTENTION_FUNCTIONS.get_interface

    class Interfaces:
        @staticmethod
        def get_interface(name, default):
            calls.append(name)
            return interface(name, default)

    monkeypatch.setattr(llama, "ALL_ATTENTION_FUNCTIONS", Interfaces)
    assert launches(after, "attention") and calls == ["cute_kernels"]
    monkeypatch.setattr(authors, "pos_emb", lambda cls: None)
    assert authors.forward_of("attention", llama.LlamaAttention) is llama.LlamaAttention.forward


# ---- calls ---------------------------------------------------------------------------------------


def operands(width: int = 64, tables: int = 2, **options) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = (1, 4, 9, 64), (1, 2, 9, 64), (tables, 9, width), (tables, 9, width)
    return tuple(torch.randn(shape, generator=generator).to(**options) for shape in shapes)


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
    net, true = patched(), llama.apply_rotary_pos_emb
    assert rotations_of_a_graph(net) == 1
    for name, value in (
        ("ALL_ATTENTION_FUNCTIONS", copy.copy(llama.ALL_ATTENTION_FUNCTIONS)),
        (ROTATE, lambda q, k, cos, sin: true(q, k, cos, sin)),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(llama, name, value)
            assert rotations_of_a_graph(net) == 0


# ---- attention that is told that nothing is packed -----------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Names of what attends, in order."""
    return families.calls_of(monkeypatch, *families.ATTENDING)


@torch.no_grad()
def test_calls_that_say_more_have_spans(calls):
    net = patched(strict=True)
    for inputs in (
        {"position_ids": torch.cat((torch.arange(8), torch.arange(9)))[None]},
        {"attention_mask": torch.ones(2, 17, dtype=torch.int64)},
    ):
        net(TOKENS, **({"use_cache": False} | inputs))
    assert calls == ["sequence_attention"] * 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_cache_that_the_model_makes(name, calls):
    """The prompt, and a token behind it, which has spans."""
    net, results = families.model(name, num_hidden_layers=1), []
    ck.patch(net, strict=True)
    for inputs in ({}, POSITIONS):
        prompt = net(TOKENS, use_cache=True, **inputs)
        token = net(TOKENS[:, :1], use_cache=True, past_key_values=prompt.past_key_values)
        results.append((prompt.logits, token.logits))
    assert calls == ["causal_attention"] + ["sequence_attention"] * 3
    assert all(map(same_bytes, *results))
    q, k = torch.zeros(1, 2, 3, 64).bfloat16(), torch.zeros(1, 2, 5, 64).bfloat16()
    with pytest.raises(ArgumentValueError, match="attention_mask"):  # more keys than queries
        integration.attention(torch.nn.Module(), q, k, k, integration.whole_sequences())


def test_other_attention_is_told_nothing_and_a_window_that_is_lost_is_seen(monkeypatch):
    net = families.model("mistral", num_hidden_layers=1)
    ck.patch(net, strict=True)
    want, true = families.logits(net, TOKENS, **POSITIONS), integration.whole_sequences
    with monkeypatch.context() as mutant:
        mutant.setattr(integration, "whole_sequences", lambda window=0: true())
        assert not same_bytes(families.logits(net, TOKENS), want)
    assert authors._masks(net.model, {})
    net.set_attn_implementation("eager")
    assert not authors._masks(net.model, {})
    with pytest.raises(PatchError, match="attn_implementation"):
        families.logits(net, TOKENS, **POSITIONS)
