"""Slots of requests in the records of layers with a state.

A request that begins, anew or behind a preemption, gets a free slot, which is its own until it
ends.  Steps find it by the block of vLLM's block table that holds the request's state: the table
may be read on the GPU alone.  At the end of a block the state goes into that block's page, from
which a request with this prefix begins.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ...errors import ContractError, expected
from ...linear_attn.cache import LinearAttentionCache

#: Attribute of the first layer with a state: the `Slots` of its engine.
_SLOTS = "cute_kernels_slots"


class StatefulLayer:
    """A layer with a state.

    cache: Its record, of all slots.  kv_cache: vLLM's pages of it, one tensor for each part.
    """

    cache: LinearAttentionCache
    kv_cache: Sequence[torch.Tensor]


class Boundary(NamedTuple):
    """A slot whose sequence has ``length`` tokens, of whole blocks; pages: its block by group."""

    slot: int
    length: int
    blocks: tuple[int, ...]


class Slots:
    """Slots of one worker.

    Attributes:
        layers: Name -> a layer with a state.
        requests: Slots that requests can have; behind them are those of rows of padding.
        count: All of them.
    """

    def __init__(self, layers: Mapping[str, StatefulLayer], requests: int, count: int) -> None:
        self.layers, self.requests, self.count = layers, requests, count
        self._free = list(range(requests))[::-1]
        self._slot: dict[str, int] = {}
        self._blocks: dict[str, list[list[int]]] = {}
        self._of_block: torch.Tensor | None = None
        self._groups: dict[str, int] = {}
        self._block_size = 0

    @staticmethod
    def of(vllm_config: object) -> Slots | None:
        """Return the slots of an engine; None: its model has no layer with a state."""
        context = vllm_config.compilation_config.static_forward_context
        layers = {n: layer for n, layer in context.items() if isinstance(layer, StatefulLayer)}
        if not layers:
            return None
        attributes = vars(next(iter(layers.values())))
        if _SLOTS not in attributes:
            requests = vllm_config.scheduler_config.max_num_seqs
            attributes[_SLOTS] = Slots(layers, requests, requests + spare_slots(vllm_config))
        return attributes[_SLOTS]

    def bind(self, kv_cache_config: object, block_size: int | None) -> None:
        """Learn the groups of vLLM's cache.

        block_size: Tokens behind which a state is kept for the prefix cache; None: there is none.
        """
        first = next(iter(self.layers.values())).cache[0].state
        size = kv_cache_config.num_blocks
        self._of_block = torch.full((size,), -1, dtype=torch.int64, device=first.device)
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self._groups = {name: i for i, group in groups for name in group.layer_names}
        self._block_size = block_size or 0

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Slots of the requests [N] that have their states in blocks; of padding, spare ones."""
        row = torch.arange(len(blocks), device=blocks.device)
        if self._of_block is None:  # a graph is captured before any request
            return row
        spare = self.requests + row % (self.count - self.requests)
        slots = self._of_block[blocks.clamp(min=0).long()]
        return torch.where((blocks > 0) & (slots >= 0), slots, spare)

    # ---- steps ----------------------------------------------------------------------------------

    def begin(self, step: object) -> None:
        """Take over what a step's ``SchedulerOutput`` says of requests that begin or end."""
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self._end(name)
        begun: list[Boundary] = []
        moved: dict[int, int] = {}

        def start(name: str, blocks: Sequence[Sequence[int]], length: int) -> None:
            self._end(name)
            slot = self._slot[name] = self._free.pop()
            self._blocks[name] = [list(group) for group in blocks]
            moved.update((block, slot) for group in blocks for block in group)
            begun.append(Boundary(slot, length, self._pages(name, length)))

        for new in step.scheduled_new_reqs:
            start(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        requests = zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        )
        for name, blocks, length in requests:
            if name in cached.resumed_req_ids:
                start(name, blocks, length)
            elif blocks is not None:
                slot = self._slot[name]
                for group, more in zip(self._blocks[name], blocks, strict=True):
                    group += more
                    moved.update((block, slot) for block in more)
        if moved:
            device = self._of_block.device
            index, slots = torch.tensor([*moved.items()], device=device).unbind(1)
            self._of_block[index] = slots
        if begun:
            self._load(begun)

    def end(self, step: object) -> None:
        """Keep the states of sequences that are at the end of a block behind a step."""
        if not self._block_size:
            return
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        lengths = {name: computed[name] + n for name, n in step.num_scheduled_tokens.items()}
        for name, length in lengths.items():
            self._check_inside(name, computed[name] // self._block_size, length)
        ends = [
            Boundary(self._slot[name], length, self._pages(name, length))
            for name, length in lengths.items()
            if length % self._block_size == 0
        ]
        if not ends:
            return
        for layer, slots, pages in self._each(ends):
            for page, part in zip(layer.kv_cache, layer.cache[0].boundary(slots), strict=True):
                page[pages] = part.to(page.dtype).view(len(part), *page.shape[1:])

    def _load(self, begun: list[Boundary]) -> None:
        """Begin sequences: from nothing, or from the states at their lengths."""
        device = self._of_block.device
        slots = torch.tensor([b.slot for b in begun], device=device)
        for layer in self.layers.values():
            layer.cache.reset(slots)
        resumed = [b for b in begun if b.length]
        if not resumed:
            return
        lengths = torch.tensor([b.length for b in resumed], device=device)
        for layer, slots, pages in self._each(resumed):
            tail, state = (page[pages] for page in layer.kv_cache)
            layer.cache[0].resume(slots, lengths, tail, state)

    def _each(self, boundaries: list[Boundary]):
        """Yield each layer, and slots and pages of it as tensors."""
        device = self._of_block.device
        slots = torch.tensor([b.slot for b in boundaries], device=device)
        by_group = torch.tensor([b.blocks for b in boundaries], device=device).unbind(1)
        for name, layer in self.layers.items():
            yield layer, slots, by_group[self._groups[name]]

    def _pages(self, name: str, length: int) -> tuple[int, ...]:
        """Block of each group whose last token is that at ``length``; none at a length of 0."""
        if not length:
            return ()
        if not self._block_size or length % self._block_size:
            want = f"a prefix of whole blocks of {self._block_size}"
            raise ContractError(expected("enable_prefix_caching", want, f"{length} tokens"))
        last = length // self._block_size - 1
        return tuple(group[last] if last < len(group) else 0 for group in self._blocks[name])

    def _check_inside(self, name: str, block: int, length: int) -> None:
        """Refuse a step behind which vLLM would cache a block that ends inside it, from a block on.

        Raises:
            ContractError: the scheduler does not end steps with such blocks.
        """
        inside = slice(block, (length - 1) // self._block_size)
        groups = {self._groups[layer] for layer in self.layers}
        if any(any(self._blocks[name][group][inside]) for group in groups):
            want = f"steps that end with blocks of {self._block_size}"
            raise ContractError(expected("mamba_cache_mode", want, f"one to {length} tokens"))

    def _end(self, name: str) -> None:
        self._blocks.pop(name, None)
        slot = self._slot.pop(name, None)
        if slot is not None:
            self._free.append(slot)


def spare_slots(vllm_config: object) -> int:
    """Slots for rows that a CUDA graph has beyond a batch: the widest step of its sizes."""
    sizes = sorted(vllm_config.compilation_config.cudagraph_capture_sizes or ())
    return max((after - before for before, after in pairwise([0, *sizes])), default=1)


def watch(worker: type) -> None:
    """Wrap ``execute_model`` of vLLM's worker, once: slots before a step, pages behind it."""
    execute = worker.execute_model
    if hasattr(execute, _SLOTS):
        return

    @functools.wraps(execute)
    def execute_model(self, scheduler_output, *args, **kwargs):
        if not hasattr(self, _SLOTS):  # the first step
            setattr(self, _SLOTS, Slots.of(self.vllm_config))
        slots = getattr(self, _SLOTS)
        if slots is None:
            return execute(self, scheduler_output, *args, **kwargs)
        if slots._of_block is None:
            cache = self.vllm_config.cache_config
            size = cache.mamba_block_size if cache.enable_prefix_caching else None
            slots.bind(self.model_runner.kv_cache_config, size)
        with torch.inference_mode():
            slots.begin(scheduler_output)
            out = execute(self, scheduler_output, *args, **kwargs)
            slots.end(scheduler_output)
        return out

    setattr(execute_model, _SLOTS, True)
    worker.execute_model = execute_model
