"""Torch's default dtype and device change no mask, no schedule and no prediction."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

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
DEFAULTS = {
    "bfloat16": (torch.bfloat16, "cpu"),
    "float16": (torch.float16, "cpu"),
    "float64": (torch.float64, "cpu"),
    "another device": (torch.float32, "meta"),
}


@contextmanager
def defaults(dtype: torch.dtype, device: str):
    before = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_default_device(None if before[1].type == "cpu" else before[1])


def inputs() -> SimpleNamespace:
    """Inputs of a caller, made under the usual defaults."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 4, (2, S), generator=generator)
    flex = create_block_mask(
        lambda b, h, q, kv: ids[b, q] == ids[b, kv], 2, 1, S, S, device="cpu", BLOCK_SIZE=(16, 32)
    )
    dense = torch.rand(2, 1, S, S, generator=generator) < 0.5
    return SimpleNamespace(ids=ids, flex=flex, dense=dense, prefix=torch.tensor([9, 33]))


def masks(given: SimpleNamespace) -> dict[str, BlockMask]:
    """Every constructor; those without a tensor are told the device."""
    lengths, options = (S, S), {"device": "cpu"}
    out = {
        "full": BlockMask.full(*lengths, **SIZE, **options),
        "causal": BlockMask.causal(*lengths, **SIZE, **options),
        "dilated": BlockMask.dilated_window(
            *lengths, left=40, right=9, dilation=3, **SIZE, **options
        ),
        "prefix": BlockMask.prefix_lm(*lengths, prefix=17, **SIZE, **options),
        "prefixes": BlockMask.prefix_lm(*lengths, prefix=given.prefix, **SIZE),
        "scattered": BlockMask.document(given.ids, **SIZE),
        "offsets": BlockMask.document(cu_seqlens=torch.tensor([0, 30, S], **options), **SIZE),
        "dense": BlockMask.from_dense(given.dense, **SIZE),
        "nothing": BlockMask.from_dense(given.dense & ~given.dense, **SIZE),
        "flex": BlockMask.from_flex(given.flex),
    }
    causal = out["causal"]
    blocks = (causal.kv_count, causal.kv_index, S, S)
    out["blocks"] = BlockMask.from_blocks(*blocks, rule=causal.rule, **SIZE)
    out |= {"both": out["dense"] & causal, "either": out["scattered"] | causal}
    return out | {"reblock": out["both"].reblock((32, 16))}


def everything(given: SimpleNamespace) -> dict[str, object]:
    """Whatever the host half computes, as values that compare."""
    out = masks(given)
    found: dict[str, object] = {
        name: (mask.hash(), mask.to_dense().tolist()) for name, mask in out.items()
    }
    for name in ("both", "scattered"):
        mask, slots = out[name], machine("cute_sm90_d128", slots=3)
        selection = _select(block_grid(mask, 2), slots, 2)
        found[f"orders of {name}"] = (
            [kinds.KINDS[kind](mask, heads=2).hash for kind in kinds.KINDS],
            (selection.schedule.hash, selection.predicted_ns, selection.trials),
            simulate(selection.schedule, slots, group=2).makespan_ns,
            bound(mask, heads=2, machine=slots, group=2),
            [
                part.tolist()
                for part in selection.schedule.tensors("cpu", (0,) * selection.schedule.num_lists)
            ],
        )
    return found


def drawn() -> dict[str, str]:
    """Masks that are made, and some of them drawn, without a tensor of the caller's."""
    out = {f"usual {name}": mask.hash() for name, mask in usual_masks(256).items()}
    texts = ("causal", "full", "sliding_window:40:9", "dilated_window:40:3", "prefix_lm:90")
    for text in (*texts, "document:5:2", "random:0.4:1"):
        out[text] = parse_mask(text, 256, (16, 32)).hash()
    assert {text.split(":")[0] for text in out} >= set(_MASKS)
    return out


def test_nothing_depends_on_torchs_defaults():
    given = inputs()
    want = everything(given), drawn()
    for name, values in DEFAULTS.items():
        with defaults(*values):
            assert (everything(given), drawn()) == want, name
