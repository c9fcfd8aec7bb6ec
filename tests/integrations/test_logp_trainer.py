"""A training worker in one process, and its loss; with engines: test_deepspeed.py, test_fsdp.py."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ShapeError
from cute_kernels.integrations.logp_trainer import Trainer, learnt
from cute_kernels.integrations.policy_loss import policy_loss
from cute_kernels.integrations.token_logps import token_logps
from tests.contract import same_bytes
from tests.integrations import tiny

# ---- a training worker, alone -------------------------------------------------------------------


class Alone(Trainer):
    def update(self, loss):
        loss.backward()
        self.losses = [*getattr(self, "losses", []), loss.item()]


def test_a_worker_of_one_process():
    """``ref_logps`` of the batch stand for a reference model, which keeps its modes."""
    model, reference = tiny.llama(), tiny.llama(seed=2).train()
    reference.model.norm.eval()
    batch = tiny.batch(0)
    one = Alone(model, reference, kl_weight=0.3)
    metrics = one.step(batch)
    assert reference.training and not reference.model.norm.training
    assert all(p.grad is None for p in reference.parameters())
    assert metrics["kl"] > 0 and metrics["tokens"] == 28
    assert one.losses == [metrics["loss"]]
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ref = {"ref_logps": one.reference_logps(batch)}
    assert Alone(model, kl_weight=0.3).step(batch | ref) == metrics
    assert all(same_bytes(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("shape", ["sequence", "column"])
def test_advantages_of_sequences(shape):
    batch = tiny.batch(0)
    each = batch["advantages"]
    shaped = {"sequence": each, "column": each[:, None].expand(4, 1)}
    got = Alone(tiny.llama()).step(batch | {"advantages": shaped[shape]})
    every = each[:, None].expand(4, 11).clone()
    every[:, 0] = float("nan")  # no token comes before the first
    assert got == Alone(tiny.llama()).step(batch | {"advantages": every})


def test_advantages_of_tokens():
    """Each token's own: that of column t weighs log p of ``input_ids[:, t]``."""
    batch, model = tiny.batch(0), tiny.llama()
    advantages = torch.randn(4, 11, generator=torch.Generator().manual_seed(2))
    del batch["old_logps"]
    got = Alone(model).step(batch | {"advantages": advantages})
    kept = learnt(batch)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logps = token_logps(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    want = policy_loss(logps, advantages[:, 1:], kept, count=int(kept.sum()))
    want.loss.backward()
    assert got["loss"] == want.loss.item()
    assert all(same_bytes(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    # The formula, of the tokens one by one.
    exact = -sum(advantages[b, t + 1].item() for b, t in kept.nonzero().tolist()) / int(kept.sum())
    assert got["policy_loss"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "middle", "dtype"])
def test_tokens_that_count(side):
    """A token counts if it, and the position that predicts it, are no padding."""
    ids = torch.arange(8).expand(2, 8)
    seen = torch.ones(2, 8, dtype=torch.bool if side == "dtype" else torch.long)
    seen[1, {"left": slice(3), "right": slice(6, 8)}.get(side, slice(3, 5))] = 0
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2]])
    got = learnt({"input_ids": ids, "attention_mask": seen, "mask": mask})
    want = [
        [bool(mask[b, t]) and bool(seen[b, t]) and bool(seen[b, t - 1]) for t in range(1, 8)]
        for b in range(2)
    ]
    assert got.tolist() == want
    assert learnt({"input_ids": ids}).all()


def test_batches_that_a_worker_refuses():
    model, batch = tiny.llama(), tiny.batch(0)
    with pytest.raises(ArgumentTypeError, match=r"batch\['advantages'\]: expected a tensor"):
        Alone(model).step({"input_ids": tiny.batch(0)["input_ids"]})
    with pytest.raises(ArgumentValueError, match="ref_logps, or a reference model"):
        Alone(model, kl_weight=0.1).step(batch)
    with pytest.raises(ArgumentValueError, match="a token that counts"):
        Alone(model).step(batch | {"mask": torch.zeros(4, 11)})
    with pytest.raises(ArgumentTypeError, match="a causal language model"):
        Alone(model, torch.nn.Linear(2, 2))


# ---- the loss -----------------------------------------------------------------------------------


def losses(**options):
    generator = torch.Generator().manual_seed(0)
    logps, old, ref = (-torch.rand(2, 4, generator=generator) * 3 for _ in range(3))
    advantages = torch.tensor([[1.0], [-2.0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    logps.requires_grad_()
    given = {"count": 6, "old": old, "reference": ref, "clip": 0.2, "kl_weight": 0.5} | options
    return logps, advantages, mask, given


def test_the_policy_loss_is_its_formula():
    logps, advantages, mask, given = losses()
    found = policy_loss(logps, advantages, mask, **given)
    policy = kl = 0.0
    for b, t in mask.nonzero().tolist():
        new, old, ref = (x[b, t].double() for x in (logps, given["old"], given["reference"]))
        rho, a = (new - old).exp(), advantages[b, 0].double()
        policy = policy - torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a) / 6
        kl = kl + ((ref - new).exp() - (ref - new) - 1) / 6
    assert found.policy.item() == pytest.approx(policy.item(), rel=1e-5)
    assert found.kl.item() == pytest.approx(kl.item(), rel=1e-5)
    assert found.loss.item() == pytest.approx((policy + 0.5 * kl).item(), rel=1e-5)
    wanted = torch.autograd.grad(policy + 0.5 * kl, logps, retain_graph=True)[0]
    got = torch.autograd.grad(found.loss, logps)[0]
    assert (got - wanted).abs().max() < 1e-6
    assert (got[mask == 0] == 0).all()


def test_without_old_it_is_the_plain_policy_gradient():
    logps, advantages, mask, given = losses(old=None, reference=None)
    policy_loss(logps, advantages, mask, **given).loss.backward()
    assert same_bytes(logps.grad, torch.where(mask != 0, -advantages / 6, 0.0))


def test_masked_nan_harms_nothing():
    logps, advantages, mask, given = losses()
    want = policy_loss(logps, advantages, mask, **given).loss
    with torch.no_grad():
        for t in (logps, given["old"], given["reference"]):
            t[mask == 0] = float("nan")
    got = policy_loss(logps, advantages, mask, **given).loss
    assert same_bytes(got.detach(), want.detach())
    got.backward()
    assert logps.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"old": torch.zeros(2, 3)}, ShapeError, "old: expected the shape of logps"),
        ({"reference": torch.zeros(8)}, ShapeError, "reference"),
        ({"count": 0}, ArgumentValueError, "count: expected above 0, got 0"),
        ({"clip": 0.0}, ArgumentValueError, "clip"),
        ({"clip": 1.5}, ArgumentValueError, "clip"),
        ({"kl_weight": -1.0}, ArgumentValueError, "kl_weight"),
    ],
)
def test_bad_losses(change, error, said):
    logps, advantages, mask, given = losses(**change)
    with pytest.raises(error, match=said):
        policy_loss(logps, advantages, mask, **given)
    with pytest.raises(ShapeError, match="advantages"):
        policy_loss(logps, advantages.T, mask, **losses()[3])
    with pytest.raises(ArgumentValueError, match=r"^mask: expected values of 0 and 1, got 0\.5"):
        policy_loss(logps, advantages, mask * 0.5, **losses()[3])
