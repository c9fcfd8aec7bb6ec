"""Log-probs in the sampler of vLLM's V1 model runner (``vllm.v1.sample.sampler``).

vLLM makes all log-probs of a row and gathers some.  Here what it carries in their place are the
logits (`KeptLogits`), and `gather` makes log-probs of the tokens that are asked for.

Processors that vLLM runs behind the temperature (`argmax_invariant`) take tokens out, or change
logits: of rows that one has changed, log-probs are of the logits as it left them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from . import log_probs

#: The mode whose log-probs are those of the distribution that was sampled from.
PROCESSED = "processed_logprobs"
#: Processors of vLLM that only take tokens out.
_FILTERS = ("MinPLogitsProcessor",)
#: vLLM takes a lower temperature for greedy sampling.
_GREEDY = 1e-5


class KeptLogits(NamedTuple):
    """Logits [B, V] in fp32 before the temperature [B] that they are to be divided by."""

    logits: torch.Tensor
    temperature: torch.Tensor | None = None


def keep(logits: torch.Tensor) -> KeptLogits:
    """``compute_logprobs``: a copy, since processors write into the logits."""
    return KeptLogits(logits.float() if logits.dtype != torch.float32 else logits.clone())


def gather(kept: KeptLogits, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """``gather_logprobs``: of the given tokens, and of the likeliest ones."""
    best = kept.logits.topk(num_logprobs, dim=-1).indices
    tokens = torch.cat((token_ids[:, None], best), 1)
    made = log_probs.of_tokens(kept.logits, tokens, kept.temperature)
    of_token = kept.logits.gather(1, token_ids[:, None])
    ranks = (kept.logits >= of_token).sum(-1)
    return LogprobsTensors(tokens.to(torch.int32), made, ranks)


def _wrap_init(init):
    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.logprobs_mode == PROCESSED:
            # It returns logits, filtered and divided, where it would return their log_softmax.
            self.topk_topp_sampler = TopKTopPSampler("processed_logits", self.use_fp64_gumbel)

    return __init__


def _wrap_temperature(divide):
    def apply_temperature(self, logits, temp, all_random):
        if self.logprobs_mode == PROCESSED:
            self._cute_kernels_undivided = logits.clone()
        return divide(logits, temp, all_random)

    return apply_temperature


def _wrap_sample(sample):
    @functools.wraps(sample)
    def wrapped(self, logits, sampling_metadata, *args, **kwargs):
        sampled, processed = sample(self, logits, sampling_metadata, *args, **kwargs)
        if isinstance(processed, torch.Tensor) and self.logprobs_mode == PROCESSED:
            undivided = vars(self).pop("_cute_kernels_undivided")
            temperature = sampling_metadata.temperature
            temperature = torch.where(temperature < _GREEDY, 1.0, temperature)
            filtered = undivided.masked_fill_(processed == -math.inf, -math.inf)
            processors = sampling_metadata.logitsprocs.argmax_invariant
            if any(type(processor).__name__ not in _FILTERS for processor in processors):
                filtered, temperature = log_probs.keep_changed(filtered, temperature, processed)
            processed = KeptLogits(filtered, temperature)
        return sampled, processed

    return wrapped


def _wrap_specific(gather_specific):
    @functools.wraps(gather_specific)
    def wrapped(self, kept, logprob_token_ids, sampled):
        made = gather_specific(self, kept.logits, logprob_token_ids, sampled)
        if made is None:
            return None
        values = log_probs.of_tokens(kept.logits, made.logprob_token_ids, kept.temperature)
        unused = made.logprobs == -math.inf
        return made._replace(logprobs=values.masked_fill(unused, -math.inf))

    return wrapped


def register() -> None:
    """Put these functions in the place of the sampler's."""
    Sampler.__init__ = _wrap_init(Sampler.__init__)
    Sampler.sample = _wrap_sample(Sampler.sample)
    Sampler.apply_temperature = _wrap_temperature(Sampler.apply_temperature)
    Sampler.gather_specific_token_logprobs = _wrap_specific(Sampler.gather_specific_token_logprobs)
    Sampler.compute_logprobs = staticmethod(keep)
    Sampler.gather_logprobs = staticmethod(gather)
