"""Log-probs in the samplers of vLLM's two model runners, with the bytes of `ck.linear_logp`.

vLLM makes log-probs of logits that a temperature has divided.  Here the logits from before are
kept with the temperature beside them, and `ck.log_probs` makes those of the tokens that are asked
for.  With ``logprobs_mode="processed_logprobs"`` tokens that a filter took out have -inf in both.

V1 (``vllm.v1.sample.sampler``) makes all log-probs of a row and gathers some: it carries
`KeptLogits` in their place.  Processors that it runs behind the temperature (`argmax_invariant`)
may change logits: of rows that one has changed, log-probs are of the logits as it left them.

V2 (``vllm.v1.worker.gpu.sample``) makes log-probs of given tokens: `Step` has the temperature of
the logits that it hands on.  Its custom processors run before the temperature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from ...errors import ContractError, expected
from ...logp import api as logp
from . import releases

#: The mode whose log-probs are those of the distribution that was sampled from.
PROCESSED = "processed_logprobs"
#: Processors of V1 that only take tokens out.
_FILTERS = ("MinPLogitsProcessor",)
#: V1 takes a lower temperature for greedy sampling.
_GREEDY = 1e-5
#: Function of V2 that makes log-probs of tokens, in each module that has it.
_TOKENS = "compute_token_logprobs"
#: Function that V2's sampler calls for them: from 0.26 on, and in 0.25.
_TOPK = ("compute_topk_scores", "compute_topk_logprobs")


class KeptLogits(NamedTuple):
    """Logits [B, V] in fp32 before the temperature [B] that they are to be divided by."""

    logits: torch.Tensor
    temperature: torch.Tensor | None = None


def of_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """log p of tokens [B, K] under softmax(logits / temperature): fp32 [B, K].

    Args:
        logits: [B, V], before they are divided by a temperature; fp32 for the trainer's bytes.
            Tokens that a filter has taken out have -inf, and a log-prob of -inf.
        tokens: int64 or int32; entries of the vocabulary.
        temperature: fp32 [B], above 0; None: 1.
    """
    temperature = 1.0 if temperature is None else temperature
    columns = [
        logp.log_probs(logits, column, temperature=temperature)[:, None]
        for column in tokens.unbind(1)
    ]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def keep_changed(kept: KeptLogits, processed: torch.Tensor) -> KeptLogits:
    """Replace rows whose quotient is not what is sampled from, by ``processed`` [B, V].

    Their temperature is 1: ``processed`` is divided already.
    """
    logits, temperature = kept
    changed = (logits / temperature[:, None] != processed).any(1)
    rows = torch.where(changed[:, None], processed, logits)
    return KeptLogits(rows, torch.where(changed, 1.0, temperature))


def _filter(logits: torch.Tensor, processed: torch.Tensor) -> torch.Tensor:
    """Take the tokens out of logits that are out of the processed ones, in place."""
    return logits.masked_fill_(processed == -math.inf, -math.inf)


# ---- V1 -----------------------------------------------------------------------------------------


def keep(logits: torch.Tensor) -> KeptLogits:
    """``compute_logprobs``: a copy, since processors write into the logits."""
    return KeptLogits(logits.float() if logits.dtype != torch.float32 else logits.clone())


def gather(kept: KeptLogits, num_logprobs: int, token_ids: torch.Tensor):
    """``gather_logprobs``: of the given tokens, and of the likeliest ones."""
    from vllm.v1.outputs import LogprobsTensors

    best = kept.logits.topk(num_logprobs, dim=-1).indices
    tokens = torch.cat((token_ids[:, None], best), 1)
    of_token = kept.logits.gather(1, token_ids[:, None])
    ranks = (kept.logits >= of_token).sum(-1)
    return LogprobsTensors(
        tokens.to(torch.int32), of_tokens(kept.logits, tokens, kept.temperature), ranks
    )


def wrap_v1(cls: type, filters: type) -> None:
    """Wrap the methods of V1's ``Sampler``; filters: its ``TopKTopPSampler``."""
    init, divide, sample = cls.__init__, cls.apply_temperature, cls.sample
    gather_specific = cls.gather_specific_token_logprobs

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.logprobs_mode == PROCESSED:
            # It returns logits, filtered and divided, where it would return their log_softmax.
            self.topk_topp_sampler = filters("processed_logits", self.use_fp64_gumbel)

    def apply_temperature(self, logits, temp, all_random):
        if self.logprobs_mode == PROCESSED:
            self._cute_kernels_undivided = logits.clone()
        return divide(logits, temp, all_random)

    @functools.wraps(sample)
    def sample_and_keep(self, logits, sampling_metadata, *args, **kwargs):
        sampled, processed = sample(self, logits, sampling_metadata, *args, **kwargs)
        if isinstance(processed, torch.Tensor) and self.logprobs_mode == PROCESSED:
            temperature = sampling_metadata.temperature
            temperature = torch.where(temperature < _GREEDY, 1.0, temperature)
            undivided = vars(self).pop("_cute_kernels_undivided")
            kept = KeptLogits(_filter(undivided, processed), temperature)
            processors = sampling_metadata.logitsprocs.argmax_invariant
            if any(type(processor).__name__ not in _FILTERS for processor in processors):
                kept = keep_changed(kept, processed)
            processed = kept
        return sampled, processed

    @functools.wraps(gather_specific)
    def gather_specific_token_logprobs(self, kept, logprob_token_ids, sampled):
        made = gather_specific(self, kept.logits, logprob_token_ids, sampled)
        if made is None:
            return None
        values = of_tokens(kept.logits, made.logprob_token_ids, kept.temperature)
        return made._replace(logprobs=_filter(values, made.logprobs))

    cls.__init__, cls.apply_temperature, cls.sample = __init__, apply_temperature, sample_and_keep
    cls.gather_specific_token_logprobs = gather_specific_token_logprobs
    cls.compute_logprobs, cls.gather_logprobs = staticmethod(keep), staticmethod(gather)


