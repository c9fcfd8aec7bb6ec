"""Sizes of an RL step, and the folder through which its processes talk.

WORK/size.json           Size
WORK/model, WORK/weights a random Llama, and the same as published weights
WORK/SYSTEM_N.pt         what the engine of a system drew in its Nth step
WORK/results.jsonl       a line for each thing that was timed
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """One step: a Llama with heads of 128, its prompts, and what is drawn.

    Attributes:
        prompts, samples: Prompts of a step, and completions of each.
        prompt, new: Tokens of a prompt and of a completion.
        micro_batch: Sequences of one pass of the trainer.
        steps: Steps that are timed.
        ranks: GPUs of the engine, tensor-parallel; the trainer has one.
    """

    hidden: int = 2048
    inner: int = 5632
    layers: int = 8
    heads: int = 16
    key_heads: int = 4
    vocab: int = 32000
    prompts: int = 16
    samples: int = 8
    prompt: int = 256
    new: int = 256
    micro_batch: int = 16
    steps: int = 4
    temperature: float = 1.0
    ranks: int = 1

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Tokens that a step draws."""
        return self.rows * self.new

    @property
    def label(self) -> str:
        """Name of model and shape in records."""
        drawn = f"{self.prompts}x{self.samples}/{self.prompt}+{self.new}"
        ranks = f"/tp{self.ranks}" if self.ranks > 1 else ""
        return f"llama{self.hidden}x{self.layers}/{drawn}{ranks}"

    @property
    def order(self) -> str:
        """Order of our sums: the one that several ranks share, if the engine has several."""
        return "tree" if self.ranks > 1 else "chain"

    def save(self, work: Path) -> None:
        """Write the size for the processes of a run."""
        (work / "size.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, work: Path) -> Size:
        """Read the size that `save` wrote."""
        return cls(**json.loads((work / "size.json").read_text()))


#: Name on the command line -> size.  In the smaller one, the host decides a part of the times.
CARD = {
    "0.5b": Size(),
    "3b": Size(hidden=3072, inner=8192, layers=28, heads=24, key_heads=8),
}
#: For a CPU: what is run is the code, not the speed.
TINY = Size(
    hidden=256,
    inner=512,
    layers=2,
    heads=2,
    key_heads=1,
    vocab=1024,
    prompts=2,
    samples=4,
    prompt=24,
    new=8,
    micro_batch=4,
    steps=2,
)


def say(work: Path, system: str, product: str, **fields: object) -> None:
    """Append a result for the process that started this one."""
    line = json.dumps({"system": system, "product": product, **fields})
    with (work / "results.jsonl").open("a") as file:
        print(line, file=file)
    print(line, flush=True)


def results(work: Path, system: str) -> dict[str, dict]:
    """Product -> the last result of a system."""
    path = work / "results.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {r["product"]: r for r in map(json.loads, lines) if r["system"] == system}
