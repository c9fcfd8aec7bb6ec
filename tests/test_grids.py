"""CUDA ends a grid's y and z at 65,535: no size that a user chooses may lie there."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import cute_kernels
from cute_kernels.linear_attn.config import DELTA_SIZES, MAX_HEADS
from cute_kernels.mhc import config as mhc
from cute_kernels.moe import config as moe
from cute_kernels.sparse_attn.paged import launch as paged

PACKAGE = Path(cute_kernels.__file__).parent
LIMIT, LARGE = 65_535, 2**20
#: SMs of a device, which persistent grids have at most.  An H200 has 132.
SMS = 132


def _row_grid() -> int:
    device = pytest.importorskip("cute_kernels.sparse_attn.device.tile_scheduler")
    return max(device.row_grid(LARGE, LARGE, LARGE)[1:])


def _paged_tiles() -> int:
    device = pytest.importorskip("cute_kernels.sparse_attn.device.paged_tiles")
    # A tile is 64 rows of q, of at least 128 bytes: 8 TB of them.
    return max(1 << device.TILE_BITS, (2**30 >> device.TILE_BITS) + 1)


def _pack_slices() -> int:
    return pytest.importorskip("cute_kernels.sparse_attn.launch")._MOST_SLICES


def _shared_keys() -> int:
    """Tokens and KV heads of the kernels in which SMs share the keys of a row."""
    sizes = [n for n in range(1, 2 * SMS) if any(map(_shares, (n, 1), (1, n)))]
    assert not any(map(_shares, (LARGE, 1), (1, LARGE)))
    return max(sizes)


def _shares(tokens: int, kv_heads: int) -> bool:
    values = torch.empty(1, 1, kv_heads, 64, device="meta")
    with mock.patch.object(paged, "most_ctas", lambda device: SMS):
        return paged.shares_keys((tokens, kv_heads), values, paged.LONG_KEYS, values.device)


#: Source of a grid whose y or z is no number -> the most that they can be.
BOUNDS = {
    "tile_scheduler.row_grid(batches, heads, tiles)": _row_grid,
    "paged_tiles.grid(mK.shape[2], tiles)": _paged_tiles,
    "(chunks, slices, 1)": _pack_slices,
    "(self.config.value_dim // columns, mV.shape[2], rows.mO.shape[0])": _shared_keys,
    "(*self.cluster, clusters)": lambda: SMS,
    "(1, 1, ctas)": lambda: SMS,
    "(sequences, mV.shape[1], 1)": lambda: MAX_HEADS,
    # v heads, and parts of V.
    **dict.fromkeys(
        (
            f"(mOffsets.shape[0] - 1, {v}.shape[1], {v}.shape[2] // COLUMNS)"
            for v in ("mV", "mDout")
        ),
        lambda: max(MAX_HEADS, DELTA_SIZES[1] // 64),
    ),
    "(cute.ceil_div(mInto.shape[0], COLUMNS), 1 + self.pair, 1)": lambda: 2,
    # Columns of phi, and the warps of a CTA.
    "(cute.ceil_div(size, self.threads), rows, 1)": lambda: mhc.mappings(max(mhc.STREAMS)) + 32,
}


def _grids() -> Iterator[str]:
    """Grids of the CuTe kernels whose y and z are not numbers."""
    for path in (*PACKAGE.glob("*/kernel_*.py"), PACKAGE / "dsl" / "product.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "grid":
                sizes = node.value.elts[1:] if isinstance(node.value, ast.Tuple) else [node.value]
                if not all(isinstance(size, ast.Constant) for size in sizes):
                    yield ast.unparse(node.value)


def test_bounds_name_every_grid():
    assert set(_grids()) == set(BOUNDS)


@pytest.mark.parametrize("grid", BOUNDS)
def test_bounds(grid):
    assert BOUNDS[grid]() <= LIMIT


# ---- Triton --------------------------------------------------------------------------------------


class Recorder:
    """Stands for a module of kernels: keeps the grids of launches."""

    def __init__(self):
        self.grids = {}

    def __getattr__(self, kernel: str):
        recorder = mock.MagicMock()
        recorder.__getitem__ = lambda _, grid: self.grids.update({kernel: grid}) or mock.Mock()
        return recorder


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _wide_launches() -> dict[str, tuple[int, ...]]:
    """Grids of two dimensions at the largest sizes that the checks take."""
    from cute_kernels.linear_attn import op_delta, op_selective, op_ssd
    from cute_kernels.linear_attn.config import MAX_CHANNELS
    from cute_kernels.linear_attn.tensors import (
        Conv,
        ConvGradients,
        DeltaGradients,
        DeltaRecord,
        DeltaRule,
        Gate,
        GateGradients,
        Sequences,
        StateSpace,
        StateSpaceGradients,
        StepOptions,
    )
    from cute_kernels.linear_attn.triton import (
        delta,
        delta_backward,
        delta_step,
        gate,
        selective,
        ssd,
        ssd_backward,
    )
    from cute_kernels.linear_attn.triton import launch as linear_attn
    from cute_kernels.moe.triton import routing
    from cute_kernels.rowwise.triton import launch as rowwise

    wide, recorder = 2**31 - 1, Recorder()
    positions = _meta(3, moe.MAX_EXPERTS, dtype=torch.int32)
    rows, y = _meta(3 * moe.MAX_EXPERTS, wide), _meta(3, wide)
    offsets = _meta(2, dtype=torch.int32)
    with contextlib.ExitStack() as stack:
        linear = delta, delta_backward, delta_step, gate, linear_attn, selective, ssd, ssd_backward
        for module in (*linear, routing, rowwise):
            stack.enter_context(mock.patch.object(module, "kernels", recorder))
        stack.enter_context(mock.patch("torch.cuda.device", lambda _: contextlib.nullcontext()))
        routing.gather(y, offsets, positions[0], positions)
        routing.combine(rows, None, offsets, positions)
        routing.combine_backward(y, rows, positions.float(), offsets, positions[0], positions)
        rowwise.gated_rows(_meta(3, 2 * wide), "silu")
        pack, weight = _meta(3, MAX_CHANNELS), _meta(MAX_CHANNELS, 4)
        operands = Conv(pack, weight, None, _meta(1, MAX_CHANNELS, 3)), Sequences(3, 3, None), True
        linear_attn.conv(*operands, pack)
        sums = _meta(MAX_CHANNELS, 4, dtype=torch.float32)
        gradients = ConvGradients(pack, sums, None, operands[0].initial)
        linear_attn.conv_backward(pack, *operands, gradients)
        heads = sums[:, 0]
        gradients = GateGradients(None, heads, None)
        gate.decay_gate_backward(pack, Gate(pack, heads, None), operands[1], None, gradients)
        v, decay = _meta(1, wide, MAX_HEADS, 128), _meta(wide, MAX_HEADS, dtype=torch.float32)
        rows = DeltaRule(v, v, v, decay[None], decay[None], None)
        saved = op_delta.RULE.saved_tensors(rows, wide, on_cpu=False)
        rule = op_delta.RULE.rows_of(rows), Sequences(wide, 1, None), 1.0
        delta.delta_rule(*rule, v[0], None, saved)
        delta_backward.delta_rule_backward(v[0], None, *rule, saved, DeltaGradients(*[None] * 6))
        rows = rows._replace(g=_meta(1, wide, MAX_HEADS, 128, dtype=torch.float32))
        saved = op_delta.RULE.saved_tensors(rows, wide, on_cpu=False)
        by_channel = op_delta.RULE.rows_of(rows), *rule[1:]
        delta.delta_rule(*by_channel, v[0], None, saved)
        gradients = DeltaGradients(*[None] * 6)
        delta_backward.delta_rule_backward(v[0], None, *by_channel, saved, gradients)
        record = DeltaRecord((v,) * 5, (v,) * 3, v, *(decay,) * 4, 64, 0)
        delta_step.delta_step(rule[0], 1, None, None, 1.0, v[0], record)
        x, A = _meta(1, wide, MAX_HEADS, 64), decay[0]
        scan = StateSpace(x[0], decay, A, v[0], v[0], x[0, 0], None, A, None), rule[1]
        saved = op_ssd.SCAN.saved_tensors(scan[0]._replace(x=x, B=v), wide, on_cpu=False)
        scan = *scan, StepOptions(True, 0.0, 1.0)
        ssd.ssd_scan(*scan, x[0], None, saved)
        gradients = StateSpaceGradients(*[None] * 9)
        ssd_backward.ssd_scan_backward(x[0], None, *scan, saved, gradients)
        u, B, A = _meta(1, MAX_HEADS, wide), _meta(1, 8, wide), _meta(MAX_HEADS, 8).float()
        scan = op_selective.SCAN.rows_of(StateSpace(u, u, A, B, B, None, None, None, None))
        saved = op_selective.SCAN.saved_tensors(scan._replace(x=u), wide, on_cpu=False)
        scan = scan, Sequences(wide, 1, None), StepOptions(True, 0.0, 1.0)
        selective.selective_scan(*scan, scan[0].x, None, saved)
        selective.selective_scan_backward(scan[0].x, None, *scan, saved, gradients)
        table = _meta(1, 1, 1, wide - 1)
        rowwise.rotary(_meta(1, 1, 1, wide), table, table, False)
    return recorder.grids


def test_triton():
    pytest.importorskip("triton")
    launches = {
        node.value.attr
        for path in PACKAGE.glob("*/triton/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) > 1
        and node.value.attr.endswith("_kernel")
    }
    grids = _wide_launches()
    assert {kernel for kernel, grid in grids.items() if len(grid) > 1} == launches
    assert all(max(grid[1:], default=0) <= LIMIT for grid in grids.values()), grids
