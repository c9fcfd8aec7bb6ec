"""Cases of attention, of blocks and of packed sequences."""

from __future__ import annotations

import functools

import torch

from cute_kernels.schedulers import BlockMask, select, shortest_first
from tests.mhc.cases import normal
from tests.option_table.calls import call
from tests.oracles import sparse_attn as reference

BF16 = torch.bfloat16
#: Two query heads of one KV head; one block of queries, two of keys.
QUERIES, KEYS, HEADS, DIM = 70, 150, 2, 64
SINKS = torch.tensor([0.7, -1.2])


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=BF16).requires_grad_()


def compare(made, leaves, allowed, options, sinks) -> dict[str, float]:
    """Errors of out, lse and gradients in parts of their bounds; tensors have a batch."""
    out, lse = made if isinstance(made, tuple) else (made, None)
    dout = normal(*out.shape, seed=5, dtype=BF16)
    dlse = None if lse is None else normal(*lse.shape, seed=6)
    own = [*leaves, *([] if sinks is None else [sinks])]
    results, upstream = ([out], [dout]) if lse is None else ([out, lse], [dout, dlse])
    grads = torch.autograd.grad(results, own, upstream)
    numbers = {name: options[name] for name in ("scale", "softcap") if name in options}
    plain = [t.detach() for t in leaves]
    exact_leaves = [t.double().requires_grad_() for t in plain]
    sinks64 = None if sinks is None else sinks.detach().double().requires_grad_()
    want = reference.attention(*exact_leaves, allowed, **numbers, sinks=sinks64)
    exact_own = exact_leaves + ([] if sinks is None else [sinks64])
    up = [t.double() for t in upstream]
    want_grads = torch.autograd.grad(want[: len(results)], exact_own, up)
    kept = None if sinks is None else sinks.detach()
    scores = reference.Scores(**numbers, sinks=kept)
    bounds = reference.error_bounds(*plain, dout, allowed, dlse=dlse, scores=scores)
    rows = [("out", out, want[0], bounds.out)]
    rows += [] if lse is None else [("lse", lse, want[1], bounds.lse)]
    rows += zip(("dq", "dk", "dv"), grads, want_grads, bounds[2:], strict=False)
    if sinks is not None:
        bound = reference.sinks_bound(bounds, [t.detach() for t in want], (dout, dlse), kept)
        rows.append(("dsinks", grads[3], want_grads[3], bound))
    return {name: _share(got.detach(), w.detach(), bound) for name, got, w, bound in rows}


def _share(got, want, bound) -> float:
    error = torch.where(got == want, 0.0, (got.double() - want).abs())
    return torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=1e9).max().item()


def blocks(block_mask=None, sinks=None, **options) -> dict[str, float]:
    shapes = (QUERIES, HEADS), (KEYS, 1), (KEYS, 1)
    leaves = [leaf(1, *shape, DIM, seed=i) for i, shape in enumerate(shapes)]
    arguments = options | ({} if sinks is None else {"sinks": sinks})
    if sinks is not None:
        sinks = arguments["sinks"] = sinks.clone().requires_grad_()
    out = call("block_sparse_attention", *leaves, block_mask, **arguments)
    allowed = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool)
    if block_mask is not None:
        allowed = block_mask.to_dense()
    if options.get("causal"):
        allowed = allowed & (torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + KEYS - QUERIES)
    return compare(out, leaves, allowed, options, sinks)


CU_SEQLENS = torch.tensor([0, 30, 30, 100])
TOKENS = 100


def pack(sinks=None, cu_seqlens=CU_SEQLENS, **options) -> dict[str, float]:
    leaves = [leaf(1, TOKENS, heads, DIM, seed=10 + i) for i, heads in enumerate((HEADS, 1, 1))]
    arguments = dict(options)
    if sinks is not None:
        sinks = arguments["sinks"] = sinks.clone().requires_grad_()
    out = call("block_sparse_attention_varlen", *(t[0] for t in leaves), cu_seqlens, **arguments)
    out = tuple(t[None] for t in out) if isinstance(out, tuple) else out[None]
    i = torch.arange(TOKENS)
    document = torch.bucketize(i, cu_seqlens, right=True)
    distance = i - i[:, None]
    allowed = document == document[:, None]
    left, right = options.get("window_size", (None, None))
    allowed &= distance >= -(TOKENS if left is None else left)
    allowed &= distance <= (TOKENS if right is None else right)
    allowed &= (distance <= 0) | (not options.get("causal", False))
    return compare(out, leaves, allowed[None, None], options, sinks)


#: Sequences of 70 of 150 keys, of 1 of 40, and a token in none.
LENGTHS, PAGE = [(QUERIES, KEYS), (1, 40)], 16


