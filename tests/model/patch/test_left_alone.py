"""Models with parts that look like ours and are not: the patch leaves these, and the models run."""

from __future__ import annotations

import pytest
import torch
import transformers

import cute_kernels as ck

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
