"""accelerate's forwards, autocast and hooks alike, on a model before the patch and after it."""

from __future__ import annotations

import copy

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.families import TOKENS

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install -c constraints.txt '.[trl]'"
)
from accelerate import hooks  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

#: name -> the parts of a causal LM that stay torch's below a forward of accelerate's.
LEFT = {
    "llama": {"LlamaForCausalLM: loss"},
    "gemma2": {"Gemma2ForCausalLM: loss", "Gemma2ForCausalLM: soft cap 30 of logits"},
}
NAMES = pytest.mark.parametrize("name", LEFT)


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    """Its settings are one for the process: forgotten before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


def results(net: torch.nn.Module) -> list[torch.Tensor]:
    """Logits, and the loss from labels; accelerate hands bf16 on as fp32."""
    with torch.no_grad():
        loss = net(TOKENS, labels=TOKENS, use_cache=False).loss
    return [families.logits(net, TOKENS).bfloat16(), loss.float()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(same_bytes, one, other))


def patched(name: str) -> torch.nn.Module:
    net = families.model(name)
    ck.patch(net, strict=True)
    return net


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    net.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    net.eval()
    return [p.grad for p in net.parameters()]


@NAMES
def test_patch_then_prepare(name, accelerator):
    """What it put around ours calls ours, on and off, and the author's after unpatch."""
    net = patched(name)
    ours, want = results(net), gradients(patched(name))
    prepared = accelerator.prepare(net)
    assert ("forward" in vars(prepared)) == (accelerator.mixed_precision == "bf16")
    assert same(results(prepared), ours) and same(results(copy.deepcopy(prepared)), ours)
    assert same(gradients(prepared), want)
    assert not ck.patch(prepared, strict=True).left and same(results(prepared), ours)
    ck.unpatch(prepared)
    plain = results(accelerator.prepare(families.model(name)))
    assert same(results(prepared), plain) and not same(plain, ours)
    ck.patch(prepared, strict=True)
    # Without its wrapper, which it follows to the innermost function: ours.
    net = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert same(results(net), ours) and not ck.patch(net, strict=True).left
    assert same(results(net), ours)


@NAMES
def test_prepare_then_patch(name, accelerator):
    """Rows are ours; what the author's forward does behind the head is named, and nothing else."""
    before, ours = results(families.model(name)), results(patched(name))
    net = accelerator.prepare(families.model(name))
    assert same(results(net)[:1], before[:1])
    report = ck.patch(net)
    wrapped = "forward" in vars(net)
    assert {one.part for one in report.left} == (LEFT[name] if wrapped else set())
    if name == "llama" or not wrapped:  # the other's soft cap is torch's
        assert same(results(net)[:1], ours[:1])
    with torch.no_grad():
        logits = net.train()(TOKENS, labels=TOKENS, use_cache=False).logits
    assert (logits is None) == (not wrapped)
    ck.unpatch(net)
    assert same(results(net.eval())[:1], before[:1])


def on_every_module(net):
    for module in net.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))


HOOKS = {
    "leaves": lambda net: hooks.attach_align_device_hook(net, execution_device="cpu"),
    "every module": on_every_module,
    "offloaded": lambda net: accelerate.cpu_offload(net, execution_device="cpu"),
    "dispatched": lambda net: accelerate.dispatch_model(net, {"": "cpu"}, force_hooks=True),
}


@NAMES
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(name, hook):
    """After the patch they call ours; before it, what is below a hook is left by name."""
    before, net = results(families.model(name)), patched(name)
    ours = results(net)
    HOOKS[hook](net)
    assert sum("forward" in vars(module) for module in net.modules()) > 15
    assert same(results(net), ours) and not ck.patch(net, strict=True).left
    assert same(results(net), ours)
    ck.unpatch(net)
    assert same(results(net), before)
    report = ck.patch(net)
    hooks.remove_hook_from_module(net, recurse=True)
    assert not report.moving and same(results(net), ours)
    assert not ck.patch(net, strict=True).left
    ck.unpatch(net)
    assert same(results(net), before)
    net = families.model(name)
    HOOKS[hook](net)
    report = ck.patch(net)
    left = {one.name for one in report.moving}
    assert {"lm_head", "model.norm", "model.layers.1.mlp.up_proj"} < left
    hidden = {n for n, module in net.named_modules() if "forward" in vars(module)}
    assert left - {""} <= hidden and not left & {r.name for r in report.replaced if r.name}
    assert LEFT[name] >= {one.part for one in report.moving if not one.name} > set()
    assert not same(results(net), before)
    ck.unpatch(net)
    assert same(results(net), before)
