"""A Llama of transformers: as it is, it has culprits; patched, it has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import PatchError

transformers = pytest.importorskip("transformers")
families = pytest.importorskip("tests.model.patch.families")
all_causal_lms = pytest.importorskip("tests.model.patch.all_causal_lms")

EVERY = {"repeat", "batch", "compositions", "left_padding", "right_padding", "chunks", "decode"}


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 97, (n,), generator=generator) for n in lengths]


def plain() -> nn.Module:
    return families.model("llama", num_hidden_layers=1, attn_implementation="sdpa")


def patched() -> nn.Module:
    """The same by our ops; gradients of linears into main_grads, no others."""
    model = plain()
    ck.patch(model, main_grad=True, strict=True)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_()
            module.weight.main_grad = torch.zeros(module.weight.shape, dtype=torch.float32)
    return model


class NormByRows(nn.Module):
    """Its mean is of two halves in a batch, each rounded to bf16: what fp32 would hide here."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return ck.rms_norm(x, self.weight, self.eps)
        square = x.float() ** 2
        halves = [square[..., half::2].mean(-1).bfloat16().float() for half in (0, 1)]
        mean = (halves[0] + halves[1]) / 2
        scaled = x.float() * torch.rsqrt(mean + self.eps)[..., None]
        return self.weight * scaled.to(x.dtype)


def test_a_patched_one_differs_nowhere():
    report = ck.audit(patched(), sequences(19, 7, 12))
    assert report.ok, str(report)
    assert {*report.ran} == EVERY | {"gradient_repeat", "micro_batches"}
    assert report.gradients == 3 * (7 + 1) and not report.unfollowed
    assert report.rows > 12 * 38 * 17


def test_as_it_is_it_differs_and_leaves_name_a_module():
    report = ck.audit(plain(), sequences(19, 7), gradients=False)
    assert not report.ok and "decode" in {one.transform for one in report.findings}
    first = report.first
    assert first.module.startswith("model.layers.0.") and first.kind.startswith(("Llama", "Linear"))
    assert first.first is not None and first.want != first.got and first.ops
    assert report.victims and not report.unfollowed
    # Every module that ran was followed: 13 in the layer, and 6 around it; 26 tokens.
    assert report.rows == (13 + 6) * 26 * sum(map(len, report.ran.values()))


def test_a_norm_planted_among_our_ops_is_named():
    place, model = "model.layers.0.post_attention_layernorm", patched()
    was = model.get_submodule(place)
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, NormByRows(was.weight, was.variance_epsilon).eval())
    with pytest.raises(PatchError, match=f"^{name}: expected"):
        ck.audit(model, sequences(19, 7), transforms=["batch", "decode"])
    assert {left.name for left in ck.patch(model).moving} == {place}
    report = ck.audit(model, sequences(19, 7), transforms=["batch", "decode"])
    assert {(one.module, one.kind) for one in report.findings} == {(place, "NormByRows")}
    assert {one.transform for one in report.findings} == {"batch", "decode"}


def test_padding_of_transformers_reaches_the_model_as_its_generate_gives_it():
    """Positions count real tokens, the mask is 1 on them, through a cache too."""
    model, seen = patched(), []

    def look(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        seen.append((args[0], None if mask is None else mask.clone(), kwargs["position_ids"]))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    ck.audit(model, sequences(6, 3), transforms=["left_padding", "decode"])
    handle.remove()
    masked = [(ids, mask, positions) for ids, mask, positions in seen if mask is not None]
    assert masked and any(ids.shape[1] == 1 for ids, *_ in masked)
    for ids, mask, positions in masked:
        count = mask.cumsum(1)[:, -ids.shape[1] :] - 1
        real = mask[:, -ids.shape[1] :] == 1
        assert (positions[real] == count[real]).all() and bool((mask.diff(dim=1) >= 0).all())


@pytest.mark.parametrize("kind", ["mistral", "mixtral"])
def test_the_model_differs_where_a_look_without_the_audit_says_so(kind):
    """In fp32; windows, experts."""
    model = families.model(kind, hidden_size=192, num_hidden_layers=1).float()
    report = ck.audit(model, sequences(19, 8), transforms=["batch", "decode"])
    at_the_end = {one.transform for one in (*report.findings, *report.victims) if not one.module}
    differing = {"in a batch", "decoded"} & {*all_causal_lms.differing(model)}
    assert bool(at_the_end) == bool(differing)
    assert bool(report.unfollowed) == (kind == "mixtral")


def test_ids_may_be_a_batch_a_list_or_numbers():
    model, ids = patched(), sequences(5, 5)
    batch = torch.stack(ids).int()
    reports = [ck.audit(model, one, transforms=["batch"]) for one in (ids, batch, batch.tolist())]
    assert all(report == reports[0] and report.ok for report in reports)


def test_a_cache_that_is_not_recognised_is_no_plain_ok():
    sizes = {"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    config = transformers.MambaConfig(**sizes, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    report = ck.audit(model, sequences(5), gradients=False)
    assert report.unrecognised == ("chunks", "decode") and not report.ok
    assert report.as_json()["unrecognised"] == ["chunks", "decode"]
    assert ck.audit(model, sequences(5), transforms=["repeat"]).verdict == "ok"
