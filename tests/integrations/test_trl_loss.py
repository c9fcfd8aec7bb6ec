"""TRL's GRPO settings through linear_policy_loss, beside its formulas in float64."""

from __future__ import annotations

import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations.trl_loss import loss_options, loss_tensors
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import FP32
from tests.oracles import logp as reference

#: Of the trainer around one micro-batch.
ACCUMULATION, GENERATION, RANKS, ITEMS = 4, 8, 2, 300.0


def inputs_of(seed: int = 2) -> tuple[cases.Problem, dict]:
    """(the head's tensors, what a GRPOTrainer calls its inputs)."""
    x = cases.problem("grpo", "none", seed=seed, dtype=FP32)
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    lengths = torch.tensor([17, 9, 4])
    return x, {
        "completion_mask": (torch.arange(17) < lengths[:, None]).long(),
        "tool_mask": (drawn(3, 17) > 0.2).long(),
        "advantages": torch.tensor([1.2, -0.7, -0.1]),
        "old_per_token_logps": x.tensors["old_logp"],
        "ref_per_token_logps": x.tensors["reference_logp"],
        "importance_sampling_ratio": drawn(3, 17) + 0.5,
        "num_items_in_batch": torch.tensor(ITEMS),
    }


def as_trl(x: cases.Problem, inputs: dict, config: dict) -> list[torch.Tensor]:
    """[loss, dhidden, dweight] in float64, step by step as TRL's documentation defines the loss."""
    hidden, weight = (t.double().requires_grad_() for t in x[:2])
    y = reference.logits(hidden.flatten(0, 1), weight)
    logp, entropy = (t.view(3, 17) for t in reference.of_logits(y, x.target.flatten()))
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).double()
    a, kind = inputs["advantages"].double()[:, None], config["loss_type"]
    ratio = (logp - inputs["old_per_token_logps"]).exp()
    low = config.get("epsilon", 0.2)
    high = config.get("epsilon_high") or low
    if kind == "cispo":
        policy = ratio.clamp(max=high).detach() * a * logp
    elif kind == "sapo":
        tau = torch.where(a > 0, config["sapo_temperature_pos"], config["sapo_temperature_neg"])
        policy = torch.sigmoid(tau * (ratio - 1)) * a * 4 / tau
    else:
        bounded = ratio.clamp(max=config.get("delta") or 1e30)
        policy = torch.minimum(bounded * a, ratio.clamp(1 - low, 1 + high) * a)
    per_token = -policy * inputs["importance_sampling_ratio"]
    d = inputs["ref_per_token_logps"] - logp
    kl = d.exp() - d - 1
    if config.get("use_bias_correction_kl"):
        kl = kl * ratio
    per_token = (per_token + config.get("beta", 0.0) * kl) * mask
    rows, lengths = per_token.sum(1), mask.sum(1)
    loss = {
        "grpo": lambda: (rows / lengths.clamp(min=1)).mean() / ACCUMULATION,
        "sapo": lambda: (rows / lengths.clamp(min=1)).mean() / ACCUMULATION,
        "bnpo": lambda: rows.sum() / lengths.sum() / ACCUMULATION,
        "dr_grpo": lambda: rows.sum() / (3 * config["max_completion_length"]) / ACCUMULATION,
        "luspo": lambda: rows.mean() / ACCUMULATION,
        "dapo": lambda: rows.sum() / (ITEMS / RANKS * ACCUMULATION / GENERATION),
        "cispo": lambda: rows.sum() / (ITEMS / RANKS * ACCUMULATION / GENERATION),
    }[kind]()
    bonus = (entropy * mask).sum() / mask.sum() / ACCUMULATION
    loss = loss - config.get("entropy_coef", 0.0) * bonus
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


CONFIGS = {
    "grpo": {"beta": 0.04},
    "grpo, delta": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "bnpo": {"beta": 0.1, "use_bias_correction_kl": True},
    "dr_grpo": {"max_completion_length": 20, "entropy_coef": 0.05},
    "dapo": {"epsilon_high": 0.28, "entropy_coef": 0.05},
    "cispo": {"epsilon_high": 1.2, "beta": 0.04},
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "luspo": {},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_trl(name):
    x, inputs = inputs_of()
    config = {"loss_type": name} | CONFIGS[name]
    config |= {"gradient_accumulation_steps": ACCUMULATION, "steps_per_generation": GENERATION}
    options = loss_options(
        types.SimpleNamespace(**config),
        num_items_in_batch=inputs["num_items_in_batch"],
        num_processes=RANKS,
    )
    assert options == loss_options(
        config, num_items_in_batch=inputs["num_items_in_batch"], num_processes=RANKS
    )
    leaves = cases.leaves_of(x)
    out = ck.linear_policy_loss(*leaves[:2], x.target, **loss_tensors(inputs), **options)
    out.loss.backward()
    want = as_trl(x, inputs, config)
    for got, exact in zip((out.loss, leaves[0].grad, leaves[1].grad), want, strict=True):
        assert exact.abs().max() > 0
        assert (got.detach() - exact).abs().max() <= 2.0**-14 * exact.abs().max()


def test_an_evaluation_accumulates_nothing():
    config = {"loss_type": "grpo", "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    assert loss_options(config)["loss_scale"] == 0.25
    assert loss_options(config, accumulation_steps=3)["loss_scale"] == 1 / 3
    assert loss_options(config, training=False)["loss_scale"] == 1.0
    config["loss_type"] = "dapo"
    given = {"num_items_in_batch": 100, "num_processes": 2}
    assert loss_options(config, **given)["divisor"] == 25.0
    assert loss_options(config, training=False, **given)["divisor"] == 50.0


REFUSED = {
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    "use_adaptive_entropy": {"use_adaptive_entropy": True},
    "loss_type": {"loss_type": "vespo"},
    "epsilon_high": {"loss_type": "cispo", "epsilon_high": 0.28},
    "delta": {"loss_type": "grpo", "delta": 1.1},
    "num_items_in_batch": {"loss_type": "dapo"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_sweep_cannot_compute_is_refused_by_name(name):
    with pytest.raises(ArgumentValueError, match=f"^{name}: expected"):
        loss_options(REFUSED[name])
    with pytest.raises(ArgumentTypeError, match=r"^config: expected a GRPOConfig"):
        loss_options(3)


@pytest.mark.parametrize("name", ["accumulation_steps", "num_processes"])
def test_a_count_is_one_or_more(name):
    for value, error in (
        (0, ArgumentValueError),
        (-2, ArgumentValueError),
        (1.5, ArgumentTypeError),
    ):
        with pytest.raises(error, match=f"^{name}: expected"):
            loss_options({}, num_items_in_batch=100, **{name: value})
