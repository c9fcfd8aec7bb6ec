"""TRL's GRPO settings and inputs as options and tensors of linear_policy_loss."""

from __future__ import annotations

import types

import pytest
import torch

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations.trl_loss import loss_options, loss_tensors

#: Of the trainer around one micro-batch.
WINDOW = {"gradient_accumulation_steps": 4, "steps_per_generation": 8}
TOKENS = {"num_items_in_batch": torch.tensor(300.0), "num_processes": 2}
#: loss_type -> further settings, and the options of ck.linear_policy_loss.  That these have the
#: loss of TRL's formulas: tests/logp (float64) and test_trl_loss_trainer.py (TRL itself).
ENTROPY = {"entropy_reduction": "token_mean"}
CLIPS, ITEMS = {"clip_low": 0.2, "clip_high": 0.2}, {"divisor": torch.tensor(75.0)}
ROWS = {"reduction": "sequence_mean", "loss_scale": 0.25}
CONSTANT, TOKEN = {"reduction": "constant", "loss_scale": 0.25}, {"reduction": "token_mean"}
CONFIGS = {
    "grpo": ({"beta": 0.04}, ROWS | CLIPS | {"kl_weight": 0.04, "kl": "k3"}),
    "grpo, delta": (
        {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5},
        ROWS | {"clip_low": 0.1, "clip_high": 0.3, "max_ratio": 1.5},
    ),
    "bnpo": (
        {"beta": 0.1, "use_bias_correction_kl": True},
        TOKEN | CLIPS | {"kl_weight": 0.1, "kl": "k3_importance", "loss_scale": 0.25},
    ),
    "dr_grpo": (
        {"max_completion_length": 20, "entropy_coef": 0.05},
        CONSTANT | CLIPS | ENTROPY | {"entropy_weight": 0.05, "max_length": 20},
    ),
    "dapo": (
        {"epsilon_high": 0.28, "entropy_coef": 0.05},
        TOKEN | ITEMS | ENTROPY | {"clip_low": 0.2, "clip_high": 0.28, "entropy_weight": 0.0125},
    ),
    "cispo": (
        {"epsilon_high": 1.2, "beta": 0.04},
        TOKEN | ITEMS | {"clip_low": 1.0, "clip_high": 1.2 - 1, "kl_weight": 0.04, "kl": "k3"},
    ),
    "sapo": (
        {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ROWS | {"gate_positive": 1.0, "gate_negative": 1.05},
    ),
    "luspo": ({}, CONSTANT | CLIPS | {"max_length": 1.0}),
}
LOSSES = {"bnpo": "grpo", "luspo": "grpo"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_options(kind):
    settings, want = CONFIGS[kind]
    name = kind.split(",")[0]
    want = want | {"loss": LOSSES.get(name, name), "temperature": 1.0}
    config = {"loss_type": name} | WINDOW | settings
    assert loss_options(config, **TOKENS) == want
    assert loss_options(types.SimpleNamespace(**config), **TOKENS) == want


def test_tensors():
    """Tokens of tools are masked out; log-probs and the engine's ratios are carried."""
    theirs = ("advantages", "old_per_token_logps", "ref_per_token_logps")
    inputs = {name: torch.rand(3, 5) for name in (*theirs, "importance_sampling_ratio")}
    completion, tool = torch.randint(0, 2, (2, 3, 5))
    made = loss_tensors(inputs | {"completion_mask": completion, "tool_mask": tool})
    assert torch.equal(made.pop("mask"), completion * tool)
    assert list(made) == ["advantages", "old_logp", "reference_logp", "token_weights"]
    assert all(a is b for a, b in zip(made.values(), inputs.values(), strict=True))
    made = loss_tensors({"completion_mask": completion, "advantages": inputs["advantages"]})
    assert made == {"mask": completion, "advantages": inputs["advantages"]}


def test_an_evaluation_accumulates_nothing():
    config = {"loss_type": "grpo", "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    assert loss_options(config)["loss_scale"] == 0.25
    assert loss_options(config, accumulation_steps=3)["loss_scale"] == 1 / 3
    assert loss_options(config, training=False)["loss_scale"] == 1.0
    config["loss_type"] = "dapo"
    given = {"num_items_in_batch": 100, "num_processes": 2}
    assert loss_options(config, **given)["divisor"] == 25.0
    assert loss_options(config, training=False, **given)["divisor"] == 50.0


REFUSED = [
    ("importance_sampling_level", {"importance_sampling_level": "sequence"}),
    ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
    ("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.5}),
    ("use_adaptive_entropy", {"use_adaptive_entropy": True}),
    ("loss_type", {"loss_type": "vespo"}),
    ("epsilon_high", {"loss_type": "cispo", "epsilon_high": 0.28}),
    ("delta", {"loss_type": "grpo", "delta": 1.1}),
    ("num_items_in_batch", {"loss_type": "dapo"}),
]


@pytest.mark.parametrize(("name", "config"), REFUSED)
def test_what_one_sweep_cannot_compute_is_refused_by_name(name, config):
    with pytest.raises(ArgumentValueError, match=f"^{name}: expected"):
        loss_options(config)


def test_bad_arguments():
    with pytest.raises(ArgumentTypeError, match=r"^config: expected a GRPOConfig"):
        loss_options(3)
    for name in ("accumulation_steps", "num_processes"):
        for value, error in ((0, ArgumentValueError), (1.5, ArgumentTypeError)):
            with pytest.raises(error, match=f"^{name}: expected"):
                loss_options({}, num_items_in_batch=100, **{name: value})
