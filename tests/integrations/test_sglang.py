"""SGLang's hooks on our ops: in its duck types, and on its own classes where they import."""

from __future__ import annotations

import json
from types import SimpleNamespace as namespace

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError, SettingError
from cute_kernels.integrations import sglang as integration
from tests.contract import same_bytes
from tests.integrations import sglang_engine
from tests.integrations.vllm import processes

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
SCALE = DIM**-0.5


def randn(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---- layers -------------------------------------------------------------------------------------


def test_linears_and_the_head():
    layer = namespace(weight=randn(48, 32, seed=1))
    x, bias, addend = randn(5, 32), randn(48, seed=2), randn(5, 48, seed=3)
    want = ck.linear(x, layer.weight, bias)
    assert same_bytes(integration.linear_apply(None, layer, x, bias), want)
    got = integration.linear_with_addend(None, layer, x, addend, bias)
    assert same_bytes(got, want + addend)
    out = torch.empty(5, 48, dtype=torch.bfloat16)
    assert integration.linear_into(None, layer, x, out, bias) is out and same_bytes(out, want)
    before = layer.weight.clone()
    integration.keep_weights(None, layer)
    assert same_bytes(layer.weight, before)

    logits = integration.lm_head(None, x, layer)
    assert logits.dtype == torch.float32
    target = torch.tensor([3, 47, 0, 9, 20])
    scored = ck.log_probs(logits, target, temperature=0.7)
    assert same_bytes(scored, ck.linear_logp(x, layer.weight, target, temperature=0.7))
    layer.weight = layer.weight.float()
    with pytest.raises(PatchError, match=r"lm_head: expected a plain weight in torch\.bfloat16"):
        integration.lm_head(None, x, layer)


def norm_module(**changed):
    fields = {"weight": randn(64, seed=4), "has_weight": True, "variance_epsilon": 1e-5}
    fields |= dict.fromkeys(("variance_size_override", "override_orig_dtype"))
    fields["fp32_residual"] = False
    return namespace(**fields | changed)


def test_norms_and_activations():
    module, x, residual = norm_module(), randn(7, 64), randn(7, 64, seed=5)
    assert same_bytes(integration.rms_norm(module, x), ck.rms_norm(x, module.weight, 1e-5))
    y, h = integration.rms_norm(module, x, residual)
    assert same_bytes(h, x + residual) and same_bytes(y, ck.rms_norm(h, module.weight, 1e-5))
    plain = integration.rms_norm(norm_module(has_weight=False), x)
    assert same_bytes(plain, ck.rms_norm(x, None, 1e-5))
    method = type("UnquantizedLinearMethod", (), {})()
    fed = namespace(quant_method=method)
    want = ck.rms_norm(x, module.weight, 1e-5)
    assert same_bytes(integration.rms_norm(norm_module(_quant_linear=fed), x), want)
    for words, changed, arguments, options in (
        ("quant_linear: expected None", {}, (), {"quant_linear": namespace(quant_method=1)}),
        ("RMSNorm: .*expected None", {"fp32_residual": True}, (), {}),
        ("RMSNorm: .*expected None", {"variance_size_override": 32}, (), {}),
        ("post_residual_addition", {}, (residual, x), {}),
    ):
        with pytest.raises(PatchError, match=words):
            integration.rms_norm(norm_module(**changed), x, *arguments, **options)
    both = randn(7, 96)
    got = integration.silu_and_mul(None, both)
    assert same_bytes(got, ck.silu(both[:, :48]) * both[:, 48:])


class RotaryEmbedding:
    """Base of SGLang's, by its name."""

    base, rotary_dim, head_size, is_neox_style = 5e5, DIM, DIM, True


class Scaled(RotaryEmbedding):
    def _compute_inv_freq(self, base):
        return None


def test_rotary_is_that_of_a_patched_model():
    config = transformers.LlamaConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, intermediate_size=64, vocab_size=32,
        num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    ck.patch(model, strict=True)
    positions = torch.tensor([0, 1, 700, 33, 2])
    q, k = randn(5, HEADS * DIM), randn(5, KV_HEADS * DIM, seed=1)
    got = integration.rotary(RotaryEmbedding(), positions, q, k)
    cos, sin = model.model.rotary_emb(q, positions[None])
    heads = [t.view(1, 5, -1, DIM) for t in (q, k)]
    want = ck.apply_rotary_pos_emb(*heads, cos, sin, unsqueeze_dim=2)
    for mine, theirs, like in zip(got, want, (q, k), strict=True):
        assert same_bytes(mine, theirs.view(like.shape))
    with pytest.raises(PatchError, match=r"rotary embedding: .*Scaled"):
        integration.rotary(Scaled(), positions, q, k)
    with pytest.raises(PatchError, match="offsets"):
        integration.rotary(RotaryEmbedding(), positions, q, k, offsets=positions)


# ---- attention ----------------------------------------------------------------------------------


class Pool:
    """SGLang's token pool, as far as it is used: buffers of [tokens, heads, size]."""

    def __init__(self, pages: int):
        self.buffers = [torch.full((pages * PAGE, KV_HEADS, DIM), torch.nan).bfloat16()]
        self.buffers.append(self.buffers[0].clone())

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]

    def set_kv_buffer(self, layer, where, k, v):
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[where[0]] = new


