"""transformers' own masks and caches through the integration: a sequence has its bytes in all."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, ShapeError
from cute_kernels.integrations import transformers as ours
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from tests.sparse_attn import cases  # noqa: E402

S, WINDOW = 230, 64

MODULE = torch.nn.Module()


def config(kind: str):
    shared = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shared |= {"head_dim": 64, "hidden_size": 128, "attn_implementation": ours.NAME}
    shared |= {"vocab_size": 97, "intermediate_size": 160}
    if kind == "llama":
        return transformers.LlamaConfig(**shared)
    return transformers.MistralConfig(**shared, sliding_window=WINDOW)


def tensors(length: int = S, seed: int = 1) -> list[torch.Tensor]:
    """q [1, 2, S, 64], k and v [1, 1, S, 64], as transformers has them."""
    with torch.device("cpu"):
        x = cases.inputs(1, 2, 1, length, length, 64, seed=seed)
    return [t.detach().transpose(1, 2).to(torch.get_default_device()) for t in x.leaves()]


def alone(kind: str, length: int = S, seed: int = 1) -> torch.Tensor:
    mask = BlockMask.causal(length, length)
    if kind == "mistral":
        mask = BlockMask.sliding_window(length, length, left=WINDOW - 1, right=0)
    return block_sparse_attention(*(t.transpose(1, 2) for t in tensors(length, seed)), mask)


def attended(
    kind: str, q, k, v, padding=None, cache=None, positions=None, **lengths
) -> torch.Tensor:
    """One forward pass of a model's only attention layer, as its code does it."""
    make = masking_utils.create_causal_mask
    if kind == "mistral":
        make = masking_utils.create_sliding_window_causal_mask
    embeds = torch.zeros(q.shape[0], q.shape[2], 1)
    mask = make(config(kind), embeds, padding, cache, position_ids=positions)
    if cache is not None:
        k, v = cache.update(k, v, 0)
    return ours.attention(MODULE, q, k, v, mask, is_causal=True, **lengths)[0]


def cache_of(kind: str, static: bool):
    if static:
        return transformers.StaticCache(config(kind), max_cache_len=S + 200)
    return transformers.DynamicCache(config=config(kind))


def small(kind: str):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(kind)).bfloat16().eval()


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    with torch.device(request.param):
        yield


def by_night(*cases: tuple) -> list:
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


@pytest.mark.parametrize(
    ("kind", "pad", "static"),
    [
        ("llama", 0, False),
        ("mistral", 1, False),
        ("mistral", 127, True),
        *by_night(("llama", 1, False), ("llama", 127, False), ("llama", 20, True)),
        *by_night(("mistral", 0, False), ("mistral", 127, False)),
    ],
)
def test_prefill_and_decode_behind_padding(device, kind, pad, static):
    """Chunks and single tokens through a cache, beside a neighbour that fills the batch."""
    near = tensors(S + pad, seed=2)
    mine = [torch.nn.functional.pad(t, (0, 0, pad, 0), value=3.0) for t in tensors()]
    batch = [torch.cat(pair) for pair in zip(near, mine, strict=True)]
    padding = torch.arange(S + pad) >= torch.tensor([[0], [pad]])
    cache, rows = cache_of(kind, static), []
    ends = [0, pad + 90, pad + 91, pad + 92, pad + 161, S + pad - 1, S + pad]
    for first, last in itertools.pairwise(ends):
        part = [t[:, :, first:last] for t in batch]
        rows.append(attended(kind, *part, padding[:, :last].long(), cache))
    out = torch.cat(rows, dim=1)
    assert same_bytes(out[1:, pad:], alone(kind))
    assert same_bytes(out[:1], alone(kind, S + pad, seed=2))


def packed(cut: int) -> list[torch.Tensor]:
    """q, k and v of two sequences, one behind the other."""
    one, two = tensors(cut), tensors(S - cut, seed=2)
    return [torch.cat(pair, dim=2) for pair in zip(one, two, strict=True)]


