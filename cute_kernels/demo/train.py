"""Trains our model for a while: bf16 weights, fp32 masters, gradients summed in main_grad."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import cute_kernels as ck

from . import model as models
from . import text

BATCH = 2
_RATE = 3e-3
_WARM_UP = 0.1  # of the budget
_CLIP = 1.0


@dataclass(frozen=True)
class Trained:
    """Results of training.  Losses are nats per byte: the first step's, the last tenth's mean."""

    steps: int
    tokens: int
    seconds: float
    first_loss: float
    last_loss: float


class Masters:
    """fp32 copies of the bf16 weights, with AdamW on them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = dict(model.named_parameters())
        self.masters = {
            name: w.detach().float().requires_grad_() for name, w in self.weights.items()
        }
        self.main_grads = {
            name: torch.zeros_like(self.masters[name]) for name in models.weights(model)
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )

    def step(self, rate: float) -> None:
        """One AdamW step at ``rate``, then the rounded masters go back into the model."""
        for name, master in self.masters.items():
            weight = self.weights[name]
            master.grad = self.main_grads[name] if name in self.main_grads else weight.grad.float()
            weight.grad = None
        ck.clip_grad_norm_(self.masters.values(), _CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for grad in self.main_grads.values():
            grad.zero_()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)


def train(
    side: models.Side,
    tokens: torch.Tensor,
    *,
    seconds: float,
    steps: int | None,
    seed: int,
    progress: Callable[[float, str], None],
) -> Trained:
    """Next-byte training on random windows of ``tokens``, in place.

    Args:
        side: Our column.
        tokens: int64 [n], longer than the model's longest sequence.
        seconds: The time budget, behind the first step, in which kernels are compiled; not read if
            ``steps`` is given.
        steps: The number of optimizer steps, or None to follow the clock.
        seed: Draws the windows.
        progress: Called with (fraction done, words) after each step.
    """
    generator = torch.Generator().manual_seed(seed)
    masters = Masters(side.model)
    models.set_main_grads(side.model, masters.main_grads)
    length = side.model.config.max_position_embeddings
    losses: list[float] = []
    begin, ready = time.monotonic(), None
    done = 0.0
    while done < 1.0:
        batch = text.windows(tokens, BATCH, length, generator).to(side.model.device)
        losses.append(_backward(side, batch))
        masters.step(_RATE * _schedule(done))
        ready = ready or time.monotonic()
        elapsed = time.monotonic() - ready
        done = len(losses) / steps if steps is not None else elapsed / seconds
        progress(min(done, 1.0), f"step {len(losses)}, loss {losses[-1]:.2f}")
    models.set_main_grads(side.model, None)
    seen = len(losses) * BATCH * length
    tail = losses[-max(1, len(losses) // 10) :]
    return Trained(len(losses), seen, time.monotonic() - begin, losses[0], sum(tail) / len(tail))


def _backward(side: models.Side, batch: torch.Tensor) -> float:
    """Mean loss in nats per byte of one batch, its gradients added to those there are."""
    positions = torch.arange(batch.shape[1], device=batch.device)[None]
    hidden = side.hidden(input_ids=batch, position_ids=positions)
    loss = -side.logps(hidden[:, :-1], batch[:, 1:]).mean()
    loss.backward()
    return loss.item()


def _schedule(done: float) -> float:
    """Warm up, then half a cosine down to a tenth."""
    if done < _WARM_UP:
        return (done + 0.01) / (_WARM_UP + 0.01)
    return 0.55 + 0.45 * math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))
