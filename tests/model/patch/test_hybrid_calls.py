"""Calls of patched hybrids: generation, caches, training, packs; what is left, what is refused."""

from __future__ import annotations

import copy
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.integrations import packs
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards import mixers
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.patch.families import by_night, cache_of, first_mixer, hidden, mixer_of, through
from tests.model.refusals import raises


@pytest.fixture(scope="module")
def patched():
    return families.patched_once(families.model)


# ---- generation ----------------------------------------------------------------------------------


#: By night, those whose layers others cover.
OTHERS = ("qwen3_5", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "kimi_linear", "mamba")


@pytest.mark.parametrize(
    "name", ["qwen3_next", "nemotron_h", "jamba", "falcon_mamba", *by_night(*OTHERS)]
)
def test_what_is_generated_has_the_logits_of_training(patched, name):
    """Padded prompts, token by token; and drafts that prompt lookup or a model makes."""
    net, _ = patched(name)
    prompts = families.ids(3, 61, seed=5)
    mask = torch.ones_like(prompts)
    mask[0, :7], mask[2, :2] = 0, 0
    ids, logits = families.generated(net, prompts, attention_mask=mask)
    mask = F.pad(mask, (0, families.NEW), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    want = all_causal_lms.logits(net, ids, attention_mask=mask, position_ids=positions)
    assert same_bytes(logits.to(want.dtype), want[:, -families.NEW - 1 : -1])
    if name.endswith("mamba"):  # transformers makes no drafts for them
        return
    twice = prompts[1:2, :31].repeat(1, 2)
    want, draft = families.generated(net, twice), families.model(name, seed=0)
    with torch.no_grad():
        mixer = first_mixer(draft)
        mixer.get_submodule(mixers.mixer_of(type(mixer)).out).weight *= 1.1
    ck.patch(draft, strict=True)
    draft.generation_config.eos_token_id = None
    for helper in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": draft}):
        assert all(map(same_bytes, families.generated(net, twice, **helper), want)), helper
    ck.unpatch(draft)
    with pytest.raises(ValueError, match="stateful"):
        families.generated(draft, twice, prompt_lookup_num_tokens=4)


def test_without_products():
    """Of a model whose linear layers stay torch's the mixer is replaced all the same."""
    net = families.model("mamba")
    want = families.logits(net, families.TOKENS)
    ck.patch(net, linear=False)
    assert type(first_mixer(net).dt_proj) is torch.nn.Linear
    got = families.logits(net, families.TOKENS)
    assert (got - want).norm() < 0.03 * want.norm()


# ---- caches between calls ------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [range(1, 18), [3, 4, 17]])
def test_padding_in_calls_of_one_column(patched, cuts):
    """transformers gives a state's layers no mask of one column; a mask may be written to later."""
    net, _ = patched("qwen3_next")
    tokens, mask = families.TOKENS[:2, :17], torch.ones(2, 17, dtype=torch.long)
    mask[0, :4] = 0
    alone = families.logits(net, tokens[:1, 4:])
    cache = cache_of(net.config)
    for _ in range(2):  # a cache that is reset begins again
        rows = []
        for first, end in itertools.pairwise([0, *cuts]):
            seen = mask[:, :end].clone()
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, first:end]
            inputs = {"attention_mask": seen, "position_ids": positions, "past_key_values": cache}
            rows.append(net(tokens[:, first:end], **inputs).logits.detach())
            seen.zero_()
        assert same_bytes(torch.cat(rows, 1)[:1, 4:], alone)
        cache.reset()


@pytest.mark.parametrize("length", [1, 5])
def test_a_model_reads_no_mask_on_the_host(patched, length):
    net, tokens = patched("qwen3_next")[0], families.TOKENS[:, :length]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("read")):
        assert packs.with_sequences(net.model, inputs) is inputs


# ---- training ------------------------------------------------------------------------------------