@pytest.mark.parametrize(
    ("cut", "kind"),
    [(60, "llama"), (64, "mistral"), (127, "mistral"), (128, "llama")]
    + by_night((60, "mistral"), (64, "llama"), (127, "llama"), (128, "mistral")),
)
def test_packs_through_positions_and_lengths(device, cut, kind):
    positions = torch.cat((torch.arange(cut), torch.arange(S - cut)))[None]
    lengths = torch.tensor([0, cut, S], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths.clone()}
    want = torch.cat((alone(kind, cut), alone(kind, S - cut, seed=2)), dim=1)
    for given in ({"positions": positions}, lengths, lengths | {"positions": positions}):
        assert same_bytes(attended(kind, *packed(cut), **given), want)


def test_lengths_that_are_not_read_are_killed(monkeypatch):
    """Mutant: documents see each other."""
    monkeypatch.setattr(ours, "_packed", lambda q, k, mask, *lengths: mask)
    with pytest.raises(AssertionError):
        test_packs_through_positions_and_lengths(None, 60, "llama")


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
    q, k, v = packed(60)
    with pytest.raises(ShapeError, match="a batch of 1"):
        attended("llama", *(torch.cat([t, t]) for t in (q, k, v)), cu_seq_lens_q=LENGTHS)
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


@pytest.mark.parametrize(("kind", "train"), [("llama", True), ("mistral", False)])
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
        test_prefill_and_decode_behind_padding(None, "mistral", 0, False)
    test_prefill_and_decode_behind_padding(None, "llama", 0, False)


def test_rows_of_a_mask_are_looked_at_in_parts(monkeypatch):
    want = attended("mistral", *tensors())
    monkeypatch.setattr(ours, "_CHUNK", 7 * S)
    assert same_bytes(attended("mistral", *tensors()), want)
    assert same_bytes(want, alone("mistral"))


def test_what_is_not_causal():
    """Said by an argument, as Llama 4's vision encoder says it, by the module, or by its config."""
    q, k, v = tensors()
    full = block_sparse_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    encoder, bidirectional = torch.nn.Module(), config("llama")
    encoder.is_causal = bidirectional.is_causal = False
    ones = torch.zeros(1, S, 1), torch.ones(1, S), None
    mask = masking_utils.create_causal_mask(bidirectional, *ones, allow_is_causal_skip=False)
    for module, given, options, want in (
        (MODULE, None, {"is_causal": False}, full),
        (MODULE, None, {}, alone("llama")),
        (encoder, None, {}, full),
        (encoder, None, {"is_causal": True}, alone("llama")),
        (MODULE, mask, {}, full),
    ):
        assert same_bytes(ours.attention(module, q, k, v, given, **options)[0], want)


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


CASES = [(kind, plain, "aot_eager") for kind in ("llama", "mistral") for plain in (False, True)]


@pytest.mark.parametrize(
    ("kind", "plain", "backend"), [("llama", False, "eager"), *by_night(*CASES)]
)
def test_one_graph_for_every_length_and_padding(device, kind, plain, backend, graphs):
    """Whole graphs; the second length makes sizes dynamic, and no later one compiles anew."""
    model = small(kind).to(torch.get_default_device())
    backend = backend if model.device.type == "cpu" else "inductor"
    run = torch.compile(model, fullgraph=True, backend=backend)
    ids = torch.randint(0, 97, (2, 150))
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


# By day with the bytes of eager mode, after ck.patch: tests/model/patch/test_compile.py.
@pytest.mark.nightly
def test_compiled_training_has_the_gradients(graphs):
    model = small("mistral").train()
    ids = torch.randint(0, 97, (2, 90), generator=torch.Generator().manual_seed(3))
    parameters = list(model.parameters())
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    want, got = (torch.autograd.grad(f(ids, labels=ids).loss, parameters) for f in (model, run))
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).float().norm() < 1e-2 * other.float().norm()
