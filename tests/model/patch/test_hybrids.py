"""Hybrids of the gated delta rule, Mamba-2 and Mamba under `ck.patch`: rows, caches, gradients."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import re

import pytest
import torch
import torch.nn.functional as F
import transformers

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.integrations import packs
from cute_kernels.linear_attn import cache
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards import mixers
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.refusals import raises


def by_night(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


#: Those whose layers others cover go by night.
NIGHTLY = ("qwen3_5_moe", "bamba", "mamba2", "falcon_h1", "falcon_h1_norm", "zamba2", "mamba")
NAMES = [name for name in families.HYBRIDS if name not in NIGHTLY]
each = pytest.mark.parametrize("name", [*NAMES, *by_night(*NIGHTLY)])
#: Ops that each hybrid has, and that of its mixers.
OURS = {"ck.causal_conv1d_fn", "ck.gated_rms_norm"}
WITHOUT_NORM = {"falcon_h1", "jamba", "falcon_mamba", "mamba"}
RULES = {
    mixers.DELTA_NET: "ck.chunk_gated_delta_rule",
    mixers.KDA: "ck.chunk_kda",
    mixers.MAMBA2: "ck.mamba_chunk_scan_combined",
    mixers.MAMBA: "ck.selective_scan",
}


def first_mixer(net: torch.nn.Module) -> torch.nn.Module:
    return mixers.mixers_in(net)[0]


@pytest.fixture(scope="module")
def patched():
    return families.patched_once(families.model)


@each
def test_rows_keep_their_bytes(patched, name):
    """Alone, in a batch, padded, in chunks, decoded, in a static cache, packed; and gradients."""
    net, report = patched(name)
    rule = RULES[state.kind_of(first_mixer(net))]
    ours = {*OURS, rule} - ({"ck.gated_rms_norm"} if name in WITHOUT_NORM else set())
    assert report.complete and {one.by for one in report.replaced} >= ours
    # A causal LM of Mamba hands on no positions that could tell packs.
    left = [] if "position_ids" in inspect.signature(net.forward).parameters else ["packs"]
    assert all_causal_lms.differing(net) == left


# ---- values --------------------------------------------------------------------------------------


def gradients(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of a mixer's parameters for a gradient of the logits."""
    net.zero_grad()
    out = net(families.TOKENS, use_cache=False).logits
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    out.backward(upstream.to(out.dtype))
    mine = {n: p.grad for n, p in first_mixer(net).named_parameters()}
    return {"logits": out.detach(), **mine}


@each
def test_values_against_float64(name):
    """Not twice as far from the model in float64 as the unpatched one in bf16.

    The norms of q and k are rounded, which transformers keeps in float32.  Jamba has one expert: a
    tie of two would hide all else.
    """
    settings = {"num_experts": 1} if name == "jamba" else {}
    eager, net = (families.model(name, **settings) for _ in range(2))
    ck.patch(net, strict=True)
    eager.set_attn_implementation("eager")
    if all_causal_lms.is_moe(eager):
        eager.set_experts_implementation("eager")
    exact = gradients(copy.deepcopy(eager).double())
    torchs, ours = gradients(eager), gradients(net)
    assert len(ours) >= 8
    for part, want in exact.items():
        error, bound = ((t[part].double() - want).norm() for t in (ours, torchs))
        assert error <= 2 * bound + 2e-3 * want.norm(), part


# ---- a mixer -------------------------------------------------------------------------------------


def mixer_of(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, object]:
    """A mixer of a patched model, and the config."""
    net = families.model(name).to(dtype)
    ck.patch(net)
    return first_mixer(net), net.config


def hidden(batch: int, length: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, families.HIDDEN, generator=generator).to(dtype)


def cache_of(config, recording: bool = False) -> transformers.DynamicCache:
    cache = transformers.DynamicCache(config=config)
    if recording:
        cache.activate_past_recording()
    return cache