def layer_of(**changed):
    fields = {"layer_id": 0, "tp_q_head_num": HEADS, "qk_head_dim": DIM, "scaling": SCALE}
    fields |= {"logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False}
    fields["attn_type"] = namespace(value="decoder")
    return namespace(**fields | changed)


#: Pages of three requests, in rows of the request table, none in order.
PAGES = {2: [5, 1, 9], 0: [3, 7, 2], 1: [8, 4, 6]}


def table() -> torch.Tensor:
    rows = [[p * PAGE + i for p in PAGES[n] for i in range(PAGE)] for n in range(3)]
    return torch.tensor(rows, dtype=torch.int32)


def sequences() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(q, k, v) of whole sequences of 40, 3 and 17 tokens."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [
        tuple(randn(n, h, DIM, seed=10 * n + i) for i, h in enumerate(heads)) for n in (40, 3, 17)
    ]


def attend(backend, layer, pieces, decode: bool) -> list[torch.Tensor]:
    """Run one batch: (row of the table, tokens before, q, k, v) of each piece."""
    lengths = [before + len(q) for _, before, q, _, _ in pieces]
    counts = [len(q) for _, _, q, _, _ in pieces]
    slots = [table()[row, before : before + len(q)] for row, before, q, _, _ in pieces]
    batch = namespace(
        req_pool_indices=torch.tensor([row for row, *_ in pieces]),
        seq_lens=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(counts),
        out_cache_loc=torch.cat(slots).long(),
        forward_mode=namespace(is_decode=lambda: decode),
    )
    backend.init_forward_metadata(batch)
    q, k, v = (torch.cat([piece[i] for piece in pieces]) for i in (2, 3, 4))
    run = backend.forward_decode if decode else backend.forward_extend
    # RadixAttention splits keys and values into heads, and leaves queries as they are.
    return list(run(q.flatten(1), k, v, layer, batch).split(counts))


def check_attention(backend, layer) -> None:
    """Chunks, then decode steps, have the bytes of one pass over each sequence."""
    whole = sequences()
    got: list[list[torch.Tensor]] = [[], [], []]
    rows = (2, 0, 1)
    for start, stop in ((0, 16), (16, 33)):  # chunks of all, as far as they go
        some = [i for i, (q, _, _) in enumerate(whole) if start < len(q) - 1]
        ends = {i: min(stop, len(whole[i][0]) - 1) for i in some}
        pieces = [(rows[i], start, *(t[start : ends[i]] for t in whole[i])) for i in some]
        for i, out in zip(some, attend(backend, layer, pieces, False), strict=True):
            got[i].append(out)
    while some := [i for i in range(3) if sum(map(len, got[i])) < len(whole[i][0])]:
        done = {i: sum(map(len, got[i])) for i in some}
        pieces = [(rows[i], done[i], *(t[done[i] : done[i] + 1] for t in whole[i])) for i in some]
        for i, out in zip(some, attend(backend, layer, pieces, True), strict=True):
            got[i].append(out)
    for (q, k, v), parts in zip(whole, got, strict=True):
        want = ck.block_sparse_attention(q[None], k[None], v[None], causal=True, scale=SCALE)
        assert same_bytes(torch.cat(parts), want[0].flatten(1))


def make_runner(pool) -> namespace:
    rows = namespace(req_to_token=table())
    return namespace(page_size=PAGE, req_to_token_pool=rows, token_to_kv_pool=pool)


