"""Log-probs in the sampler of vLLM's V2 model runner (``vllm.v1.worker.gpu.sample``).

``compute_token_logprobs`` makes log-probs of given tokens: ours makes them by `ck.log_probs`.  With
``logprobs_mode="processed_logprobs"`` the sampler hands it logits that a temperature has divided;
here it gets the logits from before, and the temperature beside them.  Custom logits processors run
before the temperature, and so are in both.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ...errors import ContractError, expected
from . import log_probs, releases

PROCESSED = "processed_logprobs"
#: Function that makes log-probs of tokens, in each module that has it.
_TOKENS = "compute_token_logprobs"
#: Function that the sampler calls for them: from 0.26 on, and in 0.25.
_TOPK = ("compute_topk_scores", "compute_topk_logprobs")


class Undivided(NamedTuple):
    """Logits [B, V] of a step as they were before the temperature [B] divided them."""

    logits: torch.Tensor
    temperature: torch.Tensor


class Step:
    """The step that is being sampled: what `sample` leaves for ``compute_topk_scores``."""

    def __init__(self) -> None:
        self.records = False
        self.before: torch.Tensor | None = None
        self.undivided: Undivided | None = None
        self.temperature: torch.Tensor | None = None


def _token_logprobs(step: Step):
    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return log_probs.of_tokens(logits, token_ids.to(torch.int64), step.temperature)

    return compute_token_logprobs


def _wrap_topk(compute, step: Step):
    @functools.wraps(compute)
    def compute_topk_scores(logits, *args, **kwargs):
        undivided, step.undivided = step.undivided, None
        if undivided is None:
            return compute(logits, *args, **kwargs)
        if undivided.logits is not logits:
            raise ContractError(expected("logits", "those that were sampled from", "others"))
        step.temperature = undivided.temperature
        try:
            return compute(logits, *args, **kwargs)
        finally:
            step.temperature = None

    return compute_topk_scores


def _wrap_temperature(divide, step: Step):
    @functools.wraps(divide)
    def apply_temperature(self, logits, *args, **kwargs):
        if step.records:
            step.before = logits.clone()
        return divide(self, logits, *args, **kwargs)

    return apply_temperature


def _wrap_sample(sample, step: Step):
    @functools.wraps(sample)
    def wrapped(self, logits, expanded_idx_mapping, *args, **kwargs):
        step.records = self.logprobs_mode == PROCESSED
        sampled, processed = sample(self, logits, expanded_idx_mapping, *args, **kwargs)
        before, step.before, step.undivided = step.before, None, None
        if step.records:
            # Without requests that need it, vLLM divides nothing: all temperatures are 0 or 1.
            filtered = processed
            if before is not None:
                filtered = before.masked_fill_(processed == -math.inf, -math.inf)
            temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
            temperature = torch.where(temperature == 0, 1.0, temperature)
            step.undivided = Undivided(filtered, temperature)
            processed = filtered
        return sampled, processed

    return wrapped


def register() -> None:
    """Put these functions in the place of the sampler's, where there is a V2 model runner."""
    if releases.device_type() != "cuda":
        return
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, sampler, states

    step = Step()
    token_logprobs = _token_logprobs(step)
    for module in (logprob, prompt_logprob):
        if hasattr(module, _TOKENS):
            setattr(module, _TOKENS, token_logprobs)
    name = next(name for name in _TOPK if hasattr(sampler, name))
    setattr(sampler, name, _wrap_topk(getattr(sampler, name), step))
    sampler.Sampler.sample = _wrap_sample(sampler.Sampler.sample, step)
    states.SamplingStates.apply_temperature = _wrap_temperature(
        states.SamplingStates.apply_temperature, step
    )
