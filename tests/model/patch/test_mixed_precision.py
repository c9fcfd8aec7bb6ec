"""fp32 masters: a model that is patched inside autocast, or after fully_shard, for bf16 compute."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import cute_kernels as ck
from cute_kernels.errors import DtypeError, PatchError
from cute_kernels.integrations import transformers as integration
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families

TOKENS = families.ids(3, 17)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def model(kind: str) -> torch.nn.Module:
    """A random model with parameters in fp32."""
    if kind != "mixture":
        return families.model(kind, num_hidden_layers=1).float()  # rounded frequencies in fp32
    config = all_causal_lms.config_of("qwen3_moe").to_dict() | {"num_hidden_layers": 1}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**config)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def attended(monkeypatch):
    """Dtypes of q, k and v at each call of our attention."""
    return families.calls_of(
        monkeypatch, *families.ATTENDING, note=lambda name, *qkv: {t.dtype for t in qkv[:3]}
    )


def logits(net: torch.nn.Module, tokens: torch.Tensor, context=autocast) -> torch.Tensor:
    with torch.no_grad(), context():
        return net(tokens, use_cache=False).logits


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixture"])
def test_autocast(kind, attended):
    """Rows of logits alone and in a batch, and gradients of the masters; attention in bf16."""
    net = model(kind)
    with autocast():
        assert ck.patch(net, strict=True).complete
    attended.clear()
    batch = logits(net, TOKENS)
    assert batch.dtype == torch.bfloat16 and same_bytes(batch[1:2], logits(net, TOKENS[1:2]))
    padded = torch.nn.functional.pad(TOKENS[1:2], (0, 5))
    assert same_bytes(logits(net, padded)[:, :17], batch[1:2])
    assert attended and all(dtypes == {torch.bfloat16} for dtypes in attended)
    with autocast():
        loss = net.train()(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


def test_rows_of_a_model_without_the_cast_raise(monkeypatch, attended):
    """The mutant: attention takes q and k in fp32, as rotary tables of fp32 rows make them."""
    net = model("llama")
    with autocast():
        ck.patch(net, strict=True)
    monkeypatch.setattr(integration.checking, "autocast", lambda device: False)
    attended.clear()
    with pytest.raises(DtypeError, match=r"q: expected .*float32"):
        logits(net, TOKENS)
    assert not attended


def test_a_call_outside_of_autocast_is_refused():
    """And strict says where to patch."""
    net = model("llama")
    with pytest.raises(PatchError, match="or after fully_shard with a param_dtype"):
        ck.patch(net, strict=True)
    with autocast():
        ck.patch(net, strict=True)
    with pytest.raises(
        DtypeError, match=r"q: expected .*bfloat16.*when it was patched.*patch again.*float32"
    ):
        logits(net, TOKENS, contextlib.nullcontext)


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("first", ["shard", "patch"])
@pytest.mark.parametrize("kind", ["llama", "mixture"])
def test_fully_shard(kind, first, mesh):
    """fp32 shards that are gathered in bf16: the logits of the model in bf16, byte for byte."""
    net = model(kind)
    plain = copy.deepcopy(net).bfloat16()
    ck.patch(plain, strict=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard():
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)

    if first == "shard":
        shard()
        if kind == "mixture":
            with pytest.raises(PatchError, match="FSDP does not support deepcopy"):
                ck.patch(net, strict=True)
            return
        ck.patch(net, strict=True)
    else:
        with autocast():
            ck.patch(net, strict=True)
        shard()
    got = logits(net, TOKENS, contextlib.nullcontext)
    assert same_bytes(got, logits(plain, TOKENS, contextlib.nullcontext))
    net.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
