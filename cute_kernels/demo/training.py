"""Text that ships with the package, training on it, and scores in micro-batches with gradients."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..integrations.main_grad import MainGradAdamW
from . import model as models

# ---- text ---------------------------------------------------------------------------------------

_BLOCK = 1024
_HELD_EVERY = 16
_PACKAGES = ("cute_kernels", "cute_kernels.schedulers")


def corpus() -> bytes:
    """Every Python file of the package in name order."""
    files = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations if spec else ():
            for path in Path(folder).rglob("*.py"):
                files[path.resolve()] = (package, path.relative_to(folder).as_posix())
    texts = [path.read_bytes() for path in sorted(files, key=files.__getitem__)]
    return b"\n".join(texts).replace(bytes([models.PAD]), b"")


def split(text: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts text into blocks of 1024 bytes: (training, held out), every 16th block held out."""
    blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
    unseen = [block for i, block in enumerate(blocks) if i % _HELD_EVERY == _HELD_EVERY - 1]
    seen = [block for i, block in enumerate(blocks) if i % _HELD_EVERY != _HELD_EVERY - 1]
    return encode(b"".join(seen)), encode(b"".join(unseen))


def encode(text: bytes) -> torch.Tensor:
    """Bytes to int64 token ids, [len(text)]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def decode(tokens: torch.Tensor) -> str:
    """Token ids to text; bytes that are not UTF-8 show as replacement characters."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def windows(tokens: torch.Tensor, count: int, length: int, generator: torch.Generator):
    """``count`` windows of ``length`` tokens at random places, [count, length]."""
    starts = torch.randint(len(tokens) - length + 1, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


# ---- training -----------------------------------------------------------------------------------

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
    options = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    optimizer = MainGradAdamW(side.model.parameters(), max_norm=_CLIP, lr=_RATE, **options)
    length = side.model.config.max_position_embeddings
    losses: list[float] = []
    begin, ready = time.monotonic(), None
    done = 0.0
    while done < 1.0:
        batch = windows(tokens, BATCH, length, generator).to(side.model.device)
        losses.append(_backward(side, batch))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * _schedule(done)
        optimizer.step()
        ready = ready or time.monotonic()
        elapsed = time.monotonic() - ready
        done = len(losses) / steps if steps is not None else elapsed / seconds
        progress(min(done, 1.0), f"step {len(losses)}, loss {losses[-1]:.2f}")
    for weight in optimizer.weights:
        del weight.main_grad
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


# ---- scores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """One way to cut the batch: sequences per micro-batch, in order."""

    label: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """Per sequence the log-probs [n - 1] of tokens 1..n-1; per weight the fp32 gradient."""

    logps: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


def score(
    side: models.Side,
    split: Split,
    sequences: Sequence[torch.Tensor],
    advantages: Sequence[float],
) -> Scored:
    """Forward and backward of a policy-gradient loss, -Σ advantage · log-prob / tokens.

    Each micro-batch is padded on the right to its longest sequence, rounded up to the
    side's granularity.  Our layers add into an fp32 main_grad inside the product.  Torch's give a
    bf16 gradient per micro-batch, which is added to an fp32 sum, as trainers with fp32 accumulation
    do.

    Args:
        side: The model.
        split: Its sizes add up to the number of sequences.
        sequences: int64 tokens, one tensor each.
        advantages: One number per sequence.
    """
    weights = models.weights(side.model)
    grads = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
    models.set_main_grads(side.model, grads)
    total = sum(len(tokens) - 1 for tokens in sequences)
    logps: list[torch.Tensor] = []
    first = 0
    for size in split.sizes:
        micro = slice(first, first + size)
        scored = _logps(side, sequences[micro])
        weighted = [a * lp.sum() for a, lp in zip(advantages[micro], scored, strict=True)]
        (-torch.stack(weighted).sum() / total).backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                grads[name] += weight.grad.float()
        side.model.zero_grad(set_to_none=True)
        logps += [lp.detach().cpu() for lp in scored]
        first += size
    models.set_main_grads(side.model, None)
    return Scored(logps, {name: grad.cpu() for name, grad in grads.items()})


def _logps(side: models.Side, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs [n - 1] of each sequence from one forward pass over all of them."""
    device = side.model.device
    longest = max(len(tokens) for tokens in sequences)
    width = -(-longest // side.granularity) * side.granularity
    ids = torch.full((len(sequences), width), models.PAD)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = tokens
    columns = torch.arange(width)
    mask = columns < torch.tensor([[len(tokens)] for tokens in sequences])
    hidden = side.hidden(
        input_ids=ids.to(device),
        attention_mask=mask.long().to(device),
        position_ids=columns[None].to(device),
    )
    next_ids = torch.where(mask.roll(-1, dims=1), ids.roll(-1, dims=1), models.IGNORED)
    next_ids[:, -1] = models.IGNORED
    picked = side.logps(hidden, next_ids.to(device))
    return [picked[row, : len(tokens) - 1] for row, tokens in enumerate(sequences)]
