"""Log-probs of an engine's logits: those of the trainer, whatever a sampler has done to them."""

from __future__ import annotations

import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations import engine_layers
from cute_kernels.integrations.vllm import samplers
from tests.contract import same_bytes

namespace = types.SimpleNamespace


@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_of_an_engines_logits_are_those_of_linear_logp(bias):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    hidden, head = draw(5, 64).bfloat16(), draw(1003, 64).bfloat16()
    bias = draw(1003).bfloat16() if bias else None
    tokens = torch.randint(0, 1003, (5, 3), generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.3, 2.5, 1.0])
    logits = engine_layers.fp32_logits(hidden, head, bias)
    engine = samplers.of_tokens(logits, tokens, temperature)
    for column, target in zip(engine.unbind(1), tokens.unbind(1), strict=True):
        trainer = ck.linear_logp(hidden, head, target, bias, temperature=temperature)
        assert same_bytes(column.contiguous(), trainer)
    alone = samplers.of_tokens(engine_layers.fp32_logits(hidden[2:3], head, bias), tokens[2:3])
    assert same_bytes(alone, samplers.of_tokens(logits, tokens)[2:3])
    assert engine_layers.fp32_logits(hidden[:0], head).shape == (0, 1003)
    tree = samplers.of_tokens(engine_layers.fp32_logits(hidden, head, bias, order="tree"), tokens)
    assert same_bytes(
        tree[:, 0].contiguous(), ck.linear_logp(hidden, head, tokens[:, 0], bias, order="tree")
    )


def test_filtered_tokens_have_no_probability():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    logits[0, :30] = -torch.inf
    made = samplers.of_tokens(logits, torch.tensor([[3, 40], [3, 40]]))
    assert made[0, 0] == -torch.inf and made.isfinite().sum() == 3
    kept = samplers.of_tokens(logits[:1, 16:], torch.tensor([[24]]))
    assert same_bytes(made[:1, 1:], kept)  # a unit of 16 that has nothing adds nothing


def test_rows_that_a_processor_has_changed_are_those_that_are_sampled_from():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    logits[:, 7] = -torch.inf
    temperature = torch.tensor([0.7, 0.7, 1.0])
    processed = logits / temperature[:, None]
    processed[1] *= 2
    kept = samplers.keep_changed(samplers.KeptLogits(logits, temperature), processed)
    assert kept.temperature.tolist() == [temperature[0].item(), 1.0, 1.0]
    assert same_bytes(kept.logits, torch.stack([logits[0], processed[1], logits[2]]))


class States:
    """vLLM's temperatures of a batch."""

    def apply_temperature(self, logits, temperature):
        return logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])


class SamplerV2:
    """vLLM's sampler of the V2 runner: a step without a temperature returns what it was given."""

    logprobs_mode = "processed_logprobs"

    def __init__(self, states: States, temperature: torch.Tensor) -> None:
        states.temperature = namespace(gpu=temperature)
        self.sampling_states = states

    def sample(self, logits, expanded_idx_mapping, idx_mapping):
        temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
        if bool(((temperature == 0) | (temperature == 1)).all()):
            return logits.argmax(-1), logits
        logits = logits.clone()
        self.sampling_states.apply_temperature(logits, temperature)
        logits[:, 3] = -torch.inf  # of a filter behind the temperature
        return logits.argmax(-1), logits


@pytest.mark.parametrize("temperatures", [[0.0, 1.0], [0.7, 0.0], [1.0, 1.3]])
def test_steps_of_the_second_runner_have_log_probs_before_the_temperature(temperatures):
    logprob = namespace(compute_token_logprobs=None)
    states, sampler = type("States", (States,), {}), type("Sampler", (SamplerV2,), {})
    module = namespace(
        Sampler=sampler,
        compute_topk_scores=lambda logits, n, tokens: logprob.compute_token_logprobs(
            logits, tokens[:, None]
        ),
    )
    step = samplers.wrap_v2(module, states, (logprob, namespace()))
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    one = sampler(states(), torch.tensor(temperatures))
    tokens, processed = one.sample(logits.clone(), torch.tensor([0, 1]), None)
    made = module.compute_topk_scores(processed, 0, tokens)
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits[:, 3] = -torch.inf
    factors = torch.tensor([t or 1.0 for t in temperatures])
    assert same_bytes(made, samplers.of_tokens(logits, tokens[:, None], factors))
    assert step.kept is step.before is step.temperature is None
