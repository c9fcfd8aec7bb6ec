"""Models with parts that look like ours and are not: the patch leaves these, and the models run."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import decisions, state
from tests.model.patch import all_causal_lms, families

IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 61}
MODELS = {
    "mamba2": (
        "Mamba2ForCausalLM",
        lambda: transformers.Mamba2Config(
            **TEXT, num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=8, expand=2
        ),
        "convolution",
    ),
    "doge": (
        "DogeForCausalLM",
        lambda: transformers.DogeConfig(
            **TEXT, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
        ),
        "values of the mask",
    ),
    "mobilebert": (
        "MobileBertModel",
        lambda: transformers.MobileBertConfig(
            **TEXT, num_attention_heads=4, intermediate_size=64, embedding_size=32,
            intra_bottleneck_size=32,
        ),
        "head sizes [8]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_model_runs_and_the_report_says_what_is_left(name):
    cls, config, reason = MODELS[name]
    torch.manual_seed(3)
    model = getattr(transformers, cls)(config()).bfloat16().eval()
    with torch.no_grad():
        want = model(IDS)[0].float()
    report = ck.patch(model)
    assert any(reason in str(one) for one in report.left)
    with torch.no_grad():
        got = model(IDS)[0].float()
    # The same function: what is ours rounds elsewhere.
    assert (got - want).norm() <= 0.05 * want.norm()


def test_rotary_positions_of_sections_keep_their_forward():
    config = transformers.Qwen2VLConfig(
        text_config={
            **TEXT, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        }
    )  # fmt: skip
    text = transformers.Qwen2VLTextModel(config.text_config).bfloat16().eval()
    sections = torch.stack([torch.arange(9).expand(2, 9) * i for i in (1, 2, 3)])
    with torch.no_grad():
        want = text(IDS, position_ids=sections).last_hidden_state
        report = ck.patch(text)
        got = text(IDS, position_ids=sections).last_hidden_state
    (rotary,) = [one for one in report.replaced if "rotary_emb" in one.name]
    assert rotary.by == "its author's forward in ck.batch_invariant"
    assert (got.float() - want.float()).norm() <= 0.05 * want.float().norm()


def test_the_report_of_a_notebook_is_its_table():
    config = transformers.LlamaConfig(**TEXT, intermediate_size=64, num_attention_heads=2)
    report = ck.patch(transformers.LlamaForCausalLM(config).bfloat16())
    assert repr(report) == str(report) and "replaced:" in repr(report)


def test_a_hybrid_of_attention_layers_alone_is_no_hybrid():
    """What a layer is decides, not the name of the type."""
    for kind in ("lfm2", "minimax"):
        config = all_causal_lms.config_of(kind)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        net = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
        assert ck.patch(net, strict=True).complete


def test_a_short_convolution_is_named_as_such():
    with pytest.raises(
        PatchError, match=r"conv \(Lfm2MoeShortConv\): convolution \(modeling"
    ) as caught:
        ck.patch(all_causal_lms.build("lfm2_moe"), strict=True)
    assert "state space" not in str(caught.value)


def test_a_known_hybrid_is_refused_before_it_is_observed(monkeypatch):
    """A Qwen3-Next of 48 layers on meta took most of a minute."""
    monkeypatch.setattr(decisions, "decide", lambda *_: pytest.fail("planned"))
    with torch.device("meta"):
        net = transformers.Qwen3NextForCausalLM(all_causal_lms.config_of("qwen3_next"))
    with pytest.raises(PatchError) as caught:
        ck.patch(net, strict=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and "qwen3_next: state space" in lines[1]
    assert "docs/model_families.md" in lines[2]


def test_a_config_by_layer_is_reported():
    """Its global attributes raise when they are read."""

    class ByLayer(transformers.Qwen3Config):
        def __getattribute__(self, name):
            if name == "num_attention_heads" and "whole" in vars(self):
                raise RuntimeError(f"{name} is a per-layer attribute")
            return super().__getattribute__(name)

    net = families.model("qwen3", num_hidden_layers=1)
    config = ByLayer(**net.config.to_dict())
    for module in net.modules():
        if "config" in vars(module):
            module.config = config
    config.whole = False
    assert ck.patch(net, strict=True).complete


def test_an_encoder_decoder_says_why():
    sizes = {"d_model": 128, "d_kv": 64, "num_heads": 2, "num_layers": 1, "d_ff": 160}
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, **sizes))
    with pytest.raises(PatchError) as caught:
        ck.patch(net.bfloat16(), strict=True)
    assert "an encoder-decoder is not observed" in str(caught.value).splitlines()[1]


def test_a_base_model_says_that_its_head_is_outside():
    net = families.model("llama", num_hidden_layers=1)
    report = ck.patch(net.model, strict=True)
    (left,) = report.left
    assert report.family == "Llama"
    assert not left.moves and left.known.startswith("the head is outside")
    ck.unpatch(net.model)
    assert net.model.config._attn_implementation == "sdpa"
    assert not any("outside" in one.known for one in ck.patch(net, strict=True).left)


def test_parts_that_are_skipped():
    """They stay torch's, may change later, and are said not to be promised."""
    net = families.model("llama")
    net.tower = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4)).bfloat16().requires_grad_(False)
    with pytest.raises(PatchError, match="tower"):
        ck.patch(net, strict=True)
    report = ck.patch(
        net, strict=True, skip=["tower", "model.layers.*.mlp", "model.layers.1.mlp.*"]
    )
    assert report.complete and {one.name: one.trained for one in report.skipped} == {
        "model.layers.0.mlp": True, "model.layers.1.mlp": True, "tower": False,
    }  # fmt: skip
    assert "skipped (not promised):" in str(report)
    found = {name: state.kind_of(m) for name, m in net.named_modules()}
    assert (
        found["tower.1"]
        is found["model.layers.0.mlp.up_proj"]
        is found["model.layers.0.mlp"]
        is None
    )
    assert found["model.layers.0.self_attn.q_proj"] == "linear" and found["lm_head"] == "head"
    net.tower[1] = nn.Linear(4, 4).bfloat16()
    net.tower(torch.zeros(1, 4, 6).bfloat16())  # no guard in a part that was skipped
    net.model.norm = nn.LayerNorm(128).bfloat16()
    with pytest.raises(PatchError, match="norm"):
        net(families.ids())
