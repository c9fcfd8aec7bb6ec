"""A GRPO step whose ratio is exactly 1 and whose gradient does not depend on the micro-batches.

    python examples/grpo_loss.py

Rollout scored each token alone, training scores whole batches: `ck.linear_logp` gives both the same
bytes.  dW is added into ``main_grad``, so that four micro-batches leave the bytes of one batch.
"""

from __future__ import annotations

import sys

import torch

import cute_kernels as ck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS, SAMPLES, TOKENS, WIDTH, VOCAB = 2, 4, 16, 64, 1000


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def main() -> int:
    torch.manual_seed(0)
    hidden = torch.randn(GROUPS * SAMPLES, TOKENS, WIDTH).to(DEVICE, torch.bfloat16)
    head = ck.nn.LinearLogp(WIDTH, VOCAB, bias=False, device=DEVICE, dtype=torch.bfloat16)
    sampled = torch.randint(VOCAB, (GROUPS * SAMPLES, TOKENS), device=DEVICE)
    rewards = torch.randn(GROUPS, SAMPLES, device=DEVICE)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)

    with torch.no_grad():  # as a decoder scores: one token of one sequence at a time
        steps = [head(h, t) for h, t in zip(hidden.view(-1, WIDTH), sampled.view(-1), strict=True)]
        old = torch.stack(steps).view_as(sampled)

    def gradient(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ratios, dW) of one step; the loss is divided by all tokens, not by a part's."""
        head.weight.main_grad = torch.zeros(VOCAB, WIDTH, device=DEVICE)
        ratios = []
        for part in torch.arange(len(hidden), device=DEVICE).chunk(micro_batches):
            ratio = (head(hidden[part], sampled[part]) - old[part]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * advantages[part], clipped * advantages[part])
            (-gain.sum() / sampled.numel()).backward()
            ratios.append(ratio.detach())
        return torch.cat(ratios), head.weight.main_grad

    (ratio, whole), (_, parts) = gradient(1), gradient(4)
    on_policy, same = bool((ratio == 1).all()), same_bytes(whole, parts) and bool(whole.any())
    print(f"{DEVICE}: ratio of rollout and training exactly 1 for all {ratio.numel()}: {on_policy}")
    print(f"dW of 4 micro-batches has the bytes of one batch: {same}")
    return 0 if on_policy and same else 1


if __name__ == "__main__":
    sys.exit(main())
