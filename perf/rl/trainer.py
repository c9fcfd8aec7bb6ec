"""The trainer of one system: python -m perf.rl.trainer WORK SYSTEM

It scores what the engine of that system drew, counts the log-probs whose bytes differ, and times
updates: forward, backward, clipping and AdamW.  All sequences of a step have one length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .size import Size, results, say

LEARNING_RATE, CLIP = 1e-6, 0.2


class Native:
    """transformers on torch: SDPA, logits of the completion's positions, their log_softmax."""

    def __init__(self, size: Size, work: Path, device: str) -> None:
        import transformers

        self.size = size
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            work / "model", dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(device)
        self.clip_gradients = torch.nn.utils.clip_grad_norm_

    def hidden(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states that predict the completion's tokens, and those tokens."""
        states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return states[:, self.size.prompt - 1 : -1], ids[:, self.size.prompt :]

    def logps(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 log-probs of the completion's tokens."""
        states, targets = self.hidden(ids)
        logits = self.model.lm_head(states).float().flatten(0, 1) / self.size.temperature
        losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return -losses.view(targets.shape)

    def loss(
        self, ids: torch.Tensor, gains: torch.Tensor, old: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Part of the clipped policy loss of a step, and the log-probs."""
        logps = self.logps(ids)
        ratio = (logps - old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * gains, clipped * gains).sum() / self.size.tokens
        return loss, logps.detach()


class Ours(Native):
    """Score and train the same model, patched; log-probs and loss by ops of ours."""

    def __init__(self, size: Size, work: Path, device: str) -> None:
        import cute_kernels as ck

        super().__init__(size, work, device)
        ck.patch(self.model, strict=True, order=size.order)
        self.clip_gradients = ck.clip_grad_norm_

    def logps(self, ids: torch.Tensor) -> torch.Tensor:
        import cute_kernels as ck

        states, targets = self.hidden(ids)
        weight = self.model.lm_head.weight
        options = {"temperature": self.size.temperature, "order": self.size.order}
        return ck.linear_logp(states, weight, targets, **options)

    def loss(
        self, ids: torch.Tensor, gains: torch.Tensor, old: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import cute_kernels as ck

        states, targets = self.hidden(ids)
        out = ck.linear_policy_loss(
            states,
            self.model.lm_head.weight,
            targets,
            loss="ppo",
            advantages=gains,
            old_logp=old,
            divisor=self.size.tokens,
            clip_low=CLIP,
            clip_high=CLIP,
            temperature=self.size.temperature,
            order=self.size.order,
        )
        return out.loss, out.logp.detach()


TRAINERS = {"native": Native, "native_invariant": Native, "ours": Ours}


class Run:
    """A trainer and the steps that its engine drew."""

    def __init__(self, work: Path, system: str, device: str) -> None:
        self.size, self.device = Size.load(work), device
        self.trainer = TRAINERS[system](self.size, work, device)
        self.model = self.trainer.model.train()
        self.steps = [
            {name: t.to(device) for name, t in torch.load(work / f"{system}_{step}.pt").items()}
            for step in range(self.size.steps)
        ]
        draw = torch.Generator().manual_seed(0)
        rewards = torch.randn(self.size.prompts, self.size.samples, generator=draw)
        self.gains = (rewards - rewards.mean(dim=1, keepdim=True)).view(-1, 1).to(device)
        parameters, fused = list(self.model.parameters()), device == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)

    def parts(self) -> list[slice]:
        """Rows of each micro-batch."""
        size = self.size.micro_batch
        return [slice(first, first + size) for first in range(0, self.size.rows, size)]

    @torch.no_grad()
    def score(self, step: int) -> torch.Tensor:
        """Log-probs of a step, without gradients."""
        ids = self.steps[step]["ids"]
        return torch.cat([self.trainer.logps(ids[rows]) for rows in self.parts()])

    def update(self, step: int) -> torch.Tensor:
        """One step of AdamW; its log-probs before that."""
        ids, old, logps = self.steps[step]["ids"], self.steps[step]["logps"], []
        for rows in self.parts():
            loss, scores = self.trainer.loss(ids[rows], self.gains[rows], old[rows])
            loss.backward()
            logps.append(scores)
        self.trainer.clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat(logps)

    def timed(self, call: Callable[[int], torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
        """Seconds and log-probs of each step."""
        seconds, logps = [], []
        for step in range(self.size.steps):
            self.finish()
            began = time.perf_counter()
            logps.append(call(step))
            self.finish()
            seconds.append(time.perf_counter() - began)
        return seconds, logps

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def compare(logps: torch.Tensor, old: torch.Tensor) -> dict[str, object]:
    """Log-probs of a trainer against the engine's: how many differ in a byte, and by how much."""
    other = logps.contiguous().view(torch.int32) != old.contiguous().view(torch.int32)
    away = (logps.double() - old.double()).abs()
    return {
        "tokens": logps.numel(),
        "differ": int(other.sum()),
        "mean_away": float(away.mean()),
        "most_away": float(away.max()),
        "distinct": int(old.unique().numel()),
    }


def contract_of(model: torch.nn.Module):
    """The contract of a trainer whose weights are not published: it has those of the folder."""
    import cute_kernels as ck

    return ck.contract(model=model)


def contract_error(run: Run, work: Path, system: str) -> str | None:
    """Return how the contracts of the trainer and of its engine differ; None: they do not."""
    from cute_kernels.errors import ContractError
    from cute_kernels.integrations.contract_exchange import require_engine

    try:
        require_engine(contract_of(run.model), results(work, system)["generate"]["contracts"])
    except ContractError as error:
        return str(error)
    return None


def main(work: Path, system: str) -> None:
    """Score and update; say what was counted and what it took."""
    run = Run(work, system, "cuda" if torch.cuda.is_available() else "cpu")
    error = contract_error(run, work, system)
    run.score(0)
    seconds, logps = run.timed(run.score)
    old = torch.cat([step["logps"] for step in run.steps])
    counts = compare(torch.cat(logps), old)
    say(work, system, "log-probs", seconds=seconds, contract_error=error, **counts)
    # The first update sees the weights that the engine had.
    first = compare(run.update(0), run.steps[0]["logps"])
    seconds, _ = run.timed(run.update)
    peak = torch.cuda.max_memory_allocated() / 2**30 if run.device == "cuda" else None
    say(work, system, "update", seconds=seconds, peak_gib=peak, **first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