@torch.no_grad()
def through(mixer, x, cuts, cache, mask=None) -> torch.Tensor:
    """What the mixer gives for x, piece by piece."""
    ends, rows = [0, *cuts, x.shape[1]], []
    for first, end in itertools.pairwise(ends):
        part = None if mask is None else mask[:, first:end]
        rows.append(mixer(x[:, first:end], cache_params=cache, attention_mask=part))
    return torch.cat(rows, 1)


#: More than two chunks of 64.
LENGTH = 150
#: By day: the dtype that hides nothing, and the one that models have.
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]


def surroundings(mixer, config, dtype) -> list[str]:
    """In which a row of a mixer has other bytes than in a whole pass."""
    x, near = hidden(1, LENGTH, 1, dtype), hidden(2, LENGTH + 9, 2, dtype)
    near[0] = float("nan")
    with torch.no_grad():
        want = mixer(x)
    rows = {
        name: through(mixer, x, cuts, cache_of(config))
        for name, cuts in {
            "chunks": sorted(random.Random(0).sample(range(1, LENGTH), 5)),
            "grid": [64, 128],
            "tokens": range(60, 70),
        }.items()
    }
    for side, first in (("left", 9), ("right", 0)):
        padded, mask = F.pad(x, (0, 0, first, 9 - first), value=3.0), torch.ones(3, LENGTH + 9)
        mask[1, :first], mask[1, LENGTH + first :] = 0, 0
        batch = torch.cat([near[:1], padded, near[1:]])
        with torch.no_grad():
            whole = mixer(batch, attention_mask=mask)
        cached = through(mixer, batch, [70, 71, 140], cache_of(config), mask)
        for name, out in ((side, whole), (f"{side}, chunks", cached)):
            rows[name] = out[1:2, first : first + LENGTH]
            if out[1][mask[1] == 0].any():
                rows[f"{name}: padding"] = out[1:2]
    with torch.no_grad():
        pack = torch.cat([near[1:, :11], x, near[1:, :70]], 1)
        offsets = torch.tensor([0, 11, 11, 11 + LENGTH, pack.shape[1]], dtype=torch.int32)
        rows["pack"] = mixer(pack, cu_seq_lens_q=offsets)[:, 11 : 11 + LENGTH]
        numbers = torch.repeat_interleave(torch.tensor([5, 7, 2]), torch.tensor([11, LENGTH, 70]))
        twice = mixer(pack.expand(2, -1, -1), seq_idx=numbers.expand(2, -1))
        rows["packs"] = twice[1:, 11 : 11 + LENGTH]
    return [name for name, out in rows.items() if not same_bytes(out, want)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["qwen3_next", "olmo_hybrid", "kimi_linear", "nemotron_h", "jamba"]
)
def test_rows_of_a_mixer(name, dtype):
    """Beside NaN, with padding that is not zero, and whatever a cache has."""
    assert surroundings(*mixer_of(name, dtype), dtype) == []


def without_the_mask(monkeypatch):
    """Padding is tokens, as in a state that a batch shares."""
    of = packs.sequences_of
    monkeypatch.setattr(packs, "sequences_of", lambda x, mask, options: of(x, None, options))
    return {"left", "left: padding", "right: padding", "left, chunks"}


def without_offsets(monkeypatch):
    """The convolution reads over the beginning of a sequence of a pack."""
    whole = mixers.linear_attn.causal_conv1d_fn

    def convolve(*args, cu_seqlens, **options):
        # A record gives the inputs before each sequence.
        return whole(*args, **options, cu_seqlens=cu_seqlens if len(args) > 3 else None)

    monkeypatch.setattr(mixers.linear_attn, "causal_conv1d_fn", convolve)
    return {"pack", "packs", "left", "right"}


def without_limits(monkeypatch):
    """Steps are not clamped behind a cache, as in transformers' single tokens."""
    whole = cache.StateSpaceCache.mamba_chunk_scan_combined

    def scan(*args, dt_limit, **options):
        return whole(*args, **options)

    monkeypatch.setattr(cache.StateSpaceCache, "mamba_chunk_scan_combined", scan)
    return {"chunks", "grid", "tokens"}


