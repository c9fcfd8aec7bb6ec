"""Attention that modules spell out, by our op: values, rows, and steps that are refused."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards import modes
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms

#: A rotary embedding in fp32 and one before it; BERT's; keys of one head; `@` and a dtype.
KINDS = ("gptj", "rembert", "falcon")
MORE = ("codegen", "megatron-bert", "roformer")
SIZES = (2, 2, 5, 64)


def spelled(net: torch.nn.Module) -> list[str]:
    return [name for name, m in net.named_modules() if state.kind_of(m) == "scores"]


def runs(net: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the embeddings, of a padded batch."""
    tokens = all_causal_lms.ids(2, seed=3)
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = all_causal_lms.logits(net, tokens, attention_mask=mask, position_ids=positions)
    return logits[mask.bool()], all_causal_lms.gradient(net, tokens)


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(k, marks=pytest.mark.nightly) for k in MORE)]
)
def test_values_against_float64(kind):
    """No farther from eager attention in float64 than eager attention in bf16, but for a half."""
    exact, eager, patched = (all_causal_lms.build(kind) for _ in range(3))
    for net in (exact, eager):
        net.set_attn_implementation("eager")
    report = ck.patch(patched, strict=True)
    assert report.complete and len(spelled(patched)) == 2
    want, torchs, ours = runs(exact.double()), runs(eager), runs(patched)
    for value, near, mine in zip(want, torchs, ours, strict=True):
        error, bound = ((t.double() - value).norm() for t in (mine, near))
        assert error <= 1.5 * bound + 1e-3 * value.norm()


def test_rows_and_the_way_back():
    net = all_causal_lms.build("gptj")
    tokens = all_causal_lms.ids(2)
    before = all_causal_lms.whole(net, tokens)
    ck.patch(net, strict=True)
    ck.patch(net, strict=True)
    assert len(spelled(net)) == 2 and all_causal_lms.differing(net) == []
    assert net(tokens, output_attentions=True).attentions in (None, (None, None))
    ck.unpatch(net)
    assert spelled(net) == [] and same_bytes(all_causal_lms.whole(net, tokens), before)


@pytest.mark.parametrize("kind", ["mpt", "gpt_neo"])
def test_other_formulas_are_refused(kind):
    """A bias of positions, a mask by torch.where."""
    net = all_causal_lms.build(kind)
    with pytest.raises(PatchError, match="bmm"):
        ck.patch(net, strict=True)
    assert spelled(net) == []


def test_keys_that_follow_the_longest_sequence_are_refused():
    with pytest.raises(PatchError, match="attention_type = 'block_sparse'"):
        ck.patch(all_causal_lms.build("big_bird"), strict=True)


def test_steps_of_other_formulas_are_refused():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SIZES, generator=generator).bfloat16() for _ in range(3))
    mask = torch.zeros(2, 1, 5, 4, dtype=torch.int32)

    def made():
        with modes.Attention():
            return torch.matmul(q, k.transpose(2, 3))

    assert isinstance(made(), modes.Scores) and made().size() == (2, 2, 5, 5)
    refused = {
        "a sum with another tensor": lambda: made() + torch.zeros(5, 5),
        "a product without softmax": lambda: torch.matmul(made() + mask, v),
        "softmax or mask": lambda: torch.softmax(made(), dim=-1) @ v,
        "softmax": lambda: torch.softmax(made() + mask, dim=1),
        "no positive number": lambda: made() * torch.ones(2),
        "dropout": lambda: torch.nn.functional.dropout(torch.softmax(made(), -1), 0.1),
        "exp": lambda: torch.exp(made()),
        "where": lambda: torch.where(torch.ones(5, 5).bool(), made(), q),
    }
    for match, run in refused.items():
        with pytest.raises(ArgumentValueError, match=match):
            run()
