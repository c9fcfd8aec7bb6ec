"""`trl_loss` beside ``GRPOTrainer._compute_loss`` itself, where TRL is installed."""

from __future__ import annotations

import types
from collections import defaultdict

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations.trl_loss import loss_options, loss_tensors
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import FP32

trl = pytest.importorskip("trl")

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