def stepped(net: torch.nn.Module, **inputs: object) -> list[torch.Tensor]:
    """Logits, and all gradients for a gradient of the logits."""
    net.zero_grad()
    out = net(**inputs).logits
    out.backward(torch.ones_like(out) * torch.arange(out.shape[-1]).to(out.dtype))
    return [out.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "name", ["olmo_hybrid", "nemotron_h", *by_night("granitemoehybrid", "jamba", "kimi_linear")]
)
def test_a_cache_and_checkpoints_change_no_gradient(patched, name):
    """transformers makes a cache in training unless it is told not to."""
    net, _ = patched(name)
    inputs = {"input_ids": families.ids(2, 70)}
    want = stepped(net, use_cache=False, **inputs)
    assert all(map(same_bytes, stepped(net, use_cache=True, **inputs), want))
    net.train().gradient_checkpointing_enable()
    got = stepped(net, **inputs)
    net.eval().gradient_checkpointing_disable()
    assert len(want) == len(got) and all(map(same_bytes, got, want))


@pytest.mark.parametrize(
    "name",
    ["olmo_hybrid", "granitemoehybrid", "jamba", "kimi_linear"]
    + by_night("nemotron_h", "falcon_h1"),
)
def test_packs_of_every_kind(patched, name):
    """By lengths, by numbers and by positions, of one row and of two."""
    net, _ = patched(name)
    parts = [families.ids(1, n, seed=n) for n in (19, 70, 33)]
    want = [families.logits(net, part) for part in parts]
    ids = torch.cat(parts, 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    lengths = torch.tensor([0, 19, 89, 122], dtype=torch.int32)
    by_lengths = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    for batch, inputs in ((1, {}), (2, {}), (1, by_lengths)):
        rows = ids.expand(batch, -1)
        out = families.logits(net, rows, position_ids=positions.expand(batch, -1), **inputs)
        pieces = out[batch - 1 :].split([19, 70, 33], 1)
        assert all(map(same_bytes, map(torch.Tensor.contiguous, pieces), want)), (batch, inputs)


def test_a_layer_that_keeps_packs_to_itself_is_noticed(patched, monkeypatch):
    """The mutant: Jamba's, which gives its mixer no keywords."""
    init = mixers._PackedLayer.__init__
    monkeypatch.setattr(mixers._PackedLayer, "__init__", lambda *args: init(*args[:2], {}))
    with pytest.raises(AssertionError):
        test_packs_of_every_kind(patched, "jamba")


#: Model -> parameters of its mixer but for projections, and those without a main_grad.
WRITTEN = {
    "olmo_hybrid": ({"A_log", "dt_bias", "conv1d.weight", "o_norm.weight"}, set()),
    "kimi_linear": (
        {"forget_gate.A_log", "forget_gate.dt_bias", "conv1d.weight", "o_norm.weight"},
        set(),
    ),
    "nemotron_h": (
        {"D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"},
        {"A_log"},
    ),
    "jamba": (
        {"D", "conv1d.weight", "conv1d.bias", *(f"{n}_layernorm.weight" for n in ("dt", "b", "c"))},
        {"dt_proj.bias"},
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_gradients_go_to_main_grad_in_one_order(name):
    """Of a mixer's own parameters: one batch, or one micro-batch for each sequence."""
    net, (written, others) = families.model(name), WRITTEN[name]
    report = ck.patch(net, strict=True, main_grad=True)
    tokens, mixer = families.ids(3, 70), first_mixer(net)
    left = {id(net.get_parameter(key)) for key in report.main_grad_left}
    named = {n: p for n, p in mixer.named_parameters() if p.dim() != 2}
    assert set(named) == written | others and not report.main_grad_shared
    assert {n for n, p in named.items() if id(p) in left} == others
    mine = {n: named[n] for n in written}
    sums = []
    for groups in (tokens.split(3), tokens.split(1)):
        families.give_main_grads(net)
        for group in groups:
            out = net(group, use_cache=False).logits
            out.backward(torch.ones_like(out) * torch.arange(out.shape[-1]).to(out.dtype))
        assert all(p.grad is None for p in net.parameters() if id(p) not in left)
        assert all(named[n].grad is not None for n in others)
        sums.append({n: p.main_grad for n, p in mine.items()})
    assert all(sums[0][n].any() for n in mine)
    # Rows of norms are added in parts that do not end with a sequence of 70 tokens.
    apart = {n for n in mine if not same_bytes(sums[0][n], sums[1][n])}
    assert all("norm" in n for n in apart)


#: `ck.audit` finds no cache of Mamba, whose name is another.
NOT_AUDITED = ("mamba2", "falcon_h1_norm", "falcon_mamba", "mamba")
AUDITED = [name for name in families.HYBRIDS if name not in NOT_AUDITED]


@pytest.mark.nightly
@pytest.mark.parametrize("name", AUDITED)
def test_audits(name):
    net = families.model(name)
    report = ck.patch(net, strict=True, main_grad=True)
    sequences = [families.ids(1, length, seed=length)[0] for length in (19, 70, 33)]
    audit = ck.audit(net, sequences)
    assert audit.ok, str(audit)
    # Zamba2 has one block of attention in several layers: their sums are not promised.
    others = {*report.main_grad_left, *report.main_grad_shared}
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(key not in others)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    audit = ck.audit(net, sequences, transforms=["micro_batches", "gradient_repeat"])
    assert audit.ok and not audit.information, str(audit)


# ---- the way back, and refusals ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["olmo_hybrid", "kimi_linear"])
def test_the_way_back(name):
    """An unpatched model has its own bytes, and does not take a patched one's cache."""
    net = families.model(name)
    want, stateful = families.logits(net, families.TOKENS), type(net)._is_stateful
    ck.patch(net, strict=True)
    assert stateful and not net._is_stateful and not net.model._is_stateful
    ours = families.logits(net, families.TOKENS)
    assert same_bytes(families.logits(copy.deepcopy(net), families.TOKENS), ours)
    cache = cache_of(net.config)
    with torch.no_grad():
        net(families.TOKENS, past_key_values=cache)
        ck.unpatch(net)
        with raises("ArgumentValueError ... got one of a patched model"):
            net(families.TOKENS, past_key_values=cache)
    assert net._is_stateful and {state.kind_of(m) for m in net.modules()} == {None}
    back = families.logits(net, families.TOKENS)
    assert same_bytes(back, want) and not same_bytes(back, ours)


def of_width(width: int):
    def change(mixer: torch.nn.Module) -> None:
        sizes = mixer.conv_dim, mixer.conv_dim, width
        mixer.conv1d = torch.nn.Conv1d(*sizes, groups=mixer.conv_dim, bias=False).bfloat16()

    return change


def hooked(mixer: torch.nn.Module) -> None:
    mixer.conv1d.forward = lambda x: x


def full(mixer: torch.nn.Module) -> None:
    mixer.conv1d = torch.nn.Conv1d(mixer.conv_dim, mixer.conv_dim, 4).bfloat16()


def to(name: str, value: object):
    return lambda mixer: setattr(mixer, name, value)


def without(name: str):
    return lambda mixer: delattr(mixer, name)


#: Model -> what is changed in a mixer, and why it is left then.
LEFT = {
    "olmo_hybrid": [
        (of_width(5), "a convolution of width 5"),
        (full, "no depthwise nn.Conv1d"),
        (hooked, "its convolution has a forward of its own"),
        (to("activation", "gelu"), "activation = 'gelu'"),
        (to("head_k_dim", 12), "head sizes [12, 24]"),
    ],
    "nemotron_h": [
        (to("ssm_state_size", 12), "head sizes [12, 16]"),
        (to("n_groups", 3), "128 channels in 8 heads and 3 groups"),
        (without("time_step_limit"), "has no time_step_limit"),
    ],
    "jamba": [
        (to("ssm_state_size", 300), "ssm_state_size = 300"),
        (to("dt_proj", torch.nn.Identity()), "dt_proj, whose weight it"),
    ],
    "kimi_linear": [
        (lambda m: setattr(m.forget_gate, "forward", torch.abs), "its gate has a forward of"),
        (to("head_dim", 12), "head sizes [12]; ck.chunk_kda takes multiples"),
        (without("num_heads"), "mixer of this version has no num_heads"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "text"), [(name, *case) for name, cases in LEFT.items() for case in cases]
)
def test_mixers_that_are_left(name, change, text):
    net = families.model(name)
    change(first_mixer(net))
    with pytest.raises(PatchError, match=re.escape(text)):
        ck.patch(net, strict=True)
    assert net._is_stateful


def test_versions_that_are_refused(monkeypatch):
    """Of transformers, by what they have: 5.4 has no such layer of a cache."""
    net = families.model("olmo_hybrid")
    with monkeypatch.context() as patched:
        patched.delattr(transformers.cache_utils, "LinearAttentionLayer")
        assert any("record no past" in one.known for one in ck.patch(net).moving)
    del first_mixer(net).conv1d
    assert any("has no conv1d" in one.known for one in ck.patch(net).moving)


def filled(config) -> transformers.DynamicCache:
    cache = transformers.DynamicCache(config=config)
    plain = families.model("olmo_hybrid")
    plain(families.TOKENS[:1], past_key_values=cache)
    return cache


LENGTHS = torch.tensor([0, 17], dtype=torch.int32)
#: Call of a model -> what is said.
REFUSED = [
    (lambda net: {"past_key_values": filled(net.config)}, "ArgumentValueError ... past_key_values"),
    (lambda net: {"past_key_values": transformers.DynamicCache()}, "ArgumentValueError ... empty"),
    (lambda net: {"attention_mask": torch.ones(1, 1, 17, 17).bool()}, "ArgumentValueError ... [B"),
    (
        lambda net: {"cu_seq_lens_q": LENGTHS, "past_key_values": cache_of(net.config)},
        "ArgumentValueError ... past_key_values: expected None with a pack",
    ),
    (lambda net: {"is_causal": False}, "ArgumentValueError ... is_causal"),
    (lambda net: {"seq_idx": LENGTHS, "use_cache": False}, "ArgumentValueError ... position_ids"),
    (lambda net: {"score_mod": 1, "use_cache": False}, "ArgumentValueError ... score_mod"),
]


@pytest.mark.parametrize("inputs, said", REFUSED)
def test_calls_that_are_refused(patched, inputs, said):
    net, _ = patched("olmo_hybrid")
    with raises(said):
        net(families.TOKENS[:1], **inputs(net))


def test_tensors_that_are_refused(patched):
    mixer, config = mixer_of("olmo_hybrid", torch.float32)
    x = hidden(2, 5, 1, torch.float32)
    mask, offsets = torch.ones(2, 5), torch.tensor([0, 5])
    for inputs, said in (
        ({"attention_mask": mask[:, 1:]}, "ShapeError ... attention_mask: expected [2, 5]"),
        ({"attention_mask": mask, "seq_idx": mask}, "ArgumentValueError ... seq_idx: expected No"),
        ({"cu_seq_lens_q": offsets}, "ArgumentValueError ... cu_seq_lens_q: expected a batch of 1"),
        ({"seq_idx": mask[:, 1:]}, "ShapeError ... seq_idx: expected [2, 5]"),
    ):
        with raises(said):
            mixer(x, **inputs)
    # One mask, written to in between.
    whole = mixer(x, attention_mask=mask)
    mask[0, 0] = 0
    assert not same_bytes(mixer(x, attention_mask=mask)[:1], whole[:1])
    cache = cache_of(config)
    through(mixer, x, [], cache)
    with raises("ArgumentValueError ... past_key_values: expected a cache of 1 sequences"):
        mixer(x[:1], cache_params=cache)
    with raises("ArgumentValueError ... tokens_to_remove: expected 0 or a number ... -0 on"):
        cache.layers[0].crop(-1)
    cache.activate_past_recording()
    through(mixer, x, [], cache)
    cache.layers[0].crop(-3)
    with raises("ArgumentValueError ... tokens_to_remove: expected 0 or a number ... -2 on"):
        cache.layers[0].crop(-3)
    out = mixer(x.requires_grad_(), cache_params=cache)
    with raises("UnsupportedTransformError ... a gradient through tokens behind those of a cache"):
        out.sum().backward()
    mixer.activation = "gelu"
    with raises("PatchError ... activation: expected 'silu'"):
        mixer(x)


# ---- the gate of Kimi ----------------------------------------------------------------------------


@torch.no_grad()
def test_a_gate_has_decays_by_channel():
    """As transformers' in fp32, but for roundings of its input; 0 of padding."""
    net = families.model("kimi_linear")
    ck.patch(net, strict=True)
    x = torch.randn(2, 9, families.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    gate = first_mixer(net).forget_gate
    got = gate(x, packs.sequences_of(x, mask, {}))
    ck.unpatch(net)
    want = gate.float()(x.float())
    assert got.shape == (2, 9, 4, 16) and got.dtype == torch.float32 and not got[0, :3].any()
    got, want = got[mask.bool()], want[mask.bool()]
    assert (got - want).abs().max() < 2e-2 * want.abs().max()
    # One gate of a head would be far from that.
    assert (got.mean(-1, keepdim=True) - want).abs().max() > 0.2 * want.abs().max()
