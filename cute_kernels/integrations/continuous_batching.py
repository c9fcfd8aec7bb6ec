"""transformers' continuous batching (``generate_batch``) over ``ck.paged_attention``.

    from cute_kernels.integrations import continuous_batching
    continuous_batching.register()
    ck.patch(model, strict=True)
    outputs = model.generate_batch(prompts, ...)

A patched model attends under the name "cute_kernels"; transformers' manager knows the names of its
own attentions only, and refuses others.  `register` makes it take that name, and keeps it from
making masks, which pages need not.  Each forward pass then writes the keys of its tokens to
transformers' pages and attends in place: decode rows and chunks of prefill in one call, each with
the bytes that it has in training.  With ``return_logprobs`` log p of each token is ``ck.log_probs``
of the logits that it was drawn from, over the temperature, before ``top_p`` and other filters.

What is wrapped is not a public interface: a version of another form is refused.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
from collections.abc import Callable, Mapping

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, expected, one_of
from ..logp import api as logp
from ..runtime.optional import wrap
from ..sparse_attn.config import PAGE_SIZES
from ..sparse_attn.paged import api as paged

#: Name under which a patched model attends, and its form of old: ``paged|`` is transformers' mark.
NAMES = ("cute_kernels", "paged|cute_kernels")
#: The version that the tests ran with.
TESTED = "5.23.0"

_FULL = "full_attention"
_MODULES = "transformers.generation.continuous_batching"
#: Where pages are read and written from; 5.17 has none.
_ALLOCATORS = "cache_allocators"
#: The batch that a thread is in: a `_Batch`, or None.
_inside = threading.local()


def register() -> None:
    """Make transformers' continuous batching take a patched model; a second call changes nothing.

    Raises:
        ImportError: transformers is not installed, or has no continuous batching.
        ArgumentTypeError: a version whose methods have another form.
    """
    classes, version = [], importlib.metadata.version("transformers")
    for (module_name, class_name, method_name), function in _WRAPPED.items():
        names = inspect.getfullargspec(function).args[2:]  # without the method and self
        module = importlib.import_module(f"{_MODULES}.{module_name}")
        cls = getattr(module, class_name, None)
        method = getattr(cls, method_name, None)
        parameters = list(inspect.signature(method).parameters)[1:] if callable(method) else []
        if parameters[: len(names)] != names:
            want = f"a version like {TESTED}, with {class_name}.{method_name}({', '.join(names)})"
            raise ArgumentTypeError(expected("transformers", want, version))
        classes.append(cls)
    if importlib.util.find_spec(f"{_MODULES}.{_ALLOCATORS}") is None:
        want = f"a version like {TESTED}, with a {_ALLOCATORS} for each kind of attention"
        raise ArgumentTypeError(expected("transformers", want, version))
    for cls, ((*_, name), function) in zip(classes, _WRAPPED.items(), strict=True):
        if not hasattr(getattr(cls, name), "_cute_kernels"):
            wrap(cls, name, function)
            getattr(cls, name)._cute_kernels = True


def makes_masks() -> bool:
    """Whether this thread's forward pass wants masks: not inside a batch of the manager."""
    return getattr(_inside, "batch", None) is None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Mapping[str, object],
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attend from pages, after the keys and values of the batch's tokens are written there.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D]: tokens of all sequences.
        batch: What the manager gives to a forward pass: ``cache``, ``cu_seq_lens_q``,
            ``cu_seq_lens_k``, ``max_length_k``, ``read_index``, ``write_index``, ``block_table``,
            ``s_aux``.
        scaling, softcap: Of the scores; softcap 0: none.

    Returns:
        [1, T, Hq, D].

    Raises:
        ArgumentValueError: a layer of sliding attention, whose cache is a ring; pages of another
            size than `PAGE_SIZES`.  Others: as ``ck.paged_attention``.
    """
    cache = batch["cache"]
    allocator = cache.layer_to_allocator[module.layer_idx]
    kind, page_size = allocator.layer_type, allocator.tokens_per_page
    if kind != _FULL:
        want = f"{_FULL}, as the cache of others is a ring"
        raise ArgumentValueError(expected(f"layer {module.layer_idx}", want, kind))
    if page_size not in PAGE_SIZES:
        raise ArgumentValueError(one_of("page_size", PAGE_SIZES, page_size))
    starts, keys = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][kind].to(torch.int32)
    k_pages, v_pages = allocator.get_cache_for_block_table(module.layer_idx)
    new_keys, new_values = (t[0].transpose(0, 1) for t in (key, value))
    lengths = keys.diff()
    tables = batch.get("block_table")
    if tables is not None:
        table = tables[allocator.index]
        slots = _last_slots(table, lengths, starts, page_size, new_keys.shape[0])
        paged.write_kv_cache(new_keys, new_values, k_pages, v_pages, slots)
    else:
        read, write = (batch[name][allocator.index] for name in ("read_index", "write_index"))
        # Bytes are copied; without an index to read, nothing is read back.
        allocator.update(new_keys, new_values, module.layer_idx, read[:0], write)
        places, first = (read, keys) if read.numel() else (write, starts)
        table = _pages(places, first, page_size, batch["max_length_k"][kind])
    out = paged.paged_attention(
        query[0].transpose(0, 1),
        k_pages,
        v_pages,
        table,
        lengths,
        starts.to(torch.int32),
        scale=scaling,
        softcap=softcap,
        sinks=batch.get("s_aux"),
    )
    return out[None]


def _pages(places: torch.Tensor, first: torch.Tensor, page_size: int, longest: int) -> torch.Tensor:
    """Return the block table, int32 [N, P], of sequences whose tokens lie at ``places``.

    first: where each sequence begins in ``places``.  A sequence's tokens fill its pages from their
    first rows on.
    """
    count = max(1, -(-longest // page_size))
    steps = torch.arange(0, count * page_size, page_size, device=places.device)
    index = (first[:-1, None].long() + steps).clamp(max=places.numel() - 1)
    return (places[index] // page_size).to(torch.int32)


def _last_slots(
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    page_size: int,
    tokens: int,
) -> torch.Tensor:
    """Return int64 [T]: the slot of each sequence's last key; -1 of tokens behind the last."""
    last = (lengths.long() - 1).clamp(min=0)
    pages = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    slots = pages * page_size + last % page_size
    # Sequences of a padded batch have no query.
    slots = torch.where(starts.diff() > 0, slots, -1)
    padding = slots.new_full((max(0, tokens - len(slots)),), -1)
    return torch.cat([slots, padding])[:tokens]


