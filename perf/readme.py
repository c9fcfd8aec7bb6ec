"""The README's table of speed: the rival's time over ours on each GPU, from the newest records.

`python -m perf report` writes it where the README has a table with this header; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .core import record
from .core.models import MODELS
from .core.tables import NOT_RUN, by_card, geomean, table

README = record.ROOT / "README.md"
HEADER = ["rival's time over ours", "rival", *MODELS]
#: Rank of a target's records among those of one case: a bare shape is M = 4096.
_GEMM = ("qkv", "o_proj", "mlp_up", "mlp_down", "lm_head")


@dataclass(frozen=True)
class Row:
    """One line: all cases of some products of one kernel against one rival.

    shapes: Those that begin with one of these; all without any.
    ours: The name of our side in the records.
    """

    label: str
    kernel: str
    products: tuple[str, ...]
    rival: str
    name: str
    shapes: tuple[str, ...] = ()
    exact: bool = False
    ours: str = "ours"

    def takes(self, product: str, shape: str) -> bool:
        """Whether a case belongs to this row."""
        if product not in self.products:
            return False
        if self.exact:
            return shape in self.shapes
        return not self.shapes or shape.startswith(self.shapes)

    def cell(self, bench) -> str:
        """Geometric mean of the ratios, and their range where there are several."""
        cases = {(p, s) for _, p, s in bench.records if self.takes(p, s)}
        ratios = [bench.ratio(case, self.rival, self.ours) for case in cases]
        ratios = [ratio for ratio in ratios if ratio is not None]
        if not ratios:
            return NOT_RUN
        mean = f"{geomean(ratios):.2f}"
        return mean if len(ratios) == 1 else f"{mean} ({min(ratios):.2f} to {max(ratios):.2f})"


ROWS = (
    Row("`linear`, forward and dx", "gemm", ("fwd", "dx"), "cublas", "cuBLAS", _GEMM, exact=True),
    Row(
        "`linear`, dW into fp32", "gemm", ("dw",), "cublas", "cuBLAS and an add", _GEMM, exact=True
    ),
    Row("`linear`, 1 to 128 rows", "decode", ("fwd",), "cublas", "cuBLAS", ours="chain"),
    Row("attention, forward", "attention", ("fwd",), "fa4", "FlashAttention-4"),
    Row("attention, ordered backward", "attention", ("bwd",), "fa4", "FlashAttention-4, unordered"),
    Row("attention, ordered backward", "attention", ("bwd",), "cudnn", "cuDNN, unordered"),
    Row("`linear_logp`, both passes", "logp", ("both",), "liger", "Liger"),
    Row("`linear_logp`, both passes", "logp", ("both",), "quack", "quack, a sum only"),
    Row("`rms_norm`, both passes", "norm", ("rms_norm fwd", "rms_norm bwd"), "quack", "quack"),
    Row(
        "`layer_norm`, both passes", "norm", ("layer_norm fwd", "layer_norm bwd"), "liger", "Liger"
    ),
    Row(
        "mHC site, both passes", "mhc", ("site fwd", "site bwd"), "te", "TransformerEngine, atomics"
    ),
    Row("a Llama's training step", "model", ("training",), "torch", "torch"),
)


def lines(records: list[dict]) -> list[str]:
    """Lines of the table."""
    cards = {row.kernel: by_card(records, row.kernel) for row in ROWS}
    cells = []
    for row in ROWS:
        benches = cards[row.kernel]
        values = [row.cell(benches[card]) if card in benches else NOT_RUN for card in MODELS]
        cells.append([row.label, row.name, *values])
    return table(HEADER, cells)


def written(text: str, records: list[dict]) -> str:
    """The README with this table in place of the one with its header."""
    before, head, after = text.partition(table(HEADER, [])[0] + "\n")
    if not head:
        return text
    rest = after.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        del rest[0]
    return before + "\n".join(lines(records)) + "\n" + "".join(rest)


def write(records: list[dict], path: Path = README) -> None:
    """Rewrite the table in the README."""
    path.write_text(written(path.read_text(encoding="utf-8"), records), encoding="utf-8")
