"""transformers' own masks and caches through the integration: a sequence has its bytes in all."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, ShapeError
from cute_kernels.integrations import transformers as ours
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from tests.integrations.cached import (  # noqa: E402
    MODULE,
    S,
    alone,
    attended,
    cache_of,
    config,
    packed,
    packs_through_lengths,
    packs_through_position_ids,
    prefill_and_decode_behind_padding,
    small,
    tensors,
)


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pad", [0, 1, 20, 127])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_prefill_and_decode_behind_padding(kind, pad, static):
    prefill_and_decode_behind_padding(kind, pad, static)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cut", [60, 64, 127, 128])
def test_packs_through_position_ids(cut, kind):
    packs_through_position_ids(cut, kind)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("cut", [60, 128])
def test_packs_through_lengths(cut, kind, with_positions):
    packs_through_lengths(cut, kind, with_positions)


def test_lengths_that_are_not_read_are_killed(monkeypatch):
    """Without them documents see each other, and nobody is told."""
    monkeypatch.setattr(ours, "_packed", lambda q, k, mask, *lengths: mask)
    with pytest.raises(AssertionError):
        packs_through_lengths(60, "llama", False)


LENGTHS = torch.tensor([0, 60, S], dtype=torch.int32)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS + 1}, "from 0 to 230"),
        ({"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS[[0, 2]]}, "of the keys"),
        ({"cu_seq_lens_q": LENGTHS[:2]}, "the tokens of q"),
        ({"cu_seq_lens_q": LENGTHS, "padding": True}, "padding in front"),
        ({"cu_seq_lens_q": LENGTHS, "cache": True}, "no cache"),
    ],
)
def test_lengths_that_are_refused(lengths, words):
    q, k, v = packed(60)
    if lengths.pop("padding", False):
        lengths["padding"] = (torch.arange(S) > 2).long()[None]
    if lengths.pop("cache", False):
        lengths["cache"] = cache_of("llama", True)
    with pytest.raises(ArgumentValueError, match=words):
        attended("llama", q, k, v, **lengths)


def test_a_batch_of_packs_and_another_mask_are_refused():
    q, k, v = (torch.cat([t, t]) for t in packed(60))
    with pytest.raises(ShapeError, match="a batch of 1"):
        attended("llama", q, k, v, cu_seq_lens_q=LENGTHS)
    q, k, v = packed(60)
    dense = torch.ones(1, 1, S, S, dtype=torch.bool).tril()
    with pytest.raises(ArgumentValueError, match="attention_mask"):
        ours.attention(MODULE, q, k, v, dense, cu_seq_lens_q=LENGTHS)


def test_a_collators_pack_trains_as_its_sequences_do():
    """Logits of a patched model, by the arguments that FlashAttention takes."""
    model = small("llama").train()
    ck.patch(model)
    features = [{"input_ids": torch.arange(n).mul(7).remainder(97).tolist()} for n in (40, 9, 130)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate(features)
    made = model(**{name: t for name, t in batch.items() if name != "labels"}).logits
    alone = [model(torch.tensor([f["input_ids"]])).logits for f in features]
    assert same_bytes(made, torch.cat(alone, dim=1))


def tokens(count: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 97, (rows, count), generator=generator)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_pack_is_told_apart_or_refused(kind, train):
    """transformers looks for one without a cache and a mask alone; a cache is the default."""
    model, ids = small(kind).train(train), tokens(79)
    ck.patch(model, strict=True)
    whole = model(ids, position_ids=torch.arange(79)[None]).logits
    ends = [0, 40, 49, 79]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
    want = [model(ids[:, a:b]).logits for a, b in itertools.pairwise(ends)]
    rows = model(ids, position_ids=positions, use_cache=False).logits
    assert same_bytes(rows, torch.cat(want, dim=1)) and not same_bytes(rows, whole)
    cache = transformers.DynamicCache(config=model.config)
    ones = torch.ones_like(ids)
    for options in (
        {},
        {"use_cache": True},
        {"past_key_values": cache},
        {"attention_mask": ones},
        {"attention_mask": ones, "use_cache": False},
    ):
        with pytest.raises(ArgumentValueError, match=r"position_ids: .*got 0 at token 40 of row 0"):
            model(ids, position_ids=positions, **options)
    both = torch.cat((torch.arange(79)[None], positions))
    with pytest.raises(ArgumentValueError, match="token 40 of row 1"):
        model(tokens(79, rows=2), position_ids=both)


def test_positions_that_no_pack_has_are_taken_beside_a_cache():
    """Left padding, whose positions are clamped, chunks, and the guesses of an assistant."""
    model = small("llama")
    ck.patch(model, strict=True)
    ids, mask = tokens(30, rows=2), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0
    clamped = (mask.cumsum(-1) - 1).clamp(min=0)
    filled = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as generate does: 1, 1, 0, 1
    want = model(ids[:1, 7:]).logits
    for positions in (clamped, filled):
        out = model(ids, attention_mask=mask, position_ids=positions)
        assert same_bytes(out.logits[:1, 7:], want)
    more = model(
        ids[:, :5],
        attention_mask=torch.cat((mask, mask[:, -5:]), dim=1),
        position_ids=clamped[:, -1:] + torch.arange(1, 6),
        past_key_values=out.past_key_values,
    )
    longer = model(torch.cat((ids[:1, 7:], ids[:1, :5]), dim=1)).logits
    assert same_bytes(more.logits[:1], longer[:, -5:])
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = model.generate(ids[1:], **options)
    assert same_bytes(model.generate(ids[1:], assistant_model=small("llama"), **options), alone)


def test_the_offset_of_a_cache_counts(monkeypatch):
    """Mutant: Mistral past its window, its dropped keys forgotten."""
    true = ours.api.kv_ranges

    def forgotten(seen, padding, q_offset, kv_offset, sizes, **rest):
        return true(seen, padding, q_offset, 0, sizes, **rest)

    monkeypatch.setattr(ours.api, "kv_ranges", forgotten)
    with pytest.raises(AssertionError):
        test_prefill_and_decode_behind_padding("mistral", 0, False)
    test_prefill_and_decode_behind_padding("llama", 0, False)


def test_rows_of_a_mask_are_looked_at_in_parts(monkeypatch):
    want = attended("mistral", *tensors())
    monkeypatch.setattr(ours, "_CHUNK", 7 * S)
    assert same_bytes(attended("mistral", *tensors()), want)
    assert same_bytes(want, alone("mistral"))


def test_a_module_that_is_not_causal():
    """Said by an argument, as Llama 4's vision encoder says it."""
    q, k, v = tensors()
    full = block_sparse_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    said = ours.attention(torch.nn.Module(), q, k, v, None, is_causal=False)[0]
    assert same_bytes(said, full)
    assert same_bytes(ours.attention(torch.nn.Module(), q, k, v, None)[0], alone("llama"))
    encoder = torch.nn.Module()
    encoder.is_causal = False
    assert same_bytes(ours.attention(encoder, q, k, v, None)[0], full)
    assert same_bytes(ours.attention(encoder, q, k, v, None, is_causal=True)[0], alone("llama"))


