"""The ops of mHC that are measured, their sizes and operands; weights are fp32."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..core.passes import DIRECTIONS, Inputs
from ..core.work import Work

TOKENS = (4096, 8192, 32768)
#: Tokens of a decoding step and of a short prompt: a launch each, more than bytes.
FEW_TOKENS = (64, 512)
CHANNELS = (2560, 4096, 5120, 7168)
#: Ops of every size, and those of few.
OPS = ("projection", "projection_norm", "scale_sinkhorn", "aggregate", "expand", "site")
MORE_OPS = ("expand_bias", "head", "post_pre", "post_pre_shifted")
#: Ops without a backward, and the sites of the first.
FORWARD_OPS = ("multilayer_recompute",)
SITES = 4
ALL_OPS = (*OPS, *MORE_OPS, *FORWARD_OPS)
LAYOUTS = ("cn", "nc")
STREAMS = (4, 2)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

#: (op, direction) -> (a, b): a token must move (a n + b) C elements; see docs/notes/mhc_sm90.md.
ELEMENTS = {
    ("projection", "fwd"): (1, 0),
    ("projection", "bwd"): (2, 0),
    ("projection_norm", "fwd"): (1, 0),
    ("projection_norm", "bwd"): (2, 0),
    ("scale_sinkhorn", "fwd"): (0, 0),
    ("scale_sinkhorn", "bwd"): (0, 0),
    ("aggregate", "fwd"): (1, 1),
    ("aggregate", "bwd"): (2, 1),
    ("expand", "fwd"): (2, 1),
    ("expand", "bwd"): (3, 2),
    ("expand_bias", "fwd"): (2, 1),
    ("expand_bias", "bwd"): (3, 2),
    ("head", "fwd"): (2, 1),
    ("head", "bwd"): (3, 2),
    # y is made, and read once more for its collapse; or not, where its pre is there before it.
    ("post_pre", "fwd"): (3, 2),
    ("post_pre_shifted", "fwd"): (2, 2),
    ("post_pre", "bwd"): (7, 4),
    ("post_pre_shifted", "bwd"): (7, 4),
    # x once; f and y of each site.
    ("multilayer_recompute", "fwd"): (1 + SITES, SITES),
    ("site", "fwd"): (4, 2),
    ("site", "bwd"): (6, 4),
}
#: Bytes of a token's coefficients that it must move besides.
_SMALL = {"projection": 132, "projection_norm": 132, "scale_sinkhorn": 388}


@dataclass(frozen=True)
class Case:
    """One direction of one op at one size."""

    op: str
    direction: str
    tokens: int
    channels: int
    layout: str = "cn"
    n: int = 4
    dtype: str = "bf16"

    @property
    def product(self) -> str:
        return f"{self.op} {self.direction}"

    @property
    def label(self) -> str:
        words = [f"{self.tokens}x{self.channels}"]
        words += ["nc"] if self.layout == "nc" else []
        words += [f"n={self.n}"] if self.n != 4 else []
        return " ".join([*words, *([self.dtype] if self.dtype != "bf16" else [])])

    @property
    def columns(self) -> int:
        """Columns of H in use."""
        return 2 * self.n + self.n**2

    @property
    def work(self) -> Work:
        """Work in bytes; products never bound it."""
        a, b = ELEMENTS[self.op, self.direction]
        rows = (a * self.n + b) * self.channels * DTYPES[self.dtype].itemsize
        return Work(0, self.tokens * (rows + _SMALL.get(self.op, 0)))

    def items(self) -> dict:
        """Fields of a record."""
        sizes = {"tokens": self.tokens, "channels": self.channels, "n": self.n}
        facts = {"product": self.product, "shape": self.label, "layout": self.layout}
        return facts | {"dtype": self.dtype} | sizes

    @property
    def streams(self) -> tuple[int, ...]:
        """The shape of x: [tokens, 1, C, n] or [tokens, 1, n, C]."""
        last = (self.channels, self.n)
        return (self.tokens, 1, *(last if self.layout == "cn" else last[::-1]))

    def inputs(self, seed: int, device: str) -> Inputs:
        """Random operands that the op reads, and the gradients that come in."""
        generator = torch.Generator(device).manual_seed(seed)
        m, c, n, columns = self.tokens, self.channels, self.n, self.columns
        dtype, width = DTYPES[self.dtype], {4: 32, 2: 8}[self.n]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        out: Inputs = {}
        projects = self.op in ("projection", "projection_norm", "site", "head") or self.next_site
        expands = self.op in ("expand", "expand_bias") or self.next_site
        if self.op != "scale_sinkhorn":
            out["x"] = normal(*self.streams).to(dtype)
        if projects:
            rows = n if self.op == "head" else columns
            out["phi"] = normal(rows, n * c) * (n * c) ** -0.5
        if self.op == "projection_norm":
            out["norm_weight"] = normal(n * c) * 0.1 + 1.0
        if self.op == "scale_sinkhorn":
            out["h"] = torch.nn.functional.pad(normal(m, columns), (0, width - columns))
            out["ms"] = normal(m).square() + 0.5
        if self.op in ("scale_sinkhorn", "site") or self.next_site:
            out["alpha"], out["beta"] = normal(3), normal(1, columns)
        if self.op == "head":
            out["alpha"], out["beta"] = normal(1), normal(n)
        if self.op in ("aggregate", "post_pre_shifted"):
            out["pre"] = normal(m, 1, n).sigmoid()
        if expands:
            out["post"] = 2 * normal(m, 1, n).sigmoid()
            out["res"] = normal(m, 1, n, n).softmax(-1)
        if expands or self.op == "site":
            out["f"] = normal(m, 1, c).to(dtype)
        if self.op == "multilayer_recompute":
            for s in range(SITES):
                out[f"f{s}"] = normal(m, 1, c).to(dtype)
                out[f"post{s}"] = 2 * normal(m, 1, n).sigmoid()
                out[f"res{s}"] = normal(m, 1, n, n).softmax(-1)
        if self.op == "expand_bias":
            out["bias"] = normal(c).to(dtype)
        for t in out.values():
            t.requires_grad_()
        if self.direction == "bwd":
            out |= {f"d{i}": g for i, g in enumerate(self._upstream(normal))}
        return out

    @property
    def next_site(self) -> bool:
        """Whether the op ends one site and begins the next."""
        return self.op in ("post_pre", "post_pre_shifted")

    def _upstream(self, normal) -> list[torch.Tensor]:
        m, c, n, columns = self.tokens, self.channels, self.n, self.columns
        dtype, width = DTYPES[self.dtype], {4: 32, 2: 8}[self.n]
        if self.op in ("projection", "projection_norm"):
            return [torch.nn.functional.pad(normal(m, columns), (0, width - columns)), normal(m)]
        if self.op == "scale_sinkhorn":
            return [normal(m, n), normal(m, n), normal(m, 1, n, n)]
        if self.op in ("aggregate", "head"):
            return [normal(m, 1, c).to(dtype)]
        collapse = [normal(m, 1, c).to(dtype)] if self.next_site else []
        return [normal(*self.streams).to(dtype), *collapse]


Size = tuple[int, int]


def cases(
    ops: Iterable[str],
    sizes: Iterable[Size],
    layout: str = "cn",
    n: int = 4,
    dtype: str = "bf16",
) -> list[Case]:
    """Cases of both directions of each op at each size; coefficients alone have no layout."""
    return [
        Case(op, direction, m, c, layout, n, dtype)
        for m, c in sizes
        for op in ops
        for direction in (DIRECTIONS[:1] if op in FORWARD_OPS else DIRECTIONS)
        if layout == "cn" or op != "scale_sinkhorn"
    ]


def of_sizes() -> list[Case]:
    """Every size, in TransformerEngine's layout."""
    return cases(OPS, itertools.product(TOKENS, CHANNELS))


def of_kinds() -> list[Case]:
    """A size or two of all else: ops of ours alone, a bias, other streams, layouts and dtypes."""
    typical, large = (8192, 4096), (8192, 7168)
    wide = tuple(op for op in OPS if op != "scale_sinkhorn")
    return [
        *cases((*MORE_OPS, *FORWARD_OPS), [typical, large]),
        *cases(("projection", "aggregate", "expand", "site", "post_pre"), [typical, large], "nc"),
        *cases(OPS, [typical], n=2),
        *cases(wide, [typical], dtype="fp32"),
    ]


def of_few_tokens() -> list[Case]:
    """Few tokens, where launches take the time."""
    return cases((*OPS, *MORE_OPS), [(m, 4096) for m in FEW_TOKENS])


#: Lists of cases by name.
LISTS = {"sizes": of_sizes, "kinds": of_kinds, "few": of_few_tokens}
