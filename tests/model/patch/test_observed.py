"""Strictness by what runs: ops are named with module and line, branches not taken are not."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards.elements import DTYPES, KINDS, Elements, element
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.patch.stepping import llama


def test_a_branch_that_is_not_taken_is_not_named():
    net = llama(lambda x: x)
    assert ck.patch(net, strict=True).complete
    assert all_causal_lms.differing(net) == []


#: What a step computes -> the op that is named.
UNSAFE = {
    "cumsum": lambda x: torch.cumsum(x, dim=-1),
    "_softmax": lambda x: x + torch.softmax(x, dim=1),
    "topk": lambda x: x + x.topk(1, dim=0).values,
    "sort": lambda x: x.sort(dim=-1).values,
}


@pytest.mark.parametrize("op", UNSAFE)
def test_what_is_not_exact_is_named_with_its_line(op):
    net = llama(UNSAFE[op])
    with pytest.raises(PatchError) as caught:
        ck.patch(net, strict=True)
    line = UNSAFE[op].__code__.co_firstlineno
    want = f"model.layers.0.mlp (Stepping): {op} (test_observed.py:{line})"
    assert want in str(caught.value)
    assert {state.kind_of(m) for m in net.modules()} == {None}


def test_a_reduction_over_the_sequence_is_no_row():
    """An op of ours stands in for softmax over a row, and not over the sequence."""
    over_rows = llama(lambda x: x + torch.softmax(x, dim=-1) * x.square().mean(-1, keepdim=True))
    report = ck.patch(over_rows, strict=True)
    stepping = [one for one in report.replaced if one.part == "Stepping"]
    assert len(stepping) == 2 and "ck.batch_invariant" in stepping[0].by
    assert all_causal_lms.differing(over_rows) == []
    over_tokens = llama(UNSAFE["_softmax"])
    assert "reduces over the sequence" in str(ck.patch(over_tokens).moving)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + (x * 2 if len(x) > 1 else x),
        lambda x: x + (x.square().mean(-1, keepdim=True) if len(x) > 1 else x.mean(-1, True)),
    ],
    ids=["exact", "reductions"],
)
def test_a_branch_on_the_number_of_sequences_is_named(step):
    """Each side alone has bits that follow no batch."""
    moving = ck.patch(llama(step)).moving
    assert {one.part for one in moving} == {"Stepping"}
    assert all("some numbers of sequences" in one.known for one in moving)


def test_a_product_over_the_sequence_by_an_op_of_ours():
    """Whoever computes it: its addends are other tokens."""
    net = llama(lambda x: ck.linear(x.mT, x.new_ones(1, x.shape[1])).mT + x)
    named = [one.known for one in ck.patch(net).moving if one.known.startswith("linear (")]
    assert named and all("reduces over the sequence" in text for text in named)


def test_attention_to_chosen_blocks_is_refused_by_name():
    """MiniMax-M3's sparse layers: with blocks of 128 keys the short sequences see all of them."""
    config = transformers.AutoConfig.for_model(
        "minimax_m3_vl_text", vocab_size=131, hidden_size=128, intermediate_size=160,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        rotary_dim=64, max_position_embeddings=4096, num_local_experts=4, num_experts_per_tok=2,
        index_n_heads=1, index_head_dim=64, layer_types=["minimax_m3_sparse"],
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    with pytest.raises(PatchError, match="block_indices: expected None"):
        ck.patch(net, strict=True)


def test_the_loss_is_reported_and_not_refused():
    net = all_causal_lms.build("granite")
    (left,) = [one for one in ck.patch(net, strict=True).left if one.part.endswith("loss")]
    assert not left.moves and "torch's cross entropy" in left.known
    tokens = all_causal_lms.ids(2)
    assert net.train()(tokens, labels=tokens).loss.isfinite()


def test_the_report_says_which_ops_ran():
    """Ours, by module; a head that is passed over is not among them."""
    net = all_causal_lms.build("granite")
    ran = set(ck.patch(net).ran)
    assert {
        ("lm_head", "linear"),
        ("model.norm", "norm"),
        ("model.embed_tokens", "embedding"),
    } <= ran
    assert not any(name == "lm_head" for name, _ in ck.patch(llama(lambda x: x).model).ran)
    assert ck.patch(families.model("llama")).ran == ()  # reviewed: not observed


def test_layers_that_are_passed_over_are_said():
    """The second observation runs two of a kind; what they run is said of each."""
    report = ck.patch(llama(lambda x: x * x.square().mean(-1, keepdim=True), 5), strict=True)
    names = {one.name for one in report.replaced if one.part == "Stepping"}
    assert names == {f"model.layers.{i}.mlp" for i in range(5)}
    ran = {name for name, op in report.ran if name.endswith("q_proj") and op == "linear"}
    assert ran == {f"model.layers.{i}.self_attn.q_proj" for i in range(5)}


def test_an_observation_leaves_the_model_alone():
    net = llama(lambda x: x * 1)
    calls = []
    net.model.norm.register_forward_hook(lambda *_: calls.append(1))
    before = {name: p.clone() for name, p in net.named_parameters()}
    state = torch.get_rng_state()
    ck.patch(net, strict=True)
    assert calls == [] and same_bytes(torch.get_rng_state(), state)
    for name, parameter in net.named_parameters():
        assert parameter.grad is None and parameter.requires_grad
        assert same_bytes(parameter, before[name])
    net(families.ids())
    assert calls == [1]


def test_a_model_that_cannot_be_observed_is_not_complete():
    def broken(x):
        raise RuntimeError("no")

    known = [one.known for one in ck.patch(llama(broken)).moving]
    assert "it could not be observed (RuntimeError: no)" in known


def test_weights_take_no_memory():
    """A model of 142 GB on meta is observed; activations, which are not on meta, are small."""
    with torch.device("meta"):
        config = transformers.GraniteConfig(
            hidden_size=1 << 16, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
            vocab_size=1 << 17, intermediate_size=1 << 17, num_hidden_layers=2,
        )  # fmt: skip
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    report = ck.patch(net)
    assert report.complete, str(report)


def test_forwards_keep_their_signatures():
    net = all_causal_lms.build("cohere")
    before = {name: inspect.signature(m.forward) for name, m in net.named_modules()}
    report = ck.patch(net, strict=True)
    assert any("ck.batch_invariant" in one.by for one in report.replaced)
    invariant = [n for n, m in net.named_modules() if state.kind_of(m) == "invariant"]
    for name in invariant:
        assert inspect.signature(net.get_submodule(name).forward) == before[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_element_has_the_same_bits_at_every_place(kind, dtype):
    x = (torch.rand(1025, generator=torch.Generator().manual_seed(0)) * 3 + 0.1).to(dtype)
    x = x / 4 if kind == "erfinv" else x  # inside of its domain
    whole = element(x, kind, 0.3)
    alone = torch.cat([element(x[i : i + 1], kind, 0.3) for i in range(len(x))])
    assert same_bytes(whole, alone) and same_bytes(element(x[3:], kind, 0.3), whole[3:])
    exact = KINDS[kind].function(x.double(), 0.3)
    assert (whole.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_elements(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(65, generator=generator) * 3 + 0.1
    x = (x / 4 if kind == "erfinv" else x).requires_grad_()
    exact = x.detach().double().requires_grad_()
    element(x, kind, 0.3).sum().backward()
    KINDS[kind].function(exact, 0.3).sum().backward()
    assert (x.grad.double() - exact.grad).abs().max() <= 1e-5 * exact.grad.abs().max()


@pytest.mark.parametrize("shape", [(3, 5, 1), (5, 8), (8,), (1, 1, 8), (3, 1, 1), ()])
@pytest.mark.parametrize("function", [torch.mul, torch.add, torch.sub, torch.div])
def test_gradients_of_broadcasts(function, shape):
    """Within the bound of float32, whichever side is broadcast; leading ones as well."""
    generator = torch.Generator().manual_seed(0)
    for full in ((3, 5, 8), (1, 1, 8)):
        if len(shape) == 3 and full[0] == 1 and shape != (1, 1, 8):
            continue
        leaves = [torch.rand(s, generator=generator).add(0.5) for s in (full, shape)]
        grads = []
        for dtype in (torch.float32, torch.float64):
            a, b = (t.detach().clone().to(dtype).requires_grad_() for t in leaves)
            with Elements():
                out = function(a * 1, b * 1) + function(b * 1, a * 1)
            out.backward(torch.ones_like(out).cumsum(-1))
            grads.append((a.grad, b.grad))
        for mine, exact in zip(*grads, strict=True):
            assert mine.shape == exact.shape
            assert (mine - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kind", ["smollm3", "gpt2", "opt"])
def test_dense_models_are_complete(kind):
    assert all_causal_lms.outcome(kind)[0] == "complete"


def test_sinks_are_attended():
    """gpt-oss: what is left is its mixture of experts."""
    report = ck.patch(all_causal_lms.build("gpt_oss"))
    assert "attention" in {one.part for one in report.replaced}
    names = {one.name.rpartition(".")[2] for one in report.moving}
    assert names <= {"", "mlp", "router", "experts", "gate"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_causal_lm(kind):
    """As the page of docs says; what is called complete has no byte that differs."""
    state, _ = all_causal_lms.outcome(kind)
    assert state == all_causal_lms.recorded().get(kind), state
    assert state not in ("differs", "crash")
