"""`trl_loss` beside ``GRPOTrainer._compute_loss`` itself, and in a trainer, where TRL is."""

from __future__ import annotations

import re
import types
from collections import defaultdict

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.gemm import api as gemm
from cute_kernels.integrations import trl as integration
from cute_kernels.integrations.token_logps import token_logps
from cute_kernels.integrations.trl_loss import loss_options, loss_tensors
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import FP32
from tests.ranks import ROOT

trl = pytest.importorskip("trl")
from tests.integrations import trl_step  # noqa: E402

CONFIGS = {
    "grpo": {"beta": 0.04},
    "bnpo": {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.6},
    "dr_grpo": {"max_completion_length": 20, "entropy_coef": 0.05},
    "dapo": {"epsilon_high": 0.28, "entropy_coef": 0.05},
    "cispo": {"epsilon_high": 1.2, "beta": 0.04},
    "sapo": {},
    "luspo": {"beta": 0.04},
}


def trainer_of(config, logp, entropy) -> types.SimpleNamespace:
    """The attributes of a trainer that its loss reads; log-probs are given."""
    accelerator = types.SimpleNamespace(
        num_processes=1, gather=lambda t: t, reduce=lambda t, **how: t, sync_gradients=False
    )
    return types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **options: (logp, entropy, None),
        args=config,
        accelerator=accelerator,
        aux_loss_enabled=False,
        model=torch.nn.Identity().train(),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=config.entropy_coef != 0,
        _step=0,
        entropy_coef=config.entropy_coef,
        use_adaptive_entropy=False,
        beta=config.beta,
        loss_type=config.loss_type,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        importance_sampling_level="token",
        max_completion_length=config.max_completion_length,
        current_gradient_accumulation_steps=config.gradient_accumulation_steps,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_trainers_loss_and_its_gradient(kind, tmp_path):
    config = trl.GRPOConfig(
        str(tmp_path), loss_type=kind, gradient_accumulation_steps=4, steps_per_generation=8,
        per_device_train_batch_size=3, num_generations=3, use_cpu=True, bf16=False, report_to=[],
        **CONFIGS[kind],
    )  # fmt: skip
    x = cases.problem("grpo", "none", seed=2, dtype=FP32)
    mask = (torch.arange(17) < torch.tensor([17, 9, 4])[:, None]).long()
    inputs = {
        "prompt_ids": x.target[:, :1], "prompt_mask": mask[:, :1], "completion_ids": x.target,
        "completion_mask": mask, "advantages": torch.tensor([1.2, -0.7, -0.1]),
        "old_per_token_logps": x.tensors["old_logp"],
        "ref_per_token_logps": x.tensors["reference_logp"],
        "importance_sampling_ratio": torch.rand(3, 17) + 0.5,
        "num_items_in_batch": torch.tensor(300.0),
    }  # fmt: skip
    options = loss_options(config, num_items_in_batch=inputs["num_items_in_batch"])
    options["temperature"] = 1.0
    leaves, theirs = cases.leaves_of(x), cases.leaves_of(x)
    out = ck.linear_policy_loss(*leaves[:2], x.target, **loss_tensors(inputs), **options)
    logp, entropy = ck.linear_logp(*theirs[:2], x.target, return_entropy=True)
    trainer = trainer_of(config, logp, entropy)
    want = trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    out.loss.backward()
    want.backward()
    assert abs(out.loss.item() - want.item()) <= 1e-5 * abs(want.item()) + 1e-7
    for a, b in zip(leaves[:2], theirs[:2], strict=True):
        assert b.grad.any() and (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max()


# ---- FusedLoss ----------------------------------------------------------------------------------


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
    assert trl_step.all_ones(one)
    for batch, new in list(zip(one.batches, one.learnt, strict=True))[:2]:
        assert same_bytes(new, batch["old_per_token_logps"])
        assert same_bytes(new, batch["ref_per_token_logps"])
    kl = [log["kl"] for log in one.state.log_history[:2]]
    assert kl[0] == 0.0 and kl[1] > 0.0
    after = dict(one.model.named_parameters())
    assert any(not same_bytes(t, after[name]) for name, t in before.items())
    vocabulary = trl_step.families.VOCABULARY
    assert any(grad for grad, _ in products) and (True, vocabulary) not in products


def test_the_loss_is_that_of_the_log_probs(tokenizer, tmp_path):
    """TRL's own formula of `token_logps` on the same batch: log p, loss and gradients."""

    class Rival(trl_step.FusedTrainer):
        def _compute_loss(self, model, inputs):
            return integration.SampledLogps._compute_loss(self, model, inputs)

    one = trainer("llama", tokenizer, tmp_path, args={"temperature": 0.7})
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


CONTINUOUS = "use_transformers_continuous_batching"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: expected 'token'"),
        ({"loss_type": "vespo"}, "loss_type: .*vespo"),
        ({CONTINUOUS: True}, f"args.{CONTINUOUS}: expected False"),
    ],
)
def test_refused_settings(tokenizer, tmp_path, args, words):
    with pytest.raises(ArgumentValueError, match=words):
        trainer("llama", tokenizer, tmp_path, args={"beta": 0.0, **args})


def test_what_else_is_refused(tokenizer, tmp_path):
    with pytest.raises(ArgumentValueError, match="rollout_contracts: expected None"):
        trl_step.FusedTrainer(rollout_contracts={"linear": "linear/cpu/x/1"})
    one = trainer("llama", tokenizer, tmp_path, args={"beta": 0.0})
    with pytest.raises(ArgumentValueError, match="pixel_values: expected text alone"):
        one._compute_loss(one.model, {"pixel_values": torch.randn(2, 3, 4, 4)})


def test_the_recipe_runs(tokenizer, tmp_path):
    page = (ROOT / "docs/policy_loss.md").read_text()
    recipe = re.search(r"^## TRL\n(?:(?!^## ).)*?^```py\n(.*?)^```$", page, re.M | re.S)[1]
    names = {"path": trl_step.checkpoint(tmp_path / "llama"), "tokenizer": tokenizer}
    names |= {"reward": trl_step.reward, "dataset": trl_step.dataset(trl_step.prompts())}
    names["settings"] = trl_step.settings(tmp_path, beta=0.0)
    exec(compile(recipe, "docs/policy_loss.md", "exec"), names)
    assert names["trainer"].state.log_history[0]["sampling/ratio_not_one"] == 0.0
