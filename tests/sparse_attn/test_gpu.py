"""Block-sparse attention on a GPU: values, the battery, streams, graphs, SM counts.

The backward's CTAs wait for each other, so its checks are in processes with a time limit, small
shapes first; after one that hangs, none is started.  Passed on an H200: docs/attention.md.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
import subprocess
import sys

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn.config import HEAD_DIMS
from tests import contract
from tests.sparse_attn import gpu_backward
from tests.sparse_attn.gpu_cases import (
    DEVICE,
    HEADS,
    MASKS,
    SEED,
    Problem,
    check,
    exact,
    forward,
    problem,
    require_same,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Of one process: it imports, loads or compiles a few kernels (minutes on a loaded machine), and
#: runs for seconds.
LIMIT_S = 600
_hung: list[str] = []


def in_a_process(module: str, *arguments: str) -> str:
    """What ``python -m module`` prints; a failure if it fails or hangs."""
    if _hung:
        pytest.skip(f"{_hung[0]} hung")
    command = [sys.executable, "-u", "-m", f"tests.sparse_attn.{module}", *arguments]
    try:
        process = subprocess.run(
            command, cwd=contract.ROOT, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as late:
        _hung.append(" ".join((module, *arguments)))
        pytest.fail(f"no end after {LIMIT_S} s: {late.stdout!r}")
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    assert process.stdout.splitlines()[-1] == "ok"
    return process.stdout


def test_smoke():
    in_a_process("gpu_smoke")


@pytest.mark.parametrize("dim", map(str, HEAD_DIMS))
@pytest.mark.parametrize("group", gpu_backward.GROUPS, ids=lambda group: group[0].__name__)
def test_backward(group, dim):
    in_a_process("gpu_backward", dim, *(one.__name__ for one in group))


@pytest.mark.parametrize("dim", map(str, HEAD_DIMS))
def test_fresh_processes(dim):
    first, second = (in_a_process("gpu_backward", dim, "digest") for _ in range(2))
    (one,), (two,) = (re.findall("^digest .*", text, re.M) for text in (first, second))
    assert one == two


def kill_in_flight(dim: str) -> None:
    """Ends a process by SIGKILL while its backwards run on the card."""
    if _hung:
        pytest.skip(f"{_hung[0]} hung")
    command = [sys.executable, "-u", "-m", "tests.sparse_attn.gpu_killed", dim]
    with subprocess.Popen(command, cwd=contract.ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "in flight\n"
            assert child.poll() is None
        finally:
            child.kill()
        assert child.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("dim", ["64", "128", "256"])
def test_a_killed_launch_leaves_nothing_behind(dim):
    """The next process has the bytes of one before it, whatever memory it is given."""

    def digest() -> list[str]:
        return re.findall("^digest .*", in_a_process("gpu_backward", dim, "digest"), re.M)

    before = digest()
    assert len(before) == 1
    for _ in range(2):
        kill_in_flight(dim)
        assert digest() == before


# ---- the forward --------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", MASKS)
def test_forward(name, dim):
    """Against float64, with and without a softcap, in both dtypes."""
    mask = MASKS[name]()
    batch, heads, kv_heads = HEADS[dim // 32 % 3]
    for dtype, softcap in itertools.product((torch.bfloat16, torch.float16), (0.0, 3.0)):
        sizes = heads, kv_heads, max(batch, mask.shape[0]), dtype
        inputs = problem(mask, dim, *sizes, softcap)
        (want, want_lse, *_), bounds = exact(inputs)
        out, lse = forward(inputs)
        check(f"out, {dtype}, {softcap}", out, want, bounds.out)
        check(f"lse, {dtype}, {softcap}", lse, want_lse, bounds.lse)
        empty = (want_lse == -math.inf).transpose(1, 2)
        assert (contract.bits(out)[empty.cpu()] == 0).all()


def test_a_wrong_mask_is_out_of_bounds():
    """The check can fail: one key too many."""
    inputs = problem(BlockMask.causal(512, 512), 64)
    (want, *_), bounds = exact(inputs)
    out, _ = forward(inputs, BlockMask.sliding_window(512, 512, left=None, right=1).to(DEVICE))
    with pytest.raises(AssertionError):
        check("out", out, want, bounds.out)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rows_alone_and_chunks(dim):
    """batch_invariant: any cut of a prefill, down to one row, the future keys being junk."""
    length = 700
    whole = problem(BlockMask.causal(length, length), dim, heads=4, kv_heads=2)
    want = forward(whole)
    for cuts in ([1], [699], [128], [77, 200, 523], [64, 129, 130, 256]):
        for first, last in itertools.pairwise([0, *cuts, length]):
            for kv_len in {last, length}:
                k, v = whole.k[:, :kv_len].clone(), whole.v[:, :kv_len].clone()
                k[:, last:], v[:, last:] = math.nan, 3e38
                mask = BlockMask.from_rule(Band(None, first), last - first, kv_len).to(DEVICE)
                part = whole._replace(q=whole.q[:, first:last], k=k, v=v, mask=mask)
                rows = (want[0][:, first:last], want[1][..., first:last])
                require_same(forward(part), rows, f"rows {first} to {last}, {kv_len} keys")


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_batches_and_neighbours(dim):
    """Any place in any batch, the others NaN; alone."""
    inputs = problem(BlockMask.causal(300, 300), dim, heads=4, kv_heads=2, batch=3)
    want = forward(inputs)
    order = torch.tensor([2, 0, 1, 2], device=DEVICE)
    moved = inputs.part(**{n: getattr(inputs, n)[order] for n in "qkv"})
    require_same(forward(moved), [t[order] for t in want], "another order")
    for b in range(3):
        mine = [t[b : b + 1] for t in want]
        alone = inputs.part(**{n: getattr(inputs, n)[b : b + 1] for n in "qkv"})
        require_same(forward(alone), mine, "alone")
        others = inputs.part(**{n: getattr(inputs, n) for n in "qkv"})
        for t in others[:3]:
            t[torch.arange(3, device=DEVICE) != b] = math.nan
        require_same([t[b : b + 1] for t in forward(others)], mine, "among NaN")


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_padding(dim):
    """More rows and keys that do not count."""
    inputs = problem(BlockMask.causal(150, 150), dim)
    want = forward(inputs)
    for rows, keys in ((1, 0), (0, 1), (106, 106), (200, 400)):

        def padded(t: torch.Tensor, count: int, value: float) -> torch.Tensor:
            return torch.nn.functional.pad(t, (0, 0, 0, 0, 0, count), value=value)

        mask = BlockMask.from_rule(Band(None, 0), 150 + rows, 150 + keys).to(DEVICE)
        more = inputs._replace(
            q=padded(inputs.q, rows, math.nan),
            k=padded(inputs.k, keys, math.nan),
            v=padded(inputs.v, keys, -3e38),
            mask=mask,
        )
        out, lse = forward(more)
        require_same((out[:, :150], lse[..., :150]), want, f"{rows} rows, {keys} keys")


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_forms(dim):
    """The same elements as a band, as bits and as no mask: one set of bytes."""
    for make in (BlockMask.causal, BlockMask.full):
        inputs = problem(make(300, 500), dim)
        bits = BlockMask.from_dense(inputs.mask.to_dense())
        require_same(forward(inputs, bits), forward(inputs), "bits")


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_repeats_beside_other_work(dim):
    """200 repeats while another stream keeps the GPU busy, on four streams in turn."""
    inputs = problem(BlockMask.causal(2048, 2048), dim, heads=16, kv_heads=8)
    want = forward(inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(200):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        with torch.cuda.stream(streams[i % 4]):
            out, lse = forward(inputs)
            wrong = (out.view(torch.int16) != want[0].view(torch.int16)).sum()
            wrong += (lse.view(torch.int32) != want[1].view(torch.int32)).sum()
        streams[i % 4].synchronize()
        differing += wrong
    assert int(differing) == 0


def test_strides_are_copied():
    """Strides that TMA cannot address: the bytes of packed tensors."""
    inputs = problem(BlockMask.causal(300, 300), 64, heads=4, kv_heads=2, batch=2)
    want = forward(inputs)
    packed = torch.cat([inputs.q, inputs.k, inputs.v], dim=2)
    q, k, v = packed.split([4, 2, 2], dim=2)
    require_same(forward(inputs._replace(q=q, k=k, v=v)), want, "slices of one projection")
    wide = torch.cat([packed, packed[..., :1]], dim=3)[..., :64]
    assert wide.stride(2) == 65
    q, k, v = wide.split([4, 2, 2], dim=2)
    require_same(forward(inputs._replace(q=q, k=k, v=v)), want, "rows of 65")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_inputs_device_is_used():
    inputs = problem(BlockMask.causal(300, 300), 64)
    want = forward(inputs)
    moved = Problem(*(t.to("cuda:1") for t in inputs[:5]), inputs.mask.to("cuda:1"))
    got = forward(moved)
    assert got[0].device == torch.device("cuda:1")
    require_same([t.cpu() for t in got], [t.cpu() for t in want], f"cuda:1, seed {SEED}")


def test_sequences_have_their_bytes_wherever_a_buffer_holds_them():
    in_a_process("gpu_sequences")


def test_sequences_of_packs_have_their_bytes():
    """128 of the 512 that the script alone draws."""
    in_a_process("gpu_packs", "128")


def test_packs_by_offsets_on_the_card():
    """1,000 of the 10,000 tables that the script alone draws."""
    in_a_process("gpu_pack_tables", "1000")


def test_sinks():
    in_a_process("gpu_sinks")


def test_masks_by_query_head_in_groups():
    in_a_process("gpu_stacked")
