"""Rollout: generation with a key cache, and the log-prob of every token as the engine saw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from .model import PAD, Side

#: (sequence, its tokens so far, log-probs [V] of the next one) -> the next token.
Choose = Callable[[int, Sequence[int], torch.Tensor], int]


@dataclass(frozen=True)
class Batching:
    """How an engine batches: sequences per batch, and columns per prefill step (None: all)."""

    label: str
    batch: int
    chunk: int | None


@dataclass(frozen=True)
class Task:
    """One sequence: its prompt, int64 [p], and its length when finished, prompt included."""

    prompt: torch.Tensor
    length: int


@dataclass(frozen=True)
class Rollout:
    """Per sequence: tokens, int64 [n], and the fp32 log-probs [n - 1] of tokens 1..n-1."""

    tokens: list[torch.Tensor]
    logps: list[torch.Tensor]


def sample(seed: int, count: int) -> Choose:
    """Draws from the model, each of ``count`` sequences with its own generator."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(count)]

    def choose(i: int, so_far: Sequence[int], logps: torch.Tensor) -> int:
        return int(torch.multinomial(logps.exp().cpu(), 1, generator=generators[i]))

    return choose


def replay(tokens: Sequence[torch.Tensor]) -> Choose:
    """Takes the tokens that another rollout chose, so that both score the same ones."""
    return lambda i, so_far, logps: int(tokens[i][len(so_far)])


@torch.no_grad()
def rollout(
    side: Side,
    batching: Batching,
    tasks: Sequence[Task],
    choose: Choose,
) -> Rollout:
    """Runs every task as ``batching`` says.

    A batch is padded on the left to its longest prompt and prefilled through the cache in chunks;
    then all its sequences go one token a step, and a finished one leaves, so the batch shrinks.

    Args:
        side: The model; one sequence may not be longer than its ``max_position_embeddings``.
        batching: How to batch.
        tasks: Prompts and lengths.
        choose: `sample` or `replay`.
    """
    state = _State(side, tasks)
    for first in range(0, len(tasks), batching.batch):
        members = list(range(len(tasks)))[first : first + batching.batch]
        _run_batch(state, batching, members, choose)
    tokens = [torch.tensor(t) for t in state.tokens]
    return Rollout(tokens, [torch.cat(parts).cpu() for parts in state.logps])


class _State:
    """Tokens and log-probs so far, per sequence."""

    def __init__(self, side: Side, tasks: Sequence[Task]) -> None:
        self.side = side
        self.lengths = [task.length for task in tasks]
        self.prompts = [len(task.prompt) for task in tasks]
        self.tokens = [task.prompt.tolist() for task in tasks]
        self.logps: list[list[torch.Tensor]] = [[] for _ in tasks]


def _run_batch(state: _State, batching: Batching, members: list[int], choose: Choose) -> None:
    model = state.side.model
    cache = DynamicCache(config=model.config)
    pads, last = _prefill(state, batching, members, cache)
    while members:
        of_next = state.side.next_logps(last)
        chosen = [choose(i, state.tokens[i], of_next[row]) for row, i in enumerate(members)]
        logps = state.side.logps(last, torch.tensor(chosen, device=last.device))
        for i, token, logp in zip(members, chosen, logps, strict=True):
            state.tokens[i].append(token)
            state.logps[i].append(logp[None])
        stay = [r for r, i in enumerate(members) if len(state.tokens[i]) < state.lengths[i]]
        if len(stay) < len(members):
            members, pads = [members[r] for r in stay], pads[stay]
            cache.batch_select_indices(torch.tensor(stay, dtype=torch.long, device=model.device))
        if members:
            newest = torch.tensor([[state.tokens[i][-1]] for i in members])
            positions = torch.tensor([[len(state.tokens[i]) - 1] for i in members])
            last = _forward(state.side, cache, newest, positions, pads)[:, -1]


def _prefill(
    state: _State, batching: Batching, members: list[int], cache: DynamicCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Left padding per member [B], and the hidden states before the first new token [B, D]."""
    width = max(state.prompts[i] for i in members)
    pads = torch.tensor([width - state.prompts[i] for i in members])
    padded = [[PAD] * (width - state.prompts[i]) + state.tokens[i] for i in members]
    ids = torch.tensor(padded)
    positions = (torch.arange(width) - pads[:, None]).clamp(min=0)
    chunk = batching.chunk or width
    for start in range(0, width, chunk):
        columns = slice(start, start + chunk)
        hidden = _forward(state.side, cache, ids[:, columns], positions[:, columns], pads)
        for row, i in enumerate(members):
            first, end = max(start, int(pads[row])), min(start + chunk, width - 1)
            if first < end:
                next_ids = ids[row, first + 1 : end + 1].to(hidden.device)
                state.logps[i].append(
                    state.side.logps(hidden[row, first - start : end - start], next_ids)
                )
    return pads, hidden[:, -1]


def _forward(
    side: Side,
    cache: DynamicCache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    pads: torch.Tensor,
) -> torch.Tensor:
    """Hidden states [B, T, D] after ids [B, T], which follow what the cache holds."""
    device = side.model.device
    seen = cache.get_seq_length() + ids.shape[1]
    mask = torch.arange(seen) >= pads[:, None]
    return side.hidden(
        input_ids=ids.to(device),
        attention_mask=mask.long().to(device),
        position_ids=positions.to(device),
        past_key_values=cache,
        use_cache=True,
    )
