"""Hybrids of the gated delta rule, Mamba-2 and Mamba under `ck.patch`: rows, values, mixers."""

from __future__ import annotations

import copy
import inspect
import random

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.integrations import packs
from cute_kernels.linear_attn import cache, op_selective
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards import mixers
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.patch.families import by_night, cache_of, first_mixer, hidden, mixer_of, through

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


def without_a_state(monkeypatch):
    """Each call starts from zero, as transformers' second part of a prefill."""
    scan = op_selective.selective_scan

    def from_zero(*args):
        return scan(*args[:8], None if args[8] is None else args[8] * 0, *args[9:])

    monkeypatch.setattr(cache.op_selective, "selective_scan", from_zero)
    return {"chunks", "grid", "tokens"}


def with_a_bias_twice(monkeypatch):
    """The steps of a call without a cache have the bias of dt_proj twice."""
    scan = mixers.linear_attn.selective_scan

    def more(u, delta, *operands, delta_bias, **options):
        return scan(u, delta, *operands, delta_bias=2 * delta_bias, **options)

    monkeypatch.setattr(mixers.linear_attn, "selective_scan", more)
    return {"chunks", "grid", "tokens"}


#: Mutant -> the model whose mixer it changes.
MUTANTS = {
    without_the_mask: "olmo_hybrid",
    without_offsets: "olmo_hybrid",
    without_limits: "nemotron_h",
    without_a_state: "jamba",
    with_a_bias_twice: "jamba",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(monkeypatch, mutant):
    mixer, config = mixer_of(MUTANTS[mutant], torch.float32)
    want = mutant(monkeypatch)
    assert want <= set(surroundings(mixer, config, torch.float32))


def drafted(mixer, config, x) -> torch.Tensor:
    """What the mixer gives for x, with drafts behind it that are dropped, from any place."""
    drafts, choice = hidden(1, 64, 3, x.dtype), random.Random(1)
    cache, start = cache_of(config), 50
    rows = [through(mixer, x[:, :start], [], cache)]
    cache.activate_past_recording()
    while start < x.shape[1]:
        good, bad = choice.randrange(1, 30), choice.randrange(0, 40)
        part = x[:, start : start + good]
        draft = torch.cat([part, drafts[:, :bad]], 1)
        # A draft model goes token by token, the model takes all at once.
        cuts = range(1, draft.shape[1]) if bad % 2 else []
        rows.append(through(mixer, draft, cuts, cache)[:, : part.shape[1]])
        cache.layers[0].crop(-bad)
        start += good
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
    copied = copy.deepcopy(cache)
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
    again = through(mixer, rest[:3], [], copied)
    assert same_bytes(again[1:2], out[1:2])
    layer.reset()
    assert same_bytes(through(mixer, x[:2], [], cache), through(mixer, x[:2], [], None))
