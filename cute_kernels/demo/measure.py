"""One column of the table: every rollout and every micro-batching of one model, compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import text
from .compare import Tally, tally
from .model import Side, Size
from .rollout import Choose, Plan, Rollout, Task, replay, rollout
from .score import Scored, Split, score

#: torch's attention without cuDNN's, which plans anew for every length of the cache: 20 ms a step.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Setup:
    """Everything that decides how much is trained and compared."""

    size: Size = field(default_factory=Size)
    prompts: tuple[int, ...] = (96, 23, 57, 80, 7, 64, 41, 112)
    new: tuple[int, ...] = (40, 50, 30, 45, 25, 48, 27, 37)
    plans: tuple[Plan, ...] = (
        Plan("8 at once, left-padded", batch=8, chunk=None),
        Plan("3 at once, chunks of 32", batch=3, chunk=32),
        Plan("1 at a time, chunks of 7", batch=1, chunk=7),
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
    rollouts: dict[str, Tally]  # log-probs, by plan
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
        Task(text.windows(unseen, 1, prompt, generator)[0], prompt + new)
        for prompt, new in zip(setup.prompts, setup.new, strict=True)
    ]


@sdpa_kernel(_SDPA)
def measure(
    side: Side,
    setup: Setup,
    work: Sequence[Task],
    choose: Choose,
    seed: int,
    progress: Callable[[int], None],
) -> tuple[Column, list[torch.Tensor]]:
    """Rolls out and trains with one model; also returns the tokens that ``choose`` took."""
    begin = time.monotonic()
    first = rollout(side, setup.plans[0], work, choose, progress)
    replayed = replay(first.tokens)
    others = [rollout(side, plan, work, replayed, progress) for plan in setup.plans[1:]]
    middle = time.monotonic()
    advantages = torch.randn(len(work), generator=torch.Generator().manual_seed(seed)).tolist()
    scored = [score(side, s, first.tokens, advantages, progress) for s in setup.splits]
    end = time.monotonic()
    column = _compare(side.name, setup, [first, *others], scored, middle - begin, end - middle)
    return column, first.tokens


def _compare(
    name: str,
    setup: Setup,
    rollouts: list[Rollout],
    scored: list[Scored],
    rollout_seconds: float,
    training_seconds: float,
) -> Column:
    trained = scored[0]
    plans = zip(setup.plans, rollouts, strict=True)
    splits = list(zip(setup.splits, scored, strict=True))[1:]
    drifts = zip(trained.logps, rollouts[0].logps, strict=True)
    return Column(
        name,
        {plan.label: tally(trained.logps, done.logps) for plan, done in plans},
        {split.label: tally(trained.logps, done.logps) for split, done in splits},
        {s.label: tally(trained.grads.values(), done.grads.values()) for s, done in splits},
        [training - rolled for training, rolled in drifts],
        rollout_seconds,
        training_seconds,
    )
