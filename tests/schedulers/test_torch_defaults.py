"""Torch's default dtype and device change no mask, no schedule and no prediction."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.schedulers import BlockMask, bound, simulate
from cute_kernels.schedulers.__main__ import _MASKS, parse_mask
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import _select
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.ranks import block_grid
from tests.schedulers.usual import usual_masks

S = 70
SIZE = {"block_size": (16, 32)}
#: Inputs of a caller, made under the usual defaults.
RANDOM = torch.Generator().manual_seed(5)
IDS = torch.randint(0, 4, (2, S), generator=RANDOM)
FLEX = create_block_mask(
    lambda b, h, q, kv: IDS[b, q] == IDS[b, kv], 2, 1, S, S, device="cpu", BLOCK_SIZE=(16, 32)
)
DENSE = torch.rand(2, 1, S, S, generator=RANDOM) < 0.5
OFFSETS, PREFIX = torch.tensor([0, 30, S]), torch.tensor([9, 33])


def masks() -> dict[str, BlockMask]:
    """Every constructor; those without a tensor are told the device."""
    here = {"q_len": S, "kv_len": S, "device": "cpu"} | SIZE
    out = {
        "full": BlockMask.full(**here),
        "causal": BlockMask.causal(**here),
        "dilated": BlockMask.dilated_window(left=40, right=9, dilation=3, **here),
        "prefix": BlockMask.prefix_lm(prefix=17, **here),
        "prefixes": BlockMask.prefix_lm(S, S, prefix=PREFIX, **SIZE),
        "scattered": BlockMask.document(IDS, **SIZE),
        "offsets": BlockMask.document(cu_seqlens=OFFSETS, **SIZE),
        "dense": BlockMask.from_dense(DENSE, **SIZE),
        "nothing": BlockMask.from_dense(DENSE & ~DENSE, **SIZE),
        "flex": BlockMask.from_flex(FLEX),
    }
    causal = out["causal"]
    blocks = (causal.kv_count, causal.kv_index, S, S)
    out["blocks"] = BlockMask.from_blocks(*blocks, rule=causal.rule, **SIZE)
    out |= {"both": out["dense"] & causal, "either": out["scattered"] | causal}
    texts = ("causal", "full", "sliding_window:40:9", "dilated_window:40:3", "prefix_lm:90")
    texts += ("document:5:2", "random:0.4:1")
    assert {text.split(":")[0] for text in texts} >= set(_MASKS)
    out |= {text: parse_mask(text, 256, (16, 32)) for text in texts} | usual_masks(256)
    return out | {"reblock": out["both"].reblock((32, 16))}


def everything() -> dict[str, object]:
    """Whatever the host half computes, as values that compare."""
    out = masks()
    facts: dict[str, object] = {
        name: (mask.hash(), mask.to_dense().tolist()) for name, mask in out.items()
    }
    for name in ("both", "scattered"):
        mask, slots = out[name], machine("cute_sm90_d128", slots=3)
        selection = _select(block_grid(mask, 2), slots, 2)
        schedule = selection.schedule
        facts[f"orders of {name}"] = (
            [kinds.KINDS[kind](mask, heads=2).hash for kind in kinds.KINDS],
            (schedule.hash, selection.predicted_ns, selection.trials),
            simulate(schedule, slots, group=2).makespan_ns,
            bound(mask, heads=2, machine=slots, group=2),
            [part.tolist() for part in schedule.tensors("cpu", (0,) * schedule.num_lists)],
        )
    return facts


@pytest.fixture
def usual_defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def test_nothing_depends_on_torchs_defaults(usual_defaults):
    want = everything()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        assert everything() == want, dtype
    torch.set_default_device("meta")
    assert everything() == want