def paged(layout="NHD", out=False, sinks=None, **options) -> dict[str, float]:
    """Each sequence beside float64; pages lie backwards."""
    keys = [leaf(1, keys, 1, DIM, seed=20 + i).detach() for i, (_, keys) in enumerate(LENGTHS)]
    values = [leaf(1, keys, 1, DIM, seed=30 + i).detach() for i, (_, keys) in enumerate(LENGTHS)]
    tokens = sum(rows for rows, _ in LENGTHS)
    q = leaf(tokens + 1, HEADS, DIM, seed=40).detach()
    pages = [-(-t.shape[1] // PAGE) for t in keys]
    caches = torch.zeros(2, sum(pages), PAGE, 1, DIM, dtype=BF16)
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for n, end in enumerate((sum(pages), pages[1])):
        table[n, : pages[n]] = torch.arange(end - 1, end - 1 - pages[n], -1)
        count = keys[n].shape[1]
        place = table[n, torch.arange(count) // PAGE].long() * PAGE + torch.arange(count) % PAGE
        arguments = {"layout": "HND"} if layout == "HND" else {}
        views = [t.transpose(1, 2) if arguments else t for t in caches]
        for cache, rows in zip(caches, (keys[n][0], values[n][0]), strict=True):
            cache.view(-1, 1, DIM)[place] = rows
    starts = torch.tensor([0, QUERIES, QUERIES + 1], dtype=torch.int32)
    lengths = torch.tensor([keys for _, keys in LENGTHS], dtype=torch.int32)
    arguments |= options | ({} if sinks is None else {"sinks": sinks})
    if out:
        arguments["out"] = torch.empty_like(q)
    result = call("paged_attention", q, *views, table, lengths, starts, **arguments)
    result, lse = result if isinstance(result, tuple) else (result, None)
    numbers = {name: options[name] for name in ("scale", "softcap") if name in options}
    left, right = options.get("window_size", (None, None))
    shares = {"padding": float((result[tokens:] != 0).any()) * 1e9}
    for n, (rows, count) in enumerate(LENGTHS):
        own = slice(int(starts[n]), int(starts[n + 1]))
        plain = q[None, own], keys[n], values[n]
        distance = torch.arange(count) - torch.arange(count - rows, count)[:, None]
        allowed = distance >= -(count if left is None else left)
        allowed &= distance <= (count if right is None else right)
        allowed &= (distance <= 0) | (not options.get("causal", True))
        allowed = allowed[None, None]
        sinks64 = None if sinks is None else sinks.double()
        exact = [t.double() for t in plain]
        want = reference.attention(*exact, allowed, **numbers, sinks=sinks64)
        scores = reference.Scores(**numbers, sinks=sinks)
        dout = torch.ones_like(plain[0])
        bounds = reference.error_bounds(*plain, dout, allowed, scores=scores)
        shares[f"out {n}"] = _share(result[None, own], want[0], bounds.out)
        if lse is not None:
            shares[f"lse {n}"] = _share(lse[None, :, own], want[1], bounds.lse)
    return shares


def written() -> dict[str, float]:
    """Rows that are copied, in both layouts; a token without a slot."""
    shares = {}
    for layout in ("NHD", "HND"):
        key, value = (leaf(3, 2, DIM, seed=50 + i).detach() for i in range(2))
        caches = torch.zeros(2, 2, PAGE, 2, DIM, dtype=BF16)
        views = [t.transpose(1, 2) if layout == "HND" else t for t in caches]
        call("write_kv_cache", key, value, *views, torch.tensor([17, -1, 3]), layout=layout)
        want = torch.zeros_like(caches)
        want[0, 1, 1], want[0, 0, 3], want[1, 1, 1], want[1, 0, 3] = (
            *(key[0], key[2]),
            *(value[0], value[2]),
        )
        # A difference of one byte is out of every bound; nothing is 0.5 of it.
        shares[layout] = 0.5 if torch.equal(caches, want) else 1e9
    return shares


def _cases(run, **named: dict) -> dict:
    return {label: functools.partial(run, **options) for label, options in named.items()}


def mask() -> BlockMask:
    is_allowed = torch.rand(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(7)) < 0.4
    is_allowed[..., 11, :] = False
    return BlockMask.from_dense(is_allowed)


MASK = mask()
TABLE = {
    "block_sparse_attention": _cases(
        blocks,
        plain={}, block_mask={"block_mask": MASK}, causal={"causal": True}, scale={"scale": 0.2},
        softcap={"softcap": 2.0}, largest_cap={"softcap": 1024.0}, sinks={"sinks": SINKS},
        lse={"return_lse": True},
        named={"schedule": "left_to_right"}, permutation={"schedule": [1, 0]},
        heads={"schedule": torch.tensor([[1, 0]])}, unordered={"deterministic": False},
        schedule={"block_mask": MASK, "schedule": shortest_first(MASK)},
        selection={"block_mask": MASK, "schedule": select(MASK)},
        all={
            "block_mask": MASK, "causal": True, "scale": 0.2, "softcap": 2.0, "sinks": SINKS,
            "schedule": "lpt", "return_lse": True,
        },
    ),
    "block_sparse_attention_varlen": _cases(
        pack,
        plain={}, causal={"causal": True}, window={"window_size": (9, 4)}, scale={"scale": 0.2},
        softcap={"softcap": 2.0}, largest_cap={"softcap": 1024.0}, sinks={"sinks": SINKS},
        lse={"return_lse": True},
        all={
            "causal": True, "window_size": (9, None), "scale": 0.2, "softcap": 2.0, "sinks": SINKS,
            "return_lse": True,
        },
    ),
    "paged_attention": _cases(
        paged,
        plain={}, all_keys={"causal": False}, window={"window_size": (9, 4)},
        right={"window_size": (9, 4), "causal": False}, scale={"scale": 0.2},
        softcap={"softcap": 2.0}, largest_cap={"softcap": 1024.0}, sinks={"sinks": SINKS},
        lse={"return_lse": True}, heads_first={"layout": "HND"}, out={"out": True},
        all={
            "window_size": (9, None), "scale": 0.2, "softcap": 2.0, "sinks": SINKS,
            "layout": "HND", "return_lse": True, "out": True,
        },
    ),
    "write_kv_cache": _cases(written, rows={}),
}  # fmt: skip
