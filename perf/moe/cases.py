"""Cases of the mixtures that are measured: grouped products, and the moves of rows.

An input set of a product is a dict of x [R, K], w [E, N, K] and dy [R, N] (bf16), of which it has
what the product reads, and offsets int32 [E + 1]; R = tokens k.  One of a move has indices int32
[T, k], and of x [T, K], rows [R, K] and weights fp32 [T, k] what the move reads.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ..core.work import Work

Inputs = dict[str, torch.Tensor]

#: Model -> (experts, experts of a token, K: hidden size, N: size of an expert).
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
}
#: Tokens of a step of decoding, of which the forward alone is measured; of training.
DECODE, TRAIN = (1, 16, 128), (4096, 16384)
#: Experts with equal numbers of rows, and with those of Zipf's law.
LOADS = ("balanced", "zipf")
PRODUCTS = ("fwd", "dx", "dw")
#: Moves of rows: `permute` with its sort, `combine` with weights, and one after the other.
MOVES = ("permute", "combine", "permute+combine")

_SEED = 20_261_128
#: Odd and shared by no number of experts: k neighbours in a sequence of its multiples differ.
_STRIDE = 37


@dataclass(frozen=True)
class Case:
    """One product or move of one model's layer, for so many tokens."""

    product: str
    shape: str
    tokens: int
    load: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(experts, k, K, N)."""
        return SHAPES[self.shape]

    @property
    def rows(self) -> int:
        return self.tokens * self.sizes[1]

    @property
    def label(self) -> str:
        return f"{self.shape}/t{self.tokens}/{self.load}"

    @property
    def decode(self) -> bool:
        """Whether it is a product of few tokens, whose time is that of reading weights."""
        return self.product in PRODUCTS and self.tokens <= max(DECODE)

    def indices(self) -> torch.Tensor:
        """Experts of each token: int32 [T, k], the same for every input set."""
        return _indices(self.tokens, *self.sizes[:2], self.load)

    def counts(self) -> torch.Tensor:
        """Rows of each expert: int64 [E]."""
        return self.indices().flatten().bincount(minlength=self.sizes[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of experts that have rows."""
        _, _, k, n = self.sizes
        return 2 * int((self.counts() > 0).sum()) * n * k

    @property
    def work(self) -> Work:
        """Each operand that is read, and each result, once."""
        experts, _, k, n = self.sizes
        if self.product in MOVES:
            moved = 2 * (self.tokens + self.rows) * k
            by_product = {"permute": moved, "combine": moved + 4 * self.rows}
            return Work(0, by_product.get(self.product, sum(by_product.values())))
        weights = 2 * experts * n * k if self.product == "dw" else self.weight_bytes
        return Work(2 * self.rows * n * k, 2 * self.rows * (k + n) + weights)

    def inputs(self, seed: int, device: str) -> Inputs:
        """One random input set; never zeros, on which a card runs faster."""
        generator = torch.Generator(device).manual_seed(_SEED + seed)
        experts, _, k, n = self.sizes

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        if self.product in MOVES:
            t: Inputs = {"indices": self.indices().to(device)}
            if self.product != "combine":
                t["x"] = normal(self.tokens, k)
            if self.product != "permute":
                t["weights"] = normal(self.tokens, self.sizes[1], dtype=torch.float32)
            return t | ({"rows": normal(self.rows, k)} if self.product == "combine" else {})
        ends = self.counts().cumsum(0)
        t = {"offsets": torch.cat([ends.new_zeros(1), ends]).int().to(device)}
        if self.product != "dx":
            t["x"] = normal(self.rows, k)
        if self.product != "dw":
            t["w"] = normal(experts, n, k).mul_(k**-0.5)
        if self.product != "fwd":
            t["dy"] = normal(self.rows, n)
        return t

    def items(self) -> dict:
        """Fields of a record."""
        experts, chosen, k, n = self.sizes
        counts = self.counts()
        return {
            "product": self.product,
            "shape": self.label,
            "tokens": self.tokens,
            "load": self.load,
            "experts": experts,
            "top_k": chosen,
            "k": k,
            "n": n,
            "used_experts": int((counts > 0).sum()),
            "most_rows": int(counts.max()),
            "dtype": "bf16",
        }


@functools.lru_cache(maxsize=64)
def _indices(tokens: int, experts: int, k: int, load: str) -> torch.Tensor:
    if load == "balanced":
        slots = torch.arange(tokens * k, dtype=torch.int32)
        return (slots * _STRIDE % experts).view(tokens, k)
    generator = torch.Generator().manual_seed(_SEED)
    share = 1.0 / (torch.randperm(experts, generator=generator) + 1.0)
    return torch.multinomial(share.expand(tokens, experts), k, generator=generator).int()


def cases(shapes: list[str], tokens: list[int], products: list[str], loads: list[str]):
    """Cases in the order in which they are measured: decoding first, moves last."""

    def asked(some: tuple[str, ...], few: tuple[int, ...]):
        wanted = [name for name in some if name in products]
        numbers = [t for t in few if t in tokens]
        for t, shape, product, load in itertools.product(numbers, shapes, wanted, loads):
            yield Case(product, shape, t, load)

    return [*asked(("fwd",), DECODE), *asked(PRODUCTS, TRAIN), *asked(MOVES, (DECODE[-1], *TRAIN))]