def make_backend() -> integration.Paged:
    return integration.Paged(make_runner(Pool(10)), lambda where, swa: (where, swa))


def test_chunks_and_decode_have_the_bytes_of_one_pass():
    check_attention(make_backend(), layer_of())


def test_another_page_is_seen():
    """The mutant: a block table whose second page is another request's."""
    backend = make_backend()
    true = backend.init_forward_metadata

    def swapped(batch):
        true(batch)
        pages, *lists = backend.lists
        backend.lists = (pages.roll(1, 1), *lists)

    backend.init_forward_metadata = swapped
    with pytest.raises(AssertionError):
        check_attention(backend, layer_of())


def test_what_is_not_covered_is_refused_by_name():
    runner = namespace(page_size=1, req_to_token_pool=None, token_to_kv_pool=None)
    with pytest.raises(ArgumentValueError, match=r"--page-size: expected one of 16, .*got 1"):
        integration.Paged(runner, tuple)
    encoder = {"attn_type": namespace(value="encoder_only")}
    for changed, options, words in (
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        (encoder, {}, "attn_type: .*encoder_only"),
        ({}, {"sinks": 1}, "attention: sinks"),
    ):
        with pytest.raises(PatchError, match=words):
            make_backend().forward_decode(None, None, None, layer_of(**changed), None, **options)


def test_without_the_setting_nothing_happens(monkeypatch):
    called = []
    monkeypatch.setattr(integration, "activate", lambda: called.append(True))
    for value, calls in (("0", 0), ("1", 1)):
        monkeypatch.setenv("CUTE_KERNELS_SGLANG", value)
        integration.register()
        assert len(called) == calls
    monkeypatch.setenv("CUTE_KERNELS_SGLANG", "yes")
    with pytest.raises(SettingError, match="CUTE_KERNELS_SGLANG"):
        integration.register()


# ---- SGLang's own classes -----------------------------------------------------------------------


@pytest.fixture
def applied():
    """SGLang with the hooks applied; its modules need a GPU's packages in part."""
    pytest.importorskip("sglang")
    hooks = pytest.importorskip("sglang.srt.plugins.hook_registry")
    pytest.importorskip("sglang.srt.layers.logits_processor")
    pytest.importorskip("sglang.srt.layers.quantization.unquant")
    integration.activate()
    hooks.HookRegistry.apply_hooks()
    assert set(integration.hooks()) <= hooks.HookRegistry._patched
    return hooks


@pytest.mark.nightly
def test_sglangs_classes_run_our_ops(applied):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    assert ATTENTION_BACKENDS["cute_kernels"] is integration.create_backend
    assert "cute_kernels" in choices.ATTENTION_BACKEND_CHOICES
    assert "cute_kernels" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    layer, x = namespace(weight=randn(48, 32, seed=1)), randn(5, 32)
    got = UnquantizedLinearMethod().apply(layer, x)
    assert same_bytes(got, ck.linear(x, layer.weight))
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    rows, residual = randn(7, 64), randn(7, 64, seed=5)
    for forward in (norm.forward_native, norm.forward_cuda, norm.forward_cpu):
        y, h = forward(rows, residual)
        want = ck.rms_norm(rows + residual, norm.weight, 1e-5)
        assert same_bytes(h, rows + residual) and same_bytes(y, want)


@pytest.mark.nightly
def test_sglangs_pools_hold_the_keys(applied):
    """Its pool of tokens and its backend's base class, on a CPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=9 * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=KV_HEADS, head_dim=DIM,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    backend = integration.create_backend(make_runner(pool))
    check_attention(backend, layer_of(k_scale=None, v_scale=None))


@pytest.mark.nightly
@pytest.mark.parametrize("system", ["ours", "stock"])
def test_its_engine_draws_with_the_logits_of_a_patched_model(applied, tmp_path, system):
    """Within the rounding of its own log-softmax; the stock engine is far from them."""
    out = tmp_path / "counts.json"
    command = "-m", sglang_engine.__name__, tmp_path / "model", out
    processes.run(*command, CUTE_KERNELS_SGLANG=str(int(system == "ours")))
    counts = json.loads(out.read_text())
    assert counts["count"] == len(sglang_engine.LENGTHS) * sglang_engine.NEW
    assert (counts["largest"] < 1e-6) if system == "ours" else (counts["largest"] > 1e-3)
    assert counts["alone_differ"] == 0 or system == "stock"
