"""transformers' ``generate_batch`` on a patched model: training's bytes from pages."""

from __future__ import annotations

import threading

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations import continuous_batching
from tests.contract import same_bytes
from tests.integrations import gpu_continuous_batching as script

SMALL = script.SMALL


@pytest.fixture(scope="module", autouse=True)
def registered(one_thread):
    continuous_batching.register()


@pytest.fixture(scope="module")
def model():
    return script.make_model(SMALL, patched=True)


def check(model, requests) -> None:
    """Every log-prob has the bytes of training."""
    for prompt, (tokens, logps) in zip(requests, script.draw(model, SMALL, requests), strict=True):
        assert len(tokens) == SMALL.new and bool((logps < 0).all())
        assert same_bytes(logps, script.trained(model, prompt, tokens))


# ---- bytes --------------------------------------------------------------------------------------


def test_every_log_prob_has_the_bytes_of_training(model):
    calls = []  # (tokens, keys that are read, sequences) of each forward pass

    def called(module, args, inputs, output):
        if inputs.get("cache") is not None:
            sequences = len(inputs["cu_seq_lens_q"]) - 1
            read = inputs["read_index"][0].numel()
            calls.append((inputs["input_ids"].shape[1], read, sequences))

    hook = model.register_forward_hook(called, with_kwargs=True)
    check(model, script.prompts(SMALL))
    hook.remove()
    # Prefill without keys in pages, chunks of prefill beside decode rows, decode rows alone.
    assert calls[0][1] == 0 and calls[-1][0] == calls[-1][2]
    assert any(read and tokens > sequences for tokens, read, sequences in calls)
    assert max(sequences for *_, sequences in calls) == len(SMALL.lengths)


@pytest.mark.parametrize("page_size", [32, pytest.param(256, marks=pytest.mark.nightly)])
def test_pages_batches_and_order_do_not_show(model, page_size):
    requests = script.prompts(SMALL)
    want = script.draw(model, SMALL, requests)
    options = {"page_size": page_size, "num_blocks": 16, "max_batch_tokens": 130}
    got = script.draw(model, SMALL, requests[::-1], **options)[::-1]
    alone = [script.draw(model, SMALL, [one], max_batch_tokens=32)[0] for one in requests[1:3]]
    for (tokens, logps), (others, again) in zip([*want, *want[1:3]], [*got, *alone], strict=True):
        assert tokens == others and same_bytes(logps, again)


def test_a_shared_prefix_and_temperature(model):
    """Pages of another request; the log-probs of sampled tokens have training's temperature."""
    (first,) = script.prompts(SMALL, (40,))
    check(model, [first, first[:32] + [5, 9], first[:32] + [5, 8, 1]])
    torch.manual_seed(1)
    sampling = {"do_sample": True, "top_k": 20}
    requests = script.prompts(SMALL, (9, 20))
    drawn = script.draw(model, SMALL, requests, temperature=0.7, **sampling)
    for prompt, (tokens, logps) in zip(requests, drawn, strict=True):
        assert same_bytes(logps, script.trained(model, prompt, tokens, temperature=0.7))


def test_a_model_that_is_not_patched_differs():
    """The control: transformers' own attention and products."""
    with pytest.raises(AssertionError):
        check(script.make_model(SMALL, patched=False), script.prompts(SMALL))