def test_a_bidirectional_mask():
    """A decoder that is told to look both ways makes no causal mask."""
    bidirectional = config("llama")
    bidirectional.is_causal = False
    q, k, v = tensors()
    mask = masking_utils.create_causal_mask(
        bidirectional, torch.zeros(1, S, 1), torch.ones(1, S), None, allow_is_causal_skip=False
    )
    full = block_sparse_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert same_bytes(ours.attention(MODULE, q, k, v, mask)[0], full)


def test_refusals():
    function = masking_utils.chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64))
    chunked = SimpleNamespace(attention_chunk_size=100)
    with pytest.raises(ArgumentValueError, match="attention_chunk_size: expected a multiple of"):
        ours.spans(1, S, S, mask_function=function, config=chunked, local_size=100)
    with pytest.raises(ArgumentValueError, match="gaps between the keys of query"):
        ours.spans(1, S, S, mask_function=lambda b, h, q, kv: (q - kv) % 3 == 0)
    with pytest.raises(ArgumentValueError, match="a gap in sequence 0"):
        ours.spans(1, 3, 3, attention_mask=torch.tensor([[1, 0, 1]]))


@pytest.fixture
def graphs():
    """Counts the graphs that are compiled."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("llama", False),
        *(pytest.param(*case, marks=pytest.mark.nightly)
          for case in (("llama", True), ("mistral", False), ("mistral", True))),
    ],
)  # fmt: skip
def test_one_graph_for_every_length_and_padding(kind, plain, graphs):
    """Whole graphs; the second length makes sizes dynamic, and no later one compiles anew."""
    model = small(kind)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, 97, (2, 150), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        seen = []
        for length in (150, 140, 131, 128, 60, 33):
            padding = torch.ones(2, length, dtype=torch.int64)
            padding[1, : length // 7] = 0
            given = {} if plain else {"attention_mask": padding}
            want, got = (f(ids[:, :length], use_cache=False, **given).logits for f in (model, run))
            assert (got - want)[padding.bool()].abs().max() < 2e-2 * want.abs().max()
            seen.append(graphs())
        assert seen[2:] == seen[2:3] * len(seen[2:])


def test_compiled_training_has_the_gradients(graphs):
    model = small("mistral").train()
    ids = torch.randint(0, 97, (2, 90), generator=torch.Generator().manual_seed(3))
    parameters = list(model.parameters())
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    want, got = (torch.autograd.grad(f(ids, labels=ids).loss, parameters) for f in (model, run))
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).float().norm() < 1e-2 * other.float().norm()


def test_generation_with_a_static_cache():
    model = small("llama")
    prompt = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    padding = torch.ones_like(prompt)
    padding[1, :9] = 0
    options = {"attention_mask": padding, "max_new_tokens": 8, "do_sample": False}
    options |= {"pad_token_id": 0, "output_scores": True, "return_dict_in_generate": True}
    dynamic = model.generate(prompt, **options)
    static = model.generate(prompt, cache_implementation="static", **options)
    for mine, other in zip(static.scores, dynamic.scores, strict=True):
        assert (mine - other).abs().max() < 2e-2 * other.abs().max()