# ---- V2 -----------------------------------------------------------------------------------------


@dataclass
class Step:
    """The step that is being sampled.

    Attributes:
        is_processed: Whether its log-probs are of the distribution that is sampled from.
        before: Its logits before the temperature divides them; None: nothing divided them.
        kept: What ``sample`` leaves for the log-probs.
        temperature: Of the log-probs that are being made; None: 1.
    """

    is_processed: bool = False
    before: torch.Tensor | None = None
    kept: KeptLogits | None = None
    temperature: torch.Tensor | None = None


def wrap_v2(sampler: ModuleType, states: type, others: Iterable[ModuleType]) -> Step:
    """Wrap the functions of V2's sampler, and return what they share.

    Args:
        sampler: Module with ``Sampler``.
        states: ``SamplingStates``, which divides by the temperature.
        others: Modules that may have `_TOKENS`.
    """
    step = Step()
    divide, sample = states.apply_temperature, sampler.Sampler.sample
    topk_name = next(name for name in _TOPK if hasattr(sampler, name))
    compute = getattr(sampler, topk_name)

    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return of_tokens(logits, token_ids.to(torch.int64), step.temperature)

    @functools.wraps(compute)
    def compute_topk(logits, *args, **kwargs):
        kept, step.kept = step.kept, None
        if kept is None:
            return compute(logits, *args, **kwargs)
        if kept.logits is not logits:
            raise ContractError(expected("logits", "those that were sampled from", "others"))
        step.temperature = kept.temperature
        try:
            return compute(logits, *args, **kwargs)
        finally:
            step.temperature = None

    @functools.wraps(divide)
    def apply_temperature(self, logits, *args, **kwargs):
        if step.is_processed:
            step.before = logits.clone()
        return divide(self, logits, *args, **kwargs)

    @functools.wraps(sample)
    def sample_and_keep(self, logits, expanded_idx_mapping, *args, **kwargs):
        step.is_processed = self.logprobs_mode == PROCESSED
        sampled, processed = sample(self, logits, expanded_idx_mapping, *args, **kwargs)
        before, step.before, step.kept = step.before, None, None
        if step.is_processed:
            # Without requests that need it, vLLM divides nothing: all temperatures are 0 or 1.
            if before is not None:
                processed = _filter(before, processed)
            temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
            step.kept = KeptLogits(processed, torch.where(temperature == 0, 1.0, temperature))
        return sampled, processed

    for module in others:
        if hasattr(module, _TOKENS):
            setattr(module, _TOKENS, compute_token_logprobs)
    setattr(sampler, topk_name, compute_topk)
    states.apply_temperature, sampler.Sampler.sample = apply_temperature, sample_and_keep
    return step


def register() -> None:
    """Wrap both samplers; V2 is where GPUs are."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    wrap_v1(Sampler, TopKTopPSampler)
    if releases.device_type() == "cuda":
        from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, sampler, states

        wrap_v2(sampler, states.SamplingStates, (logprob, prompt_logprob))
