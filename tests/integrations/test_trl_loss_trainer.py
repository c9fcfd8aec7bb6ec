"""`FusedLoss` in a ``GRPOTrainer``, and beside its own loss, where TRL is."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.gemm import api as gemm
from cute_kernels.integrations import trl as integration
from cute_kernels.integrations.token_logps import token_logps
from tests.contract import same_bytes

trl = pytest.importorskip("trl")
from tests.integrations import trl_step  # noqa: E402

#: loss_type -> settings beside it.
LOSSES = {
    "grpo": {},
    "bnpo": {"use_bias_correction_kl": True, "delta": 1.6},
    "dr_grpo": {"entropy_coef": 0.05},
    "dapo": {"epsilon_high": 0.28, "entropy_coef": 0.05},
    "cispo": {"epsilon_high": 1.2},
    "sapo": {},
    "luspo": {},
}


def trainer(family, tokenizer, folder, **given):
    path = trl_step.checkpoint(folder / family, family)
    return trl_step.trainer(path, tokenizer, folder, **({"cls": trl_step.FusedTrainer} | given))


@pytest.fixture
def products(monkeypatch) -> list[tuple[bool, int]]:
    """(whether gradients are recorded, width of the result) of each product of a model."""
    found, linear = [], gemm.linear

    def counted(x, weight, *args, **options):
        found.append((torch.is_grad_enabled(), len(weight)))
        return linear(x, weight, *args, **options)

    monkeypatch.setattr(gemm, "linear", counted)
    return found


@pytest.mark.parametrize(
    ("family", "bf16", "adapter"),
    [("llama", False, False), ("llama", True, True), ("gemma2", False, True)],
)
def test_steps_on_policy(tokenizer, tmp_path, products, family, bf16, adapter):
    """Two steps, each with a rollout of its own: every ratio is 1, and no logits are made."""
    args = {"bf16": bf16, "max_steps": 2, "learning_rate": 1e-3}
    if family == "gemma2":  # whose logits are near the cap: it would always say the same
        args["temperature"] = 10.0
    given = {"args": args}
    if adapter:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        given["peft_config"] = config
    one = trainer(family, tokenizer, tmp_path, **given)
    ck.patch(one.model, strict=True)
    before = {name: p.clone() for name, p in one.model.named_parameters() if p.requires_grad}
    one.train()
    assert one.state.global_step == 2 and len(one.batches) == len(one.learnt) == 4
    assert all(log["sampling/ratio_not_one"] == 0.0 for log in one.state.log_history[:2])
    trl_step.check_on_policy(one)
    kl = [log["kl"] for log in one.state.log_history[:2]]
    assert kl[0] == 0.0 and kl[1] > 0.0
    after = dict(one.model.named_parameters())
    assert any(not same_bytes(t, after[name]) for name, t in before.items())
    vocabulary = trl_step.families.VOCABULARY
    assert any(grad for grad, _ in products) and (True, vocabulary) not in products


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_that_of_the_log_probs(tokenizer, tmp_path, kind):
    """TRL's own formula of `token_logps` on the same batch: log p, loss and gradients."""

    class Rival(trl_step.FusedTrainer):
        def _compute_loss(self, model, inputs):
            return integration.SampledLogps._compute_loss(self, model, inputs)

    args = {"temperature": 0.7, "loss_type": kind} | LOSSES[kind]
    one = trainer("llama", tokenizer, tmp_path, args=args)
    batch = one._generate_and_score_completions(trl_step.prompts())
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + torch.randn(4, 12) / 8
    one.current_gradient_accumulation_steps = 2
    results = []
    for cls in (trl_step.FusedTrainer, Rival):
        one.__class__ = cls
        loss = one._compute_loss(one.model, batch)
        results.append((loss, torch.autograd.grad(loss, list(one.model.parameters()))))
    (ours, gradients), (theirs, wanted) = results
    assert same_bytes(one.learnt[0], one.learnt[1].detach())
    ids, mask = (
        torch.cat((batch[f"prompt_{part}"], batch[f"completion_{part}"]), 1)
        for part in ("ids", "mask")
    )
    scored = token_logps(one.model, ids, attention_mask=mask, temperature=0.7)[:, -12:]
    assert same_bytes(scored.detach(), one.learnt[0])
    assert abs(ours.item() - theirs.item()) <= 1e-5 * abs(theirs.item()) and theirs.item() != 0
    for a, b in zip(gradients, wanted, strict=True):
        assert b.any() and (a - b).abs().max() <= 2e-2 * b.abs().max()


def test_rounded_logits_have_other_ratios(tokenizer, tmp_path):
    """The control: old log p of a generation whose logits are rounded to bf16."""
    one = trainer("llama", tokenizer, tmp_path, args={"beta": 0.0})
    one._drawn = integration.SampledLogps._drawn.__get__(one)
    one.train()
    logged = one.state.log_history[0]["sampling/ratio_not_one"]
    assert 0.5 < logged <= 1 and not bool((trl_step.ratios(one) == 1).all())
