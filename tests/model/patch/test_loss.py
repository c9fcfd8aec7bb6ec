"""forward(labels=...): the loss from ck.linear_logp, without logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree
from transformers.modeling_outputs import BaseModelOutputWithPast

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 19)


def labels() -> torch.Tensor:
    targets = TOKENS.clone()
    targets[0, :6] = -100
    return targets


def patched(name: str = "llama") -> torch.nn.Module:
    net = families.model(name)
    ck.patch(net)
    return net


def test_it_is_linear_logp():
    net = patched("gemma3")
    out = net.train()(TOKENS, labels=labels(), use_cache=False)
    hidden = net.model(TOKENS, use_cache=False).last_hidden_state
    target = F.pad(labels()[:, 1:], (0, 1), value=-100)
    scores = ck.linear_logp(hidden, net.lm_head.weight, target, softcap=20.0)
    count = int((target != -100).sum())
    assert abs(out.loss.item() + scores.double().sum().item() / count) < 1e-6
    assert out.loss.dtype == torch.float32 and out.logits is None


def test_a_sequences_gradient_does_not_follow_the_batch():
    """dhidden of one sequence, alone and beside others, with the same count of items."""
    net, rows = patched().train(), []
    net.lm_head.register_full_backward_hook(lambda m, gi, go: rows.append(gi[0]))
    both = torch.cat((TOKENS, families.ids(3, 19, seed=9)))
    for tokens in (TOKENS, both):
        net(tokens, labels=tokens, use_cache=False, num_items_in_batch=40).loss.backward()
    assert same_bytes(rows[0], rows[1][:2])


def test_the_place_of_the_logits_is_kept():
    """By index as by name; transformers drops what is None, and the cache would be next."""
    net = patched().train()
    out = net(TOKENS, labels=TOKENS, use_cache=True)
    assert out[1] is None and out[2] is out.past_key_values is not None
    loss, logits, cache = net(TOKENS, labels=TOKENS, use_cache=True, return_dict=False)
    assert same_bytes(loss, out.loss) and logits is None and type(cache) is type(out[2])
    again = _pytree.tree_map_only(torch.Tensor, torch.clone, out)  # as FSDP2 and accelerate do
    assert type(again) is type(out) and again[1] is None and same_bytes(again.loss, out.loss)
    with torch.no_grad():  # in evaluation there are logits as well
        out = net.eval()(TOKENS, labels=TOKENS, use_cache=True)
    assert same_bytes(out[1], families.logits(net, TOKENS)) and same_bytes(out.loss, loss)


def test_items_in_batch_shifted_labels_and_tuples():
    net = patched()
    with torch.no_grad():
        mean = net(TOKENS, labels=labels(), use_cache=False).loss
        count = int((labels()[:, 1:] != -100).sum())
        items = torch.tensor(count)
        total = net(TOKENS, labels=labels(), num_items_in_batch=items, use_cache=False).loss
        shifted = F.pad(labels()[:, 1:], (0, 1), value=-100)
        by_shifted = net(TOKENS, labels=labels(), shift_labels=shifted, use_cache=False).loss
        first, *_ = net(TOKENS, labels=labels(), use_cache=False, return_dict=False)
        placed = net(TOKENS, None, None, None, None, labels(), False).loss
    for other in (total, by_shifted, first, placed):
        assert same_bytes(mean, other)


def test_the_order_of_the_head():
    """Of its logits, and of the gradient that a loss of ck.linear_logp sends back."""
    net = families.model("llama", vocab_size=600).float().train()
    shape = (*TOKENS.shape, net.config.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    gradients = {}
    for order in ("chain", "tree"):
        ck.patch(net, order=order)
        mine, direct = (hidden.clone().requires_grad_() for _ in range(2))
        weight = net.lm_head.weight
        assert same_bytes(net.lm_head(mine), ck.linear(mine, weight, order=order))
        net.model.forward = lambda *args, to=mine, **kwargs: BaseModelOutputWithPast(to)
        net(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        logps = ck.linear_logp(direct[:, :-1], weight, TOKENS[:, 1:], order=order)
        (-logps.sum() / TOKENS[:, 1:].numel()).backward()
        assert same_bytes(mine.grad[:, :-1], direct.grad[:, :-1])
        gradients[order] = mine.grad
    assert not same_bytes(gradients["chain"], gradients["tree"])


def test_logits_only():
    """logits="linear": the loss is torch's, of the logits, and the report says so."""
    net = patched("gemma2")
    want = families.logits(net, TOKENS)
    (left,) = ck.patch(net, logits="linear", strict=True).left
    assert left.part == "Gemma2ForCausalLM: loss" and not left.moves
    out = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    assert same_bytes(out.loss, net.loss_function(out.logits, TOKENS, families.VOCABULARY))
    assert same_bytes(out.logits, want)


def test_a_loss_of_the_users():
    net = patched().train()
    net.loss_function = lambda logits, labels, vocab_size, **others: logits.float().square().mean()
    out = net(TOKENS, labels=TOKENS, use_cache=False)
    assert same_bytes(out.loss, out.logits.float().square().mean())
    assert "loss_function is not the one" in ck.patch(net).left[0].known


class Adapter(torch.nn.Module):
    """Around the head: its logits are not the head's, so the head cannot score them."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.set_output_embeddings(Adapter(net.lm_head)),
        lambda net: ck.patch(net.lm_head),
        lambda net: ck.unpatch(net.lm_head),
    ],
    ids=["adapter", "patch", "unpatch"],
)
def test_a_head_that_was_changed_by_itself(change):
    """It does not know of the loss any more; the whole model does, patched again."""
    net = patched()
    want = net(TOKENS, labels=TOKENS).loss
    change(net)
    with pytest.raises(ArgumentTypeError, match="patch the whole model again"):
        net(TOKENS, labels=TOKENS)
    report, out = ck.patch(net), net(TOKENS, labels=TOKENS)
    adapted = isinstance(net.lm_head, Adapter)
    assert same_bytes(out.loss, want) or adapted
    assert not adapted or ("Adapter" in report.left[0].known and out.logits is not None)
