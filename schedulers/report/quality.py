"""Table of the times that ``select`` predicts for the usual masks, and its targets.

``python -m cute_kernels.schedulers.report.quality`` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..masks.mask import BlockMask
from ..masks.rules import indices
from ..model.machines import Machine, resolve
from ..model.selection import Selection, select
from ..model.simulation import Simulation, simulate

SEED = 0
# Predicted time over that of the same launch order without a write order.
TARGETS = {
    "full": 1.03,
    "causal": 1.05,
    "window 1024": 1.02,
    "8 documents, split 0": 1.05,
    "8 documents, split 1": 1.05,
    "8 documents, split 2": 1.05,
    "prefix-LM 2048": 1.03,
    "random 25%": 1.12,
}


@dataclass(frozen=True)
class Row:
    """One mask's selection, its simulation, and the target."""

    mask: str
    target: float
    selection: Selection
    simulation: Simulation

    @property
    def met(self) -> bool:
        return self.simulation.ratio <= self.target and self.simulation.safety.any_residency


def usual_masks(seqlen: int, block_size: tuple[int, int] = (64, 128)) -> dict[str, BlockMask]:
    """Return the masks of ``TARGETS`` at a length; windows and prefixes are cut to it."""
    size = {"block_size": block_size, "device": "cpu"}
    masks = {
        "full": BlockMask.full(seqlen, seqlen, **size),
        "causal": BlockMask.causal(seqlen, seqlen, **size),
        "window 1024": BlockMask.sliding_window(seqlen, seqlen, left=1023, right=0, **size),
    }
    for split in range(3):
        ids = _documents(seqlen, split)
        masks[f"8 documents, split {split}"] = BlockMask.document(ids, block_size=block_size)
    prefix = min(2048, seqlen // 2)
    masks["prefix-LM 2048"] = BlockMask.prefix_lm(seqlen, seqlen, prefix=prefix, **size)
    masks["random 25%"] = _random(seqlen, block_size)
    return masks


def quality_rows(
    seqlen: int = 8192, heads: int = 64, machine: Machine | str = "h200_d128"
) -> list[Row]:
    """Run ``select`` and ``simulate`` on each of the usual masks."""
    machine, rows = resolve(machine), []
    for name, mask in usual_masks(seqlen, machine.tile).items():
        selection = select(mask, heads=heads, machine=machine)
        rows.append(Row(name, TARGETS[name], selection, simulate(selection.schedule, machine)))
    return rows


def quality_table(seqlen: int = 8192, heads: int = 64, machine: Machine | str = "h200_d128") -> str:
    """Return the rows as Markdown, with the limiting bound where a target is missed."""
    machine = resolve(machine)
    lines = [
        f"{seqlen} tokens, {heads} heads, {machine.name}: {machine.slots} slots, per "
        f"{machine.tile[0]}x{machine.tile[1]} tile compute {machine.full_ns / 1e3} us, reduce "
        f"{machine.reduce_ns / 1e3} us, handoff {machine.handoff_ns / 1e3} us.  A model, not a "
        "measurement.",
        "",
        "| mask | ordered / unordered | target | over bound | predicted us | safety | schedule |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in quality_rows(seqlen, heads, machine):
        selection, simulated = row.selection, row.simulation
        target = f"{row.target:.2f}"
        if not row.met:
            bound = selection.bound
            target += f" missed; bound {bound.lower_ns / 1e3:.1f} us ({bound.binding()})"
        lines.append(
            f"| {row.mask} | {simulated.ratio:.3f} | {target} | {selection.over_bound:.3f} | "
            f"{simulated.makespan_ns / 1e3:.1f} | {simulated.safety} | {selection.schedule.name} |"
        )
    return "\n".join(lines)


def _documents(seqlen: int, split: int) -> torch.Tensor:
    """Return ids of int64 [seqlen]: 8 documents with 7 drawn cuts."""
    random = torch.Generator(device="cpu").manual_seed(SEED + split)
    cuts = torch.randperm(seqlen - 1, generator=random, dtype=torch.int64, device="cpu")[:7] + 1
    return torch.searchsorted(cuts.sort().values, indices(seqlen, cuts.device), right=True)


def _random(seqlen: int, block_size: tuple[int, int]) -> BlockMask:
    """Mask with a quarter of all blocks, drawn one by one."""
    random = torch.Generator(device="cpu").manual_seed(SEED)
    rows, columns = -(-seqlen // block_size[0]), -(-seqlen // block_size[1])
    drawn = torch.rand(rows, columns, generator=random, dtype=torch.float32, device="cpu")
    is_present = drawn < 0.25
    count = is_present.sum(1).int()
    index = torch.argsort((~is_present).int(), dim=1, stable=True).int()
    index[indices(columns, index.device) >= count[:, None]] = 0
    return BlockMask.from_blocks(
        count[None, None], index[None, None], seqlen, seqlen, block_size=block_size
    )


if __name__ == "__main__":
    print(quality_table())
