"""forward(labels=...): the loss from ck.linear_logp, without logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 19)


def labels() -> torch.Tensor:
    found = TOKENS.clone()
    found[0, :6] = -100
    return found


def distance(name: str) -> torch.Tensor:
    """How far the unpatched model's log-probs of tokens are from float64, on average."""
    plain = families.model(name)
    each = [
        F.cross_entropy(
            families.logits(net, TOKENS).double()[:, :-1].flatten(0, 1),
            labels()[:, 1:].flatten(),
            reduction="none",
        )
        for net in (plain, families.exact(plain))
    ]
    return (each[0] - each[1])[each[1] != 0].abs().mean()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_against_float64(name):
    """Loss and gradients, beside those of the unpatched model in bf16."""
    found = {}
    for kind in ("patched", "plain", "exact"):
        net = families.model(name).train()
        if kind == "exact":
            net = families.exact(net)
        if kind == "patched":
            ck.patch(net)
        out = net(TOKENS, labels=labels(), use_cache=False)
        out.loss.backward()
        assert (out.logits is None) == (kind == "patched")
        found[kind] = out.loss.double(), {n: p.grad.double() for n, p in net.named_parameters()}
    want, gradients = found["exact"]
    assert (found["patched"][0] - want).abs() <= 1.25 * distance(name)
    for parameter, exact in gradients.items():
        mine, torchs = (
            (found[kind][1][parameter] - exact).norm() / exact.norm()
            for kind in ("patched", "plain")
        )
        assert mine <= 1.25 * torchs + 5e-3, parameter


def test_it_is_linear_logp():
    net = families.model("gemma3")
    ck.patch(net)
    out = net.train()(TOKENS, labels=labels(), use_cache=False)
    hidden = net.model(TOKENS, use_cache=False).last_hidden_state
    target = F.pad(labels()[:, 1:], (0, 1), value=-100)
    scores = ck.linear_logp(hidden, net.lm_head.weight, target, softcap=20.0)
    count = int((target != -100).sum())
    assert abs(out.loss.item() + scores.double().sum().item() / count) < 1e-6
    assert out.loss.dtype == torch.float32 and out.logits is None


def test_a_sequences_gradient_does_not_follow_the_batch():
    """dhidden of one sequence, alone and beside others, with the same count of items."""
    net = families.model("llama").train()
    ck.patch(net)
    rows = []
    net.lm_head.register_full_backward_hook(lambda m, gi, go: rows.append(gi[0]))
    both = torch.cat((TOKENS, families.ids(3, 19, seed=9)))
    for tokens in (TOKENS, both):
        net(tokens, labels=tokens, use_cache=False, num_items_in_batch=40).loss.backward()
    assert same_bytes(rows[0], rows[1][:2])


def test_evaluation_gives_logits_as_well():
    net = families.model("llama")
    ck.patch(net)
    with torch.no_grad():
        out = net(TOKENS, labels=TOKENS, use_cache=False)
        trained = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    assert same_bytes(out.logits, families.logits(net.eval(), TOKENS))
    assert same_bytes(out.loss, trained.loss) and trained.logits is None


def test_the_place_of_the_logits_is_kept_in_training():
    """By index as by name; transformers drops what is None, and the cache would be next."""
    from torch.utils import _pytree

    net = families.model("llama").train()
    ck.patch(net)
    out = net(TOKENS, labels=TOKENS, use_cache=True)
    assert out[1] is None and out[2] is out.past_key_values is not None
    loss, logits, cache = net(TOKENS, labels=TOKENS, use_cache=True, return_dict=False)
    assert same_bytes(loss, out.loss) and logits is None and type(cache) is type(out[2])
    again = _pytree.tree_map_only(torch.Tensor, torch.clone, out)  # as FSDP2 and accelerate do
    assert type(again) is type(out) and again[1] is None and same_bytes(again.loss, out.loss)
    logits = net.eval()(TOKENS, labels=TOKENS, use_cache=True)[1]
    assert logits.shape[:2] == TOKENS.shape


def test_items_in_batch_shifted_labels_and_tuples():
    net = families.model("llama")
    ck.patch(net)
    with torch.no_grad():
        mean = net(TOKENS, labels=labels(), use_cache=False).loss
        count = int((labels()[:, 1:] != -100).sum())
        items = torch.tensor(count)
        total = net(TOKENS, labels=labels(), num_items_in_batch=items, use_cache=False).loss
        shifted = F.pad(labels()[:, 1:], (0, 1), value=-100)
        given = net(TOKENS, labels=labels(), shift_labels=shifted, use_cache=False).loss
        first, *_ = net(TOKENS, labels=labels(), use_cache=False, return_dict=False)
        placed = net(TOKENS, None, None, None, None, labels(), False).loss
    for other in (total, given, first, placed):
        assert same_bytes(mean, other)


def test_the_order_of_the_head():
    """Of its logits, and of the gradient that a loss of ck.linear_logp sends back."""
    net = families.model("llama", vocab_size=600).float().train()
    shape = (*TOKENS.shape, net.config.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    found = {}
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
        found[order] = mine.grad
    assert not same_bytes(found["chain"], found["tree"])


def test_logits_only():
    """logits="linear": the loss is torch's, of the logits, and the report says so."""
    net = families.model("gemma2")
    report = ck.patch(net, logits="linear")
    (left,) = ck.patch(net, logits="linear", strict=True).left
    assert report.complete and left.part == "Gemma2ForCausalLM: loss" and not left.moves
    out = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    want = net.loss_function(out.logits, TOKENS, families.VOCABULARY)
    assert same_bytes(out.loss, want)
    ck.patch(net)
    assert same_bytes(net.eval()(TOKENS, use_cache=False).logits, out.logits)


def test_a_loss_of_the_users():
    net = families.model("llama").train()
    ck.patch(net)
    net.loss_function = lambda logits, labels, vocab_size, **others: logits.float().square().mean()
    out = net(TOKENS, labels=TOKENS, use_cache=False)
    assert same_bytes(out.loss, out.logits.float().square().mean())
    report = ck.patch(net)
    assert "loss_function is not the one" in report.left[0].known


def test_an_adapter_around_the_head():
    """Added after the patch: its logits are not the head's, so the head cannot score them."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + 1

    net = families.model("llama")
    ck.patch(net)
    net.set_output_embeddings(Adapter(net.lm_head))
    with pytest.raises(ArgumentTypeError, match="patch the whole model again"):
        net(TOKENS, labels=TOKENS)
    report = ck.patch(net)
    assert "Adapter" in report.left[0].known
    assert net(TOKENS, labels=TOKENS).logits is not None


def test_a_head_that_was_patched_by_itself():
    """It does not know of the loss any more; the whole model does, patched again."""
    net = families.model("llama")
    ck.patch(net)
    want = net(TOKENS, labels=TOKENS).loss
    for change in (ck.patch, ck.unpatch):
        change(net.lm_head)
        with pytest.raises(ArgumentTypeError, match="patch the whole model again"):
            net(TOKENS, labels=TOKENS)
    ck.patch(net)
    assert same_bytes(net(TOKENS, labels=TOKENS).loss, want)