# ---- wrapped methods ----------------------------------------------------------------------------


def _keep_name(method: Callable, self: object, model: torch.nn.Module, *args, **kwargs):
    if getattr(model.config, "_attn_implementation", None) in NAMES:
        return None
    return method(self, model, *args, **kwargs)


class _Batch:
    """Model of one forward pass, which keeps the logits that tokens are drawn from."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.logits: torch.Tensor | None = None

    def __call__(self, **inputs: object) -> object:
        output = self.model(**inputs)
        logits = output.logits
        if "logits_to_keep" not in inputs:
            logits = logits[:, inputs["logits_indices"]]
        self.logits = logits[0]
        return output

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)


def _without_masks(method: Callable, self: object, model: torch.nn.Module, batch_data: object):
    if getattr(model.config, "_attn_implementation", None) not in NAMES:
        return method(self, model, batch_data)
    compiled = self._compiled_varlen is not None or self._compiled_decode is not None
    if self.return_logprobs and compiled:
        want = "False, as a compiled step does not keep its logits"
        raise ArgumentValueError(expected("return_logprobs", want, True))
    _inside.batch = _Batch(model)
    try:
        return method(self, model if compiled else _inside.batch, batch_data)
    finally:
        _inside.batch = None


def _score(method: Callable, self: object, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
    method(self, scores, output_ids)
    batch = getattr(_inside, "batch", None)
    if batch is None or not self.return_logprobs:
        return
    tokens = output_ids[0, : scores.shape[1]]
    drawn = logp.log_probs(batch.logits, tokens, temperature=_temperature(self.logit_processor))
    # The manager keeps log p in the storage of tokens.
    output_ids[1, : scores.shape[1]].copy_(drawn.view(torch.int32))


#: Wrapped methods: (module, class, method) -> our function; the method must have its parameters.
_WRAPPED = {
    ("continuous_api", "ContinuousBatchingManager", "switch_to_cb_friendly_attn"): _keep_name,
    ("model_runner", "ModelRunner", "compute_batch"): _without_masks,
    ("model_runner", "ModelRunner", "_sample"): _score,
}


def _temperature(processors: object) -> float:
    """Return the temperature of a list of logits processors; 1: none scales.

    Raises:
        ArgumentValueError: it is one of each request.
    """
    for processor in processors.logits_processor:
        name = type(processor).__name__
        if name == "TemperatureLogitsWarper":
            return float(processor.temperature)
        if "Temperature" in name:
            want = "False with return_logprobs, as log p has one temperature"
            raise ArgumentValueError(expected("per_request_processors", want, True))
    return 1.0