#: Mutant -> the model whose mixer it changes.
MUTANTS = {
    without_the_mask: "olmo_hybrid",
    without_offsets: "olmo_hybrid",
    without_limits: "nemotron_h",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(monkeypatch, mutant):
    mixer, config = mixer_of(MUTANTS[mutant], torch.float32)
    want = mutant(monkeypatch)
    assert want <= set(surroundings(mixer, config, torch.float32))


def drafted(mixer, config, x) -> torch.Tensor:
    """What the mixer gives for x, with drafts behind it that are dropped, from any place."""
    drafts, choice = hidden(1, 64, 3, x.dtype), random.Random(1)
    cache, at = cache_of(config), 50
    rows = [through(mixer, x[:, :at], [], cache)]
    cache.activate_past_recording()
    while at < x.shape[1]:
        good, bad = choice.randrange(1, 30), choice.randrange(0, 40)
        part = x[:, at : at + good]
        draft = torch.cat([part, drafts[:, :bad]], 1)
        # A draft model goes token by token, the model takes all at once.
        cuts = range(1, draft.shape[1]) if bad % 2 else []
        rows.append(through(mixer, draft, cuts, cache)[:, : part.shape[1]])
        cache.layers[0].crop(-bad)
        at += good
    return torch.cat(rows, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3_next", "jamba", *by_night("nemotron_h", "kimi_linear")])
def test_what_is_dropped_leaves_no_trace(monkeypatch, name, dtype):
    """Drafts of any length across chunks, and other tokens after them.  The mutant: none is."""
    mixer, config = mixer_of(name, dtype)
    x = hidden(1, LENGTH, 1, dtype)
    want = through(mixer, x, [], None)
    assert same_bytes(drafted(mixer, config, x), want)
    monkeypatch.setattr(ck.LinearAttentionCache, "rollback", lambda *_: None)
    assert not same_bytes(drafted(mixer, config, x), want)


def test_what_transformers_does_to_a_layer():
    """Reordered, repeated, moved, copied and reset, it goes on as its sequences alone."""
    mixer, config = mixer_of("olmo_hybrid", torch.bfloat16)
    x, rest = hidden(3, 70, 1, torch.bfloat16), hidden(4, 3, 2, torch.bfloat16)
    mask = torch.ones(3, 70)
    mask[1, :20] = 0
    cache = cache_of(config)
    through(mixer, x, [66], cache, mask)
    layer, order = cache.layers[0], [2, 1, 1, 0]
    assert layer.is_croppable and not layer.is_compileable and layer.batch == 3
    assert layer.record[0].length.tolist() == [70, 50, 70]
    kept = copy.deepcopy(cache)
    layer.reorder_cache(torch.tensor([2, 1, 0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 2, 3, 5]))
    layer.offload()
    layer.prefetch()
    out = through(mixer, rest, [1], cache)
    for b, first in enumerate(order):
        alone = x[first : first + 1, 20 * (first == 1) :]
        want = through(mixer, torch.cat([alone, rest[b : b + 1]], 1), [], None)[:, -3:]
        assert same_bytes(out[b : b + 1], want)
    again = through(mixer, rest[:3], [], kept)
    assert same_bytes(again[1:2], out[1:2])
    layer.reset()
    assert same_bytes(through(mixer, x[:2], [], cache), through(mixer, x[:2], [], None))


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "nemotron_h",
        "jamba",
        *by_night("qwen3_5", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "kimi_linear"),
    ],
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
    want = families.logits(net, ids, attention_mask=mask, position_ids=positions)
    assert same_bytes(logits.to(want.dtype), want[:, -families.NEW - 1 : -1])
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
    told = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    for batch, inputs in ((1, {}), (2, {}), (1, told)):
        rows = ids.expand(batch, -1)
        out = families.logits(net, rows, position_ids=positions.expand(batch, -1), **inputs)
        pieces = out[batch - 1 :].split([19, 70, 33], 1)
        assert all(map(same_bytes, map(torch.Tensor.contiguous, pieces), want)), (batch, inputs)


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
        for parameter in net.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
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
    found = ck.audit(net, sequences)
    assert found.ok, str(found)
    # Zamba2 has one block of attention in several layers: their sums are not promised.
    others = {*report.main_grad_left, *report.main_grad_shared}
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(key not in others)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    found = ck.audit(net, sequences, transforms=["micro_batches", "gradient_repeat"])
    assert found.ok and not found.information, str(found)


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_adapters(first):
    peft = pytest.importorskip("peft", reason="peft is not installed: .[trl]")
    net = families.model("qwen3_next")
    if first == "patch":
        ck.patch(net, strict=True)
    config = peft.LoraConfig(r=8, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj"])
    wrapped = peft.get_peft_model(net, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert ck.patch(wrapped, strict=True).complete
    net = wrapped.eval().get_base_model()
    # A frozen embedding has no gradient.
    assert [one for one in all_causal_lms.differing(net) if "retain_grad" not in one] == []


# ---- the way back, and refusals ------------------------------------------------------------------


def test_the_way_back():
    net = families.model("olmo_hybrid")
    want, stateful = families.logits(net, families.TOKENS), type(net)._is_stateful
    ck.patch(net, strict=True)
    assert stateful and not net._is_stateful and not net.model._is_stateful
    ours = families.logits(net, families.TOKENS)
    assert same_bytes(families.logits(copy.deepcopy(net), families.TOKENS), ours)
    ck.unpatch(net)
    assert net._is_stateful and {state.kind_of(m) for m in net.modules()} == {None}
    assert same_bytes(families.logits(net, families.TOKENS), want)


def of_width(width: int):
    def change(mixer: torch.nn.Module) -> None:
        sizes = mixer.conv_dim, mixer.conv_dim, width
        mixer.conv1d = torch.nn.Conv1d(*sizes, groups=mixer.conv_dim, bias=False).bfloat16()

    return change


def hooked(mixer: torch.nn.Module) -> None:
    mixer.conv1d.forward = lambda x: x


def full(mixer: torch.nn.Module) -> None:
    mixer.conv1d = torch.nn.Conv1d(mixer.conv_dim, mixer.conv_dim, 4).bfloat16()


#: What is changed in a mixer -> why it is left.
LEFT = {
    "width": (of_width(5), "a convolution of width 5"),
    "channels": (full, "no depthwise nn.Conv1d"),
    "forward": (hooked, "its convolution has a forward of its own"),
    "activation": (lambda m: setattr(m, "activation", "gelu"), "activation = 'gelu'"),
    "sizes": (lambda m: setattr(m, "head_k_dim", 12), "head sizes [12, 24]"),
}
#: Likewise in a mixer of Mamba-2.
LEFT_MAMBA2 = {
    "state": (lambda m: setattr(m, "ssm_state_size", 12), "head sizes [12, 16]"),
    "groups": (lambda m: setattr(m, "n_groups", 3), "128 channels in 8 heads and 3 groups"),
    "missing": (lambda m: delattr(m, "time_step_limit"), "has no time_step_limit"),
}
LEFT_MAMBA = {
    "wide state": (lambda m: setattr(m, "ssm_state_size", 300), "ssm_state_size = 300"),
    "steps": (lambda m: setattr(m, "dt_proj", torch.nn.Identity()), "dt_proj, whose weight it"),
}


@pytest.mark.parametrize("change", [*LEFT, *LEFT_MAMBA2, *LEFT_MAMBA])
def test_mixers_that_are_left(change):
    function, text = (LEFT | LEFT_MAMBA2 | LEFT_MAMBA)[change]
    name = "olmo_hybrid" if change in LEFT else "nemotron_h" if change in LEFT_MAMBA2 else "jamba"
    net = families.model(name)
    function(first_mixer(net))
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
