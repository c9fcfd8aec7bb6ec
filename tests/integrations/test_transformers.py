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


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 160}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
#: q and k of 192, v of 128; no experts, whose choice a rounding changes.
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"kv_lora_rank": 32, "q_lora_rank": 48, "num_key_value_heads": 4}
#: A layer that slides and one that sees all; one expert.
SINKS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 60}
SINKS |= {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 64}
KINDS = {
    "llama": ("LlamaConfig", {"head_dim": 64}),
    "mistral": ("MistralConfig", {"head_dim": 64, "sliding_window": 33}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 64, "sliding_window": 40, "query_pre_attn_scalar": 1}
        | {"attn_logit_softcapping": 0.5},
    ),
    "deepseek": ("DeepseekV3Config", LATENT | {"first_k_dense_replace": 2}),
    "gpt_oss": ("GptOssConfig", SINKS),
}


def model_of(kind: str, implementation: str = ours.NAME, dtype=torch.bfloat16):
    """A small random model, equal under any attention; its sinks count."""
    torch.manual_seed(0)
    name, options = KINDS[kind]
    config = getattr(transformers, name)(**SIZES | options, attn_implementation=implementation)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers if kind == "gpt_oss" else ():
        layer.self_attn.sinks.data.copy_(torch.linspace(-1, 4, 4))
    return model.to(dtype).eval()


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


@pytest.mark.parametrize(
    ("kind", "mask"),
    [*((kind, "none") for kind in KINDS), ("llama", "left"), ("gemma2", "right")],
)
def test_logits(kind, mask):
    """Logits are as near to fp32 as those of transformers' own attention in bf16."""
    given = None if mask == "none" else padding(mask)
    seen = torch.ones(2, S, dtype=torch.bool) if given is None else given.bool()
    mine, eager = (error_of(kind, name, given, seen) for name in (ours.NAME, "eager"))
    assert mine < 1.5 * eager + 1e-3


@pytest.mark.parametrize(
    ("kind", "dropped"), [("mistral", "mask"), ("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_what_is_dropped_shows(kind, dropped, monkeypatch):
    """Mutants: the window's mask, the soft cap or the sinks do not reach the op."""
    true = api.sequence_attention

    def run(q, k, v, mask, **options):
        if dropped == "mask":
            return block_sparse_attention(q, k, v, **(options | {"causal": True}))
        change = {"softcap": 0.0} if dropped == "softcap" else {"sinks": None}
        return true(q, k, v, mask, **(options | change))

    monkeypatch.setattr(api, "sequence_attention", run)
    seen = torch.ones(2, S, dtype=torch.bool)
    wrong, eager = (error_of(kind, name, None, seen) for name in (ours.NAME, "eager"))
    assert wrong > 3 * eager


@pytest.mark.parametrize("kind", ["llama", "deepseek", "gpt_oss"])
def test_gradients(kind):
    """Gradients of all parameters; those of sinks are small."""
    model, other = model_of(kind).train(), model_of(kind, "eager").train()
    for each in (model, other):
        each(tokens(), labels=tokens()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if theirs.grad.any():
            distance = (mine.grad.float() - theirs.grad.float()).norm()
            limit = 0.1 if "sinks" in name else 0.05
            assert distance < limit * theirs.grad.float().norm(), name


@pytest.mark.parametrize(("kind", "qk", "v"), [("gpt_oss", 64, 64), ("deepseek", 192, 128)])
@torch.no_grad()
def test_decoding_has_the_bytes_of_one_pass(kind, qk, v):
    """A prefill in chunks and a token: with sinks, and with the sizes of latent attention."""
    options = {}
    if kind == "gpt_oss":
        options["s_aux"] = model_of(kind).model.layers[1].self_attn.sinks
    g, heads = torch.Generator().manual_seed(2), ((4, qk), (2, qk), (2, v))
    q, k, v = (torch.randn(1, n, S, dim, generator=g).bfloat16() for n, dim in heads)

    def run(first: int, last: int):
        mask = ours.spans(1, last - first, last, q_offset=first)
        part = q[:, :, first:last], k[:, :, :last], v[:, :, :last]
        return ours.attention(torch.nn.Module(), *part, mask, **options)[0]

    parts = [run(0, 64), run(64, 131), run(131, S - 1), run(S - 1, S)]
    assert same_bytes(torch.cat(parts, dim=1), run(0, S))


def test_refusals():
    x = cases.inputs(1, 4, 2, 20, 20, 64)
    args = (torch.nn.Module(), *(t.detach().transpose(1, 2) for t in x.leaves()))
    dense = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    assert same_bytes(*(ours.attention(*args, mask)[0] for mask in (dense, None)))
    with pytest.raises(ArgumentValueError, match="dropout"):
        ours.attention(*args, None, dropout=0.1)
    # What indexers choose, names of sinks that are not read here, and names that nobody knows.
    for name in ("position_bias", "block_indices", "sinks", "anything"):
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
