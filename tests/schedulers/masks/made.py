"""Masks made in every way from tensors that their caller keeps."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import rules

S = 96

SIZE = {"block_size": 32}


def given() -> dict[str, torch.Tensor]:
    """Tensors that a caller keeps and writes to: of the dtypes that need no conversion too."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.tensor([[[[0, 1, 0], [0, 2, 0], [1, 2, 0]]]], dtype=torch.int32)
    dense = torch.rand(S, S, generator=generator) < 0.5
    dense[:32, :32] = True
    return {
        "prefix": torch.tensor([40, 7], dtype=torch.int32),
        "ids": torch.randint(0, 4, (2, S), generator=generator, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 50, S], dtype=torch.int32),
        "dense": dense,
        "count": torch.tensor([[[2, 2, 2]]], dtype=torch.int32),
        "index": chosen,
    }


def ours(t: dict[str, torch.Tensor]) -> BlockMask:
    """The plain constructor, of a caller's copies of another mask's lists."""
    mask = BlockMask.prefix_lm(S, S, prefix=t["prefix"], **SIZE)
    names = [
        field.name for field in fields(mask) if isinstance(vars(mask)[field.name], torch.Tensor)
    ]
    t |= {name: getattr(mask, name).clone() for name in names}
    return replace(mask, **{name: t[name] for name in names}, rule=rules.Prefix(t["prefix"]))


def causal() -> BlockMask:
    return BlockMask.causal(S, S, **SIZE)


MAKERS = {
    "prefix_lm": lambda t: BlockMask.prefix_lm(S, S, prefix=t["prefix"], **SIZE),
    "prefix_lm of a NumPy array": lambda t: BlockMask.prefix_lm(
        S, S, prefix=torch.from_numpy(t["prefix"].numpy()), **SIZE
    ),
    "document": lambda t: BlockMask.document(t["ids"], **SIZE),
    "document of one batch": lambda t: BlockMask.document(t["ids"][0], **SIZE),
    "cu_seqlens": lambda t: BlockMask.document(cu_seqlens=t["cu_seqlens"], **SIZE),
    "from_dense": lambda t: BlockMask.from_dense(t["dense"], **SIZE),
    "from_dense in one block": lambda t: BlockMask.from_dense(t["dense"], block_size=128),
    "from_blocks": lambda t: BlockMask.from_blocks(t["count"], t["index"], S, S, **SIZE),
    "from_blocks with a rule": lambda t: BlockMask.from_blocks(
        t["count"], t["index"], S, S, rule=rules.Prefix(t["prefix"]), **SIZE
    ),
    "from_rule": lambda t: BlockMask.from_rule(rules.Prefix(t["prefix"]), S, S, **SIZE),
    "and": lambda t: MAKERS["prefix_lm"](t) & BlockMask.document(t["ids"], **SIZE),
    "or": lambda t: BlockMask.document(t["ids"], **SIZE) | causal(),
    "reblock": lambda t: BlockMask.from_dense(t["dense"], **SIZE).reblock(16),
    "BlockMask": ours,
}


def parts(mask: BlockMask) -> list[torch.Tensor]:
    return [*mask.lists("kv"), *mask.lists("q"), *mask.rule.tensors()]


def keeps_its_elements(name):
    """The elements and the hash, of today's tensors and not the one kept, stay."""
    tensors = given()
    mask = MAKERS[name](tensors)
    dense, hash_before = mask.to_dense(), mask.hash()
    assert hash_before == MAKERS[name](given()).hash() and 0 < int(dense.sum()) < dense.numel()
    for tensor in tensors.values():
        tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor * 0 + 1)
    again = replace(mask)
    assert again.hash() == mask.hash() == hash_before and "_digests" in vars(mask)
    assert torch.equal(again.to_dense(), dense)
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert not memory & {tensor.untyped_storage().data_ptr() for tensor in parts(mask)}
