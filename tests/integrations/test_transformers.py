"""``attn_implementation="cute_kernels"`` in small transformers models, and its refusals."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, DtypeError, ShapeError
from cute_kernels.integrations import transformers as ours
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.sparse_attn import cases

transformers = pytest.importorskip("transformers")
VOCABULARY, S = 97, 150


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()
    ours.register()


def model_of(kind: str, implementation: str = ours.NAME, dtype=torch.bfloat16):
    """The same small random model under any attention."""
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_implementation": implementation,
    }
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**shared)
    elif kind == "mistral":
        config = transformers.MistralConfig(**shared, sliding_window=33)
    elif kind == "deepseek":
        # q and k of 192, v of 128; no experts, whose choice a rounding changes.
        del shared["head_dim"]
        shared |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        shared |= {"kv_lora_rank": 32, "q_lora_rank": 48, "num_key_value_heads": 4}
        config = transformers.DeepseekV3Config(**shared, first_k_dense_replace=2)
    else:
        config = transformers.Gemma2Config(
            **shared, sliding_window=40, query_pre_attn_scalar=1, attn_logit_softcapping=0.5
        )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def tokens(batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (batch, S), generator=generator)


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, S, dtype=torch.int64)
    mask[1, slice(0, 37) if side == "left" else slice(S - 37, S)] = 0
    return mask


def error_of(kind: str, implementation: str, mask, seen) -> float:
    """Relative distance of the logits in bf16 from those of eager attention in fp32."""
    exact = model_of(kind, "eager", torch.float32)
    model = model_of(kind, implementation)
    exact.load_state_dict(model.float().state_dict())
    model = model.bfloat16()
    with torch.no_grad():
        want = exact(tokens(), attention_mask=mask).logits[seen]
        got = model(tokens(), attention_mask=mask).logits.float()[seen]
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("mask", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "deepseek"])
def test_logits(kind, mask):
    """As near to fp32 as transformers' own attention is in bf16."""
    given = None if mask == "none" else padding(mask)
    seen = torch.ones(2, S, dtype=torch.bool) if given is None else given.bool()
    mine, eager = (error_of(kind, name, given, seen) for name in (ours.NAME, "eager"))
    assert mine < 1.5 * eager + 1e-3


@pytest.mark.parametrize(("kind", "dropped"), [("mistral", "mask"), ("gemma2", "softcap")])
def test_what_is_dropped_shows(kind, dropped, monkeypatch):
    """Mutants: the window's mask, or the soft cap, does not reach the op."""

    true = api.sequence_attention

    def run(q, k, v, mask, **options):
        if dropped == "mask":
            return block_sparse_attention(q, k, v, **(options | {"causal": True}))
        return true(q, k, v, mask, **(options | {"softcap": 0.0}))

    monkeypatch.setattr(api, "sequence_attention", run)
    seen = torch.ones(2, S, dtype=torch.bool)
    wrong, eager = (error_of(kind, name, None, seen) for name in (ours.NAME, "eager"))
    assert wrong > 3 * eager


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_gradients(kind):
    model = model_of(kind).train()
    model(tokens(), labels=tokens()).loss.backward()
    other = model_of(kind, "sdpa").train()
    other(tokens(), labels=tokens()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        distance = (mine.grad.float() - theirs.grad.float()).norm() / theirs.grad.float().norm()
        assert distance < 0.05, name


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_generation_with_a_cache(kind):
    """Prefill and decode steps give the tokens that a run without a cache gives."""
    model = model_of(kind).float()
    model = model.bfloat16()
    prompt = tokens(1)[:, :40]
    got = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert got.shape == (1, 46)
    with torch.no_grad():
        steps = model(got[:, :-1]).logits[0, 39:]
    top = steps.max(-1).values
    chosen = steps.gather(1, got[0, 40:, None])[:, 0]
    assert (top - chosen <= 2**-6 * top.abs()).all()


def test_bool_tensors_and_no_mask():
    x = cases.inputs(1, 4, 2, S, S, 64)
    q, k, v = (t.detach().transpose(1, 2) for t in x.leaves())
    module = torch.nn.Module()
    dense = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    want = ours.attention(module, q, k, v, dense)[0]
    assert same_bytes(ours.attention(module, q, k, v, None)[0], want)


def test_refusals():
    x = cases.inputs(1, 4, 2, 20, 20, 64)
    args = (torch.nn.Module(), *(t.detach().transpose(1, 2) for t in x.leaves()))
    with pytest.raises(ArgumentValueError, match="dropout"):
        ours.attention(*args, None, dropout=0.1)
    # What indexers choose, names of sinks that are not read here, and names that nobody knows.
    for name in ("position_bias", "block_indices", "indices", "sinks", "anything"):
        for others in ({}, {"cache": object()}):
            with pytest.raises(ArgumentValueError, match=f"{name}: expected None"):
                ours.attention(*args, None, **{name: torch.zeros(4)}, **others)
    harmless = {"position_ids": torch.arange(20)[None], "use_cache": True, "block_indices": None}
    assert same_bytes(*(ours.attention(*args, None, **o)[0] for o in ({}, harmless)))
    with pytest.raises(ShapeError, match="sinks"):
        ours.attention(*args, None, s_aux=torch.zeros(3))
    with pytest.raises(ArgumentTypeError, match="attention_mask"):
        ours.attention(*args, torch.zeros(1, 1, 20, 20))
    with pytest.raises(DtypeError, match="float32"):
        model_of("llama", dtype=torch.float32)(tokens())