MUTANTS = {
    "pages of another order": lambda table: table.roll(1, 1),
    "the first page for all": lambda table: table[:, :1].expand_as(table).contiguous(),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_block_table_is_seen(model, monkeypatch, change):
    true = continuous_batching._pages
    monkeypatch.setattr(continuous_batching, "_pages", lambda *args: change(true(*args)))
    with pytest.raises(AssertionError):
        check(model, script.prompts(SMALL, (40,)))


def test_decode_through_block_tables_has_the_same_bytes():
    """transformers uses them on a GPU only: the function on the same pages, in both forms."""
    torch.manual_seed(3)
    heads, size, pages = (4, 2), 16, 12
    k_pages, v_pages = torch.randn(2, pages, size, heads[1], 64).bfloat16()
    cache = Cache(k_pages, v_pages)
    table = torch.tensor([[3, 7, -1], [0, -1, -1], [9, 2, 5]], dtype=torch.int32)
    query = torch.randn(1, heads[0], 4, 64).bfloat16()
    key, value = torch.randn(2, 1, heads[1], 4, 64).bfloat16()
    cu_k = torch.tensor([0, 23, 24, 72, 72])
    batch = {
        "cache": cache,
        "cu_seq_lens_q": torch.tensor([0, 1, 2, 3, 3]),  # one sequence is padding
        "cu_seq_lens_k": {"full_attention": cu_k},
        "max_length_k": {"full_attention": 48},
        "block_table": torch.cat([table, table.new_full((1, 3), 0)])[None],
    }
    layer = torch.nn.Module()
    layer.layer_idx = 0
    before = k_pages.clone()
    got = continuous_batching.attention(layer, query, key, value, batch, 0.125, 0.0)
    changed = (k_pages != before).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[0, 0], [5, 15], [7, 6]]

    rows = [(n, j) for n, length in enumerate((23, 1, 48)) for j in range(length)]
    places = [int(table[n, j // size]) * size + j % size for n, j in rows]
    write = [places[end - 1] for end in (23, 24, 72)]
    k_pages.copy_(before)
    batch |= {
        "block_table": None,
        "cu_seq_lens_q": torch.tensor([0, 1, 2, 3]),
        "cu_seq_lens_k": {"full_attention": cu_k[:4]},
        "read_index": [torch.tensor(places)],
        "write_index": [torch.tensor(write)],
    }
    operands = query[:, :, :3], key[:, :, :3], value[:, :, :3]
    want = continuous_batching.attention(layer, *operands, batch, 0.125, 0.0)
    assert same_bytes(got[:, :3], want) and not got[:, 3].any()


class Cache:
    """Pages of one layer, with what of transformers' cache is used."""

    def __init__(self, k_pages, v_pages):
        self.index, self.layer_type, self.tokens_per_page = 0, "full_attention", k_pages.shape[1]
        self.pages, self.layer_to_allocator = (k_pages, v_pages), {0: self}

    def get_cache_for_block_table(self, layer):
        return self.pages

    def update(self, keys, values, layer, read, write):
        for pages, new in zip(self.pages, (keys, values), strict=True):
            pages.flatten(0, 1)[write] = new


# ---- what is wrapped ----------------------------------------------------------------------------


def test_masks_are_made_outside_of_a_batch_alone(model):
    """Training in another thread, at the time of a batch, has its masks."""
    made = []

    def seen(module, args, inputs, output):
        if inputs.get("cache") is None:
            return
        thread = threading.Thread(target=lambda: made.append(continuous_batching.makes_masks()))
        thread.start()
        thread.join()
        made.append(continuous_batching.makes_masks())

    hook = model.register_forward_hook(seen, with_kwargs=True)
    script.draw(model, SMALL, script.prompts(SMALL, (4,)))
    hook.remove()
    assert made[:2] == [True, False] and continuous_batching.makes_masks()
    padded = torch.tensor([[0, 0, 5, 6, 7]])
    mask = (padded != 0).long()
    with torch.no_grad():
        short = model(padded[:, 2:]).logits
        behind = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0))
    assert same_bytes(behind.logits[:, 2:].contiguous(), short)


def test_registering_twice_wraps_once_and_another_form_is_refused(monkeypatch):
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    before = ModelRunner.compute_batch, ModelRunner._sample
    continuous_batching.register()
    assert (ModelRunner.compute_batch, ModelRunner._sample) == before
    for owner, name, value, words in (
        (ModelRunner, "compute_batch", lambda self, batch: None, "compute_batch.model, batch_dat"),
        (continuous_batching, "_ALLOCATORS", "no_allocators", "with a no_allocators"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ArgumentTypeError, match=words):
            patch.setattr(owner, name, value)
            continuous_batching.register()


def test_what_is_not_covered_is_refused_by_name(model):
    layer = torch.nn.Module()
    layer.layer_idx = 0
    pages = torch.zeros(2, 16, 2, 64).bfloat16()
    for name, value, words in (
        ("layer_type", "sliding_attention", r"layer 0: expected full_attention"),
        ("tokens_per_page", 48, r"page_size: expected one of 16, 32"),
    ):
        cache = Cache(pages, pages)
        setattr(cache, name, value)
        operands = [torch.zeros(1, 2, 1, 64).bfloat16()] * 3
        with pytest.raises(ArgumentValueError, match=words):
            continuous_batching.attention(layer, *operands, {"cache": cache}, 0.125, 0.0)
