"""A model that ``.to(dtype)`` rounded has the logits of one that was loaded with ``dtype=``."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError
from tests.contract import same_bytes
from tests.model.patch import families

IDS = families.ids()
NAMES = pytest.mark.parametrize("name", ["llama", "gemma3"])


def checkpoint(name: str, folder) -> str:
    config = families.model(name, head_dim=32, hidden_size=64).config
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


def loaded(folder: str, **options) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    return families.logits(model, IDS)


@NAMES
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


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["bfloat16", "float16"]], ids=str)
@NAMES
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
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    twin = copy.deepcopy(model)  # the control: with a table of rounded frequencies logits differ
    twin.model.rotary_emb.inv_freq.copy_(rotary.inv_freq.bfloat16())
    assert not same_bytes(logits(twin), ours)
    ck.unpatch(model)
    assert same_bytes(logits(model), want)
    assert not [name for m in model.modules() for name in vars(m) if "cute_kernels" in name]
    ck.patch(model)
    assert same_bytes(logits(model), ours)
