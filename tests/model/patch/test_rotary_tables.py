"""A model that ``.to(dtype)`` rounded has the logits of one that was loaded with ``dtype=``."""

from __future__ import annotations

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError
from tests.contract import same_bytes

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 61}
IDS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma3": (transformers.Gemma3TextConfig, {"num_key_value_heads": 1, "head_dim": 32}),
}


def checkpoint(name: str, folder) -> str:
    config_class, more = MODELS[name]
    torch.manual_seed(3)
    config = config_class(**SIZES, **more, num_hidden_layers=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def loaded(folder: str, **options) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_casts_before_and_after_the_patch_change_no_logit(tmp_path, name):
    folder = checkpoint(name, tmp_path)
    reference = loaded(folder, dtype=torch.bfloat16)
    before, after = (loaded(folder, dtype=torch.float32) for _ in range(2))
    before.to(torch.bfloat16)
    ck.patch(reference)
    ck.patch(before)
    ck.patch(after)
    after.to(torch.bfloat16)
    want = logits(reference)
    assert same_bytes(logits(before), want) and same_bytes(logits(after), want)


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["float16"], ["bfloat16", "float16"]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rounded_frequencies_that_are_fp32_again(tmp_path, name, dtypes):
    """fp32 masters of a model that was in half: a patch before or after the casts."""
    folder = checkpoint(name, tmp_path)
    reference, before, after = (loaded(folder, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        ck.patch(after)
    for model in (reference, before, after):
        exact = {n: b for n, b in model.named_buffers() if n.endswith("inv_freq")}
        for dtype in dtypes:
            model.to(getattr(torch, dtype))
        model.float()
        if model is reference:
            for path, buffer in exact.items():
                model.get_submodule(path.rpartition(".")[0])._buffers[path.split(".")[-1]] = buffer
        else:
            assert not any(same_bytes(b, exact[n]) for n, b in model.named_buffers() if n in exact)
    with torch.autocast("cpu", torch.bfloat16):
        ck.patch(reference)
        ck.patch(before)
        assert not any("inv_freq" in str(one) for one in ck.patch(before).left)
        want = logits(reference)
        assert same_bytes(logits(before), want) and same_bytes(logits(after), want)


def test_rounded_frequencies_would_show(tmp_path):
    """The control: with a table of rounded frequencies the logits differ."""
    model = loaded(checkpoint("llama", tmp_path), dtype=torch.bfloat16)
    ck.patch(model)
    want, rotary = logits(model), model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq.bfloat16())
    assert not same_bytes(logits(model), want)


@pytest.mark.parametrize("again", [False, True], ids=["half", "fp32 again"])
def test_frequencies_that_the_config_does_not_give_are_left(tmp_path, again):
    model = loaded(checkpoint("llama", tmp_path), dtype=torch.float32)
    model.model.rotary_emb.inv_freq *= 1.5
    model.to(torch.bfloat16)
    if again:
        model.float()
    with pytest.raises((ArgumentValueError, PatchError), match="inv_freq"):
        ck.patch(model, strict=True)
    assert any("inv_freq" in str(one) for one in ck.patch(model).left)


@pytest.mark.parametrize("cast", ["before", "after"])
def test_unpatch_gives_the_rounded_frequencies_back(tmp_path, cast):
    folder = checkpoint("llama", tmp_path)
    want = logits(loaded(folder, dtype=torch.float32).to(torch.bfloat16))
    model = loaded(folder, dtype=torch.float32)
    if cast == "before":
        model.to(torch.bfloat16)
    ck.patch(model)
    model.to(torch.bfloat16)
    ours = logits(model)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    ck.unpatch(model)
    assert same_bytes(logits(model), want)
    assert not [name for m in model.modules() for name in vars(m) if "cute_kernels" in name]
    ck.patch(model)
    assert same_bytes(logits(model), ours)
