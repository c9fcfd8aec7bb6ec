"""PEFT's LoRA on a patched model, before the patch and after it."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families

peft = pytest.importorskip(
    "peft", reason="peft is not installed: pip install -c constraints.txt '.[trl]'"
)

TOKENS = families.ids(2, 17)
ORDERS = pytest.mark.parametrize("first", ["patch", "adapter"])


def adapted(first: str, targets: object = "all-linear", name: str = "llama", **options):
    """A model with LoRA, patched before or after; its B is random, as after some training."""
    net = families.model(name)
    if first == "patch":
        ck.patch(net, **options)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(net, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    report = ck.patch(wrapped, **options)
    return wrapped.eval(), report


@ORDERS
def test_rows_and_parts(first):
    net, report = adapted(first)
    assert report.family == "Llama"
    if first == "adapter":
        assert report.complete
    adapters = [m for n, m in net.named_modules() if "lora_A" in n and hasattr(m, "weight")]
    assert len(adapters) == 14
    assert {state.kind_of(m) for m in adapters} == {"linear"}
    assert all_causal_lms.differing(net.get_base_model()) == []


def test_the_order_does_not_matter():
    one, other = (adapted(first)[0] for first in ("patch", "adapter"))
    assert same_bytes(families.logits(one, TOKENS), families.logits(other, TOKENS))


@ORDERS
def test_training_and_the_state(first):
    net, _ = adapted(first)
    names = {n for n, p in net.named_parameters() if p.requires_grad}
    assert names and all("lora_" in n for n in names)
    net.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert {n for n, p in net.named_parameters() if p.grad is not None} == names
    state = peft.get_peft_model_state_dict(net)
    ck.unpatch(net)
    after = peft.get_peft_model_state_dict(net)
    assert list(state) == list(after)
    assert all(same_bytes(state[n], after[n]) for n in state)
    plain = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    assert plain.logits is not None and type(net.get_base_model().lm_head) is torch.nn.Linear


def test_disabling_and_merging_an_adapter():
    net, _ = adapted("patch")
    bare = families.model("llama")
    ck.patch(bare)
    with net.disable_adapter():
        assert same_bytes(families.logits(net, TOKENS), families.logits(bare, TOKENS))
    assert not same_bytes(families.logits(net, TOKENS), families.logits(bare, TOKENS))
    merged = net.merge_and_unload()
    assert state.kind_of(merged.model.layers[0].mlp.up_proj) == "linear"
    assert same_bytes(families.logits(merged, TOKENS)[1:], families.logits(merged, TOKENS[1:]))


@ORDERS
def test_rows_of_an_adapted_head(first):
    """Rows of logits keep their bytes; the loss is torch's, which the report says."""
    net, report = adapted(first, ["lm_head", "q_proj"], strict=True)
    (loss,) = [left for left in report.left if "loss" in left.part]
    assert first == "patch" or report.left == (loss,)
    assert report.complete and not loss.moves and "the head is peft's Linear" in loss.known
    head = net.get_base_model().lm_head
    parts = (head.base_layer, head.lora_A["default"], head.lora_B["default"])
    assert {state.kind_of(m) for m in parts} == {"linear"}
    assert all_causal_lms.differing(net.get_base_model()) == []
    out = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    assert out.logits is not None and head.lora_B["default"].weight.grad is not None


@pytest.mark.nightly
@ORDERS
def test_adapters_of_a_hybrid(first):
    net, report = adapted(first, ["in_proj_qkvz", "in_proj_ba", "out_proj"], "qwen3_next")
    assert report.complete
    # A frozen embedding has no gradient.
    differing = all_causal_lms.differing(net.get_base_model())
    assert [one for one in differing if "retain_grad" not in one] == []


def test_an_adapter_of_experts_is_refused_in_words():
    config = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[])
    net = peft.get_peft_model(families.model("mixtral", num_hidden_layers=1), config)
    with pytest.raises(PatchError, match=r"ParamWrapper\): LoRA on a parameter .*adapt linear"):
        ck.patch(net.to(torch.bfloat16).eval(), strict=True)
