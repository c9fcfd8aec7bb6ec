"""mHC around the layers of a model, with gradients that do not depend on the micro-batches.

python examples/hyper_connections.py
"""

from __future__ import annotations

import sys

import torch

import cute_kernels as ck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, STREAMS, TOKENS = 64, 4, 2048  # micro-batches are cut at multiples of 1024 tokens


def layer() -> torch.nn.Module:
    norm = ck.nn.RMSNorm(WIDTH, eps=1e-6)
    return torch.nn.Sequential(norm, ck.nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sites = (ck.mhc.HyperConnection(layer(), WIDTH, STREAMS) for _ in range(2))
        self.sites = torch.nn.Sequential(*sites)
        self.head = ck.mhc.HyperHead(WIDTH, STREAMS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.sites(ck.mhc.expand_from_embedding(tokens, STREAMS)))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def main() -> int:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    tokens, upstream = (torch.randn(TOKENS, WIDTH).to(DEVICE, torch.bfloat16) for _ in range(2))

    def gradients(size: int) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        for x, dy in zip(tokens.split(size), upstream.split(size), strict=True):
            model(x).backward(dy)
        return [parameter.main_grad for parameter in model.parameters()]

    alone = same_bytes(model(tokens[7:8]), model(tokens)[7:8])
    split = all(map(same_bytes, gradients(TOKENS), gradients(TOKENS // 2)))
    print(f"{DEVICE}: a token alone has the bytes that it has among {TOKENS}: {alone}")
    print(f"all gradients of two micro-batches have the bytes of one batch: {split}")
    return 0 if alone and split else 1


if __name__ == "__main__":
    sys.exit(main())
