"""One column of the table: every rollout and micro-batching of a model, compared by bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ShapeError, expected
from .model import Side, Size
from .rollout import Batching, Choose, Rollout, Task, replay, rollout
from .training import Scored, Split, score, windows


@dataclass(frozen=True)
class Tally:
    """Result of a comparison; `+` joins two."""

    numbers: int = 0
    differing: int = 0  # numbers with any bit different
    bytes: int = 0
    differing_bytes: int = 0
    largest: float = 0.0  # |difference|, over the differing numbers

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.numbers + other.numbers,
            self.differing + other.differing,
            self.bytes + other.bytes,
            self.differing_bytes + other.differing_bytes,
            max(self.largest, other.largest),
        )


def tally(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> Tally:
    """Compares two lists of tensors of equal shapes and dtypes, by raw bytes.

    -0 and +0 differ; two NaNs of one bit pattern do not.  ShapeError for unequal shapes or dtypes.
    """
    return sum((_pair(a, b) for a, b in zip(left, right, strict=True)), Tally())


def _pair(a: torch.Tensor, b: torch.Tensor) -> Tally:
    if a.shape != b.shape or a.dtype != b.dtype:
        want = f"{a.dtype} {list(a.shape)}, as the left one"
        raise ShapeError(expected("right", want, f"{b.dtype} {list(b.shape)}"))
    size = a.element_size()
    unequal = _bytes(a, size) != _bytes(b, size)
    differing = unequal.any(dim=1)
    gaps = (a.flatten().double() - b.flatten().double()).abs()[differing]
    largest = gaps.nan_to_num(nan=torch.inf).max().item() if len(gaps) else 0.0
    return Tally(a.numel(), int(differing.sum()), unequal.numel(), int(unequal.sum()), largest)


def _bytes(t: torch.Tensor, size: int) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8).view(-1, size)


#: torch's attention without cuDNN's, which plans anew for every length of the cache: 20 ms a step.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Setup:
    """Everything that decides how much is trained and compared."""

    size: Size = field(default_factory=Size)
    prompts: tuple[int, ...] = (96, 23, 57, 80, 7, 64, 41, 112)
    new: tuple[int, ...] = (40, 50, 30, 45, 25, 48, 27, 37)
    batchings: tuple[Batching, ...] = (
        Batching("8 at once, left-padded", batch=8, chunk=None),
        Batching("3 at once, chunks of 32", batch=3, chunk=32),
        Batching("1 at a time, chunks of 7", batch=1, chunk=7),
    )
    splits: tuple[Split, ...] = (
        Split("8 at once", (8,)),
        Split("2 of 4", (4, 4)),
        Split("4 of 2", (2, 2, 2, 2)),
        Split("8 of 1", (1,) * 8),
        Split("3, 1 and 4", (3, 1, 4)),
    )


@dataclass(frozen=True)
class Column:
    """Results of one model.  Every tally is against the first of ``Setup.splits``."""

    name: str
    rollouts: dict[str, Tally]  # log-probs, by batching
    micro: dict[str, Tally]  # log-probs, by split but the first
    grads: dict[str, Tally]  # weight gradients, by split but the first
    drift: list[torch.Tensor]  # per sequence: log-prob in training - in the first rollout
    rollout_seconds: float
    training_seconds: float

    def total(self) -> Tally:
        """All comparisons in one."""
        parts = (*self.rollouts.values(), *self.micro.values(), *self.grads.values())
        return sum(parts, Tally())


def tasks(setup: Setup, unseen: torch.Tensor, seed: int) -> list[Task]:
    """Prompts from text that training has not seen."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Task(windows(unseen, 1, prompt, generator)[0], prompt + new)
        for prompt, new in zip(setup.prompts, setup.new, strict=True)
    ]


@sdpa_kernel(_SDPA)
def measure(
    side: Side,
    setup: Setup,
    work: Sequence[Task],
    choose: Choose,
    seed: int,
    progress: Callable[[], None],
) -> tuple[Column, list[torch.Tensor]]:
    """Rolls out and trains with one model; also returns the tokens that ``choose`` took.

    ``progress``: called after each rollout and each split.
    """
    begin = time.monotonic()
    rollouts: dict[str, Rollout] = {}
    for batching in setup.batchings:
        rollouts[batching.label] = done = rollout(side, batching, work, choose)
        choose = replay(done.tokens)
        progress()
    middle = time.monotonic()
    advantages = torch.randn(len(work), generator=torch.Generator().manual_seed(seed)).tolist()
    scored: dict[str, Scored] = {}
    for split in setup.splits:
        scored[split.label] = score(side, split, done.tokens, advantages)
        progress()
    end = time.monotonic()
    trained, rolled = scored.pop(setup.splits[0].label), rollouts[setup.batchings[0].label]
    logps, grads = trained.logps, trained.grads.values()
    column = Column(
        side.name,
        {label: tally(logps, one.logps) for label, one in rollouts.items()},
        {label: tally(logps, one.logps) for label, one in scored.items()},
        {label: tally(grads, one.grads.values()) for label, one in scored.items()},
        [training - rollout for training, rollout in zip(logps, rolled.logps, strict=True)],
        rollout_seconds=middle - begin,
        training_seconds=end - middle,
    )
    return column, done.tokens
