"""Brute force for block masks: block classes by loops over NumPy elements, and drawn cases."""

from __future__ import annotations

import numpy as np
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.bits import Bits, unpack

BLOCK_SIZES = [(64, 128), (128, 128), (16, 32)]


def dense_of(allowed, q_len, kv_len, batch=1, heads=1) -> np.ndarray:
    """``allowed(b, h, q, kv)`` on NumPy index arrays -> bool [batch, heads, q_len, kv_len]."""
    b, h, q, kv = np.ogrid[:batch, :heads, :q_len, :kv_len]
    value = np.asarray(allowed(b, h, q, kv), dtype=bool)
    return np.broadcast_to(value, (batch, heads, q_len, kv_len)).copy()


def block_lists(dense: np.ndarray, block_size) -> list:
    """Per (b, h, query block) the list [(key block, is full)], by looking at every block."""
    batch, heads, q_len, kv_len = dense.shape
    bq, bk = block_size
    out = []
    for b in range(batch):
        for h in range(heads):
            for q in range(0, q_len, bq):
                row = []
                for kv in range(0, kv_len, bk):
                    block = dense[b, h, q : q + bq, kv : kv + bk]
                    if block.any():
                        row.append((kv // bk, bool(block.all())))
                out.append(row)
    return out


def classes(lists: list, columns: int) -> np.ndarray:
    """uint8 [rows, columns] of lists like ``block_lists``: 0 empty, 1 partial, 2 full."""
    out = np.zeros((len(lists), columns), np.uint8)
    for row, entries in enumerate(lists):
        for column, is_full in entries:
            out[row, column] = 2 if is_full else 1
    return out


def check_lists(count, index, full, want, shape) -> None:
    """The tensors of one side say ``want``, ascending and compact, zero in unused places."""
    assert count.dtype == index.dtype == torch.int32 and full.dtype == torch.bool
    longest = max([1, *(len(row) for row in want)])
    assert tuple(count.shape) == shape
    assert tuple(index.shape) == tuple(full.shape) == (*shape, longest)
    counts, indices = count.flatten().tolist(), index.reshape(-1, longest).tolist()
    flags = full.reshape(-1, longest).tolist()
    assert len(counts) == len(want)
    for n, cols, is_full, row in zip(counts, indices, flags, want, strict=True):
        assert list(zip(cols[:n], is_full[:n], strict=True)) == row
        assert cols[n:] == [0] * (longest - n) and not any(is_full[n:])


def check_exact(mask: BlockMask, dense: np.ndarray, block_size) -> None:
    """Lists, transpose, element rule and dense views of ``mask`` are those of ``dense``."""
    q_len, kv_len = dense.shape[2:]
    mb, nb = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    assert (mask.q_len, mask.kv_len, mask.block_size) == (q_len, kv_len, tuple(block_size))
    assert (mask.num_q_blocks, mask.num_kv_blocks) == (mb, nb)
    assert mask.shape == dense.shape[:2]
    want = block_lists(dense, block_size)
    check_lists(mask.kv_count, mask.kv_index, mask.kv_full, want, (*mask.shape, mb))
    flipped = block_lists(dense.transpose(0, 1, 3, 2), block_size[::-1])
    check_lists(mask.q_count, mask.q_index, mask.q_full, flipped, (*mask.shape, nb))

    index = [torch.from_numpy(axis) for axis in np.ogrid[tuple(slice(n) for n in dense.shape)]]
    assert np.array_equal(mask.rule.evaluate(*index).expand(dense.shape).numpy(), dense)
    assert np.array_equal(mask.to_dense().numpy(), dense)
    if isinstance(mask.rule, Bits):
        assert mask.rule.grid == mask.grid
        # Nothing is stored outside the lengths, and no tile but those of partial blocks.
        in_full = sum(
            min(block_size[0], q_len - row % mb * block_size[0])
            * min(block_size[1], kv_len - col * block_size[1])
            for row, entries in enumerate(want)
            for col, is_full in entries
            if is_full
        )
        stored = unpack(mask.rule.words, mask.rule.words.shape[2] * 32).sum()
        assert int(stored) == int(dense.sum()) - in_full
        assert mask.rule.words.shape[0] == mask.num_blocks - mask.num_full
    kinds = classes(want, nb)
    assert np.array_equal(mask.dense_blocks().numpy(), kinds.reshape(*mask.shape, mb, nb))
    listed = sum(len(row) for row in want)
    assert mask.num_blocks == listed and mask.num_full == sum(f for row in want for _, f in row)
    assert mask.density() == (listed / kinds.size if kinds.size else 0)


def draw_sizes(seed: int, count: int, block_size, square=False):
    """Lengths up to a few blocks; one draw in three is a multiple of the blocks."""
    rng = np.random.default_rng(seed)
    top = 4 * max(block_size)
    for i in range(count):
        q_len, kv_len = (int(n) for n in rng.integers(1, top, 2))
        if i % 3 == 2:
            q_len, kv_len = (
                -(-n // b) * b for n, b in zip((q_len, kv_len), block_size, strict=True)
            )
        kv_len = q_len if square else kv_len
        yield q_len, kv_len, rng


def _cases(block_size, seed, count):
    """(name, mask, dense) of every constructor over drawn sizes and parameters."""
    for q_len, kv_len, rng in draw_sizes(seed, count, block_size):
        off = kv_len - q_len
        left, right = (int(x) for x in rng.integers(0, 200, 2))
        step, prefix = int(rng.integers(1, 7)), int(rng.integers(0, kv_len + 1))
        size = {"block_size": block_size}
        here = (q_len, kv_len)
        yield "full", BlockMask.full(*here, **size), dense_of(lambda b, h, q, k: q > -1, *here)
        yield (
            "causal",
            BlockMask.causal(*here, block_size),
            dense_of(lambda b, h, q, k, off=off: k <= q + off, *here),
        )
        for lo, hi in ((left, right), (left, None), (None, right), (0, 0)):

            def window(b, h, q, k, lo=lo, hi=hi, off=off):
                ok = (q == q) & (k == k)
                ok = ok if lo is None else ok & (k >= q + off - lo)
                return ok if hi is None else ok & (k <= q + off + hi)

            def dilated(b, h, q, k, window=window, step=step, off=off):
                return window(b, h, q, k) & (np.abs(q + off - k) % step == 0)

            yield (
                f"window {lo} {hi}",
                BlockMask.sliding_window(*here, left=lo, right=hi, **size),
                dense_of(window, *here),
            )
            yield (
                f"dilated {lo} {hi} {step}",
                BlockMask.dilated_window(*here, left=lo, right=hi, dilation=step, **size),
                dense_of(dilated, *here),
            )
        yield (
            f"prefix {prefix}",
            BlockMask.prefix_lm(*here, prefix=prefix, **size),
            dense_of(lambda b, h, q, k, off=off, n=prefix: (k < n) | (k <= q + off), *here),
        )
        many = rng.integers(0, kv_len + 1, 3)
        yield (
            f"prefix {many}",
            BlockMask.prefix_lm(*here, prefix=torch.from_numpy(many), **size),
            dense_of(lambda b, h, q, k, off=off, n=many: (k < n[b]) | (k <= q + off), *here, 3),
        )
        yield from _document_cases(q_len, rng, block_size)
        density = rng.choice([0.0005, 0.02, 0.5, 0.9995])
        for shape in ((1, 1), (2, 3)):
            dense = rng.random((*shape, *here)) < density
            mask = BlockMask.from_dense(torch.from_numpy(dense), **size)
            yield f"dense {shape} {density}", mask, dense


def _document_cases(length, rng, block_size):
    cuts = np.sort(rng.integers(0, length + 1, int(rng.integers(0, 6))))
    offsets = np.concatenate([[0], cuts, [length]])
    runs = np.repeat(rng.permutation(len(offsets) - 1) - 2, np.diff(offsets))
    scattered = rng.integers(-3, int(rng.integers(-2, 40)), (2, length))
    size = {"block_size": block_size}
    same = dense_of(lambda b, h, q, k: runs[q] == runs[k], length, length)
    yield "document runs", BlockMask.document(torch.from_numpy(runs), **size), same
    yield "cu_seqlens", BlockMask.document(cu_seqlens=torch.from_numpy(offsets), **size), same
    yield (
        "document scattered",
        BlockMask.document(torch.from_numpy(scattered), **size),
        dense_of(lambda b, h, q, k: scattered[b, q] == scattered[b, k], length, length, 2),
    )


def battery(block_size, seed: int, count: int) -> None:
    """Every constructor against brute force; an AssertionError names the case."""
    for name, mask, dense in _cases(block_size, seed, count):
        try:
            check_exact(mask, dense, block_size)
        except AssertionError as error:
            raise AssertionError(f"{name} at {dense.shape} {block_size}: {error}") from error
