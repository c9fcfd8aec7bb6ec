"""Block-sparse attention on a GPU: values, the battery, streams, packs, sinks.

The backward has a file of its own, test_backward_gpu.py; sinks and masks by head have cases of a
card in test_sinks.py and test_stacked.py.  Passed on an H200: docs/attention.md.
"""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, launch
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.config import HEAD_DIMS, VALUE_DIMS
from tests import contract
from tests.contract import same_bytes
from tests.sparse_attn import (
    pack_cases,
    pack_tables,
    sequence_cases,
    test_fwd_sm90_battery,
    test_sequences,
)
from tests.sparse_attn.gpu_cases import (
    DEVICE,
    HEADS,
    MASKS,
    NEEDS_GPU,
    SEED,
    Problem,
    captured,
    check,
    exact,
    forward,
    problem,
    require_on_streams,
    require_same,
)
from tests.sparse_attn.simulated_fwd import Case
from tests.sparse_attn.sink_cases import drawn_sinks
from tests.sparse_attn.test_fwd_sm90_battery import (  # noqa: F401
    test_forms,
    test_neighbours,
    test_other_rows_of_the_mask,
    test_transforms,
)
from tests.sparse_attn.test_sequences import (  # noqa: F401
    test_a_cache_that_drops_its_oldest_keys,
    test_neighbours_in_a_varlen_batch_do_not_show,
    test_packs,
    test_padding_on_either_side,
)

pytestmark = [pytest.mark.gpu, NEEDS_GPU]
NIGHT = pytest.mark.nightly
#: The fixture of the tests of sequences.
dim = test_sequences.dim


@pytest.fixture(autouse=True)
def on_card(monkeypatch):
    """Tests and cases that are shared with a CPU have their tensors on the card."""
    monkeypatch.setattr(pack_cases, "DEVICE", DEVICE)
    monkeypatch.setattr(test_fwd_sm90_battery, "run", run_there)


@torch.no_grad()
def run_there(case: Case, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward's battery runs a case by the op on the card."""
    operands = [t.to(DEVICE) for t in (case.q, case.k, case.v)]
    options = {"scale": case.scale, "softcap": case.softcap, "return_lse": True}
    out = ck.block_sparse_attention(*operands, case.mask.to(DEVICE), **options)
    return tuple(t.cpu() for t in out)


def process(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-u", "-m", "tests.sparse_attn.gpu_process", *arguments]
    return subprocess.Popen(command, cwd=contract.ROOT, stdout=subprocess.PIPE, text=True)


def digest(dim: str) -> str:
    """That of the gradients in a fresh process."""
    with process("digest", dim) as child:
        text, _ = child.communicate(timeout=600)
        assert child.returncode == 0 and text.startswith("digest ")
        return text


@pytest.mark.parametrize("dim", list(map(str, HEAD_DIMS)))
def test_fresh_processes_and_killed_ones(dim):
    """The next process has the bytes of one before it, whatever memory it is given."""
    before = digest(dim)
    assert digest(dim) == before
    for _ in range(2):
        with process("endless", dim) as child:
            try:
                assert child.stdout.readline() == "in flight\n"
                assert child.poll() is None
            finally:
                child.kill()
            assert child.wait(60) == -signal.SIGKILL
        assert digest(dim) == before


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


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_repeats_beside_other_work(dim):
    """On four streams in turn, while another one keeps the GPU busy."""
    inputs = problem(BlockMask.causal(2048, 2048), dim, heads=16, kv_heads=8)
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(other):
            noise @ noise
        return forward(inputs)

    require_on_streams(call, forward(inputs), streams=4, calls=200)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_inputs_device_is_used():
    inputs = problem(BlockMask.causal(300, 300), 64)
    want = forward(inputs)
    moved = Problem(*(t.to("cuda:1") for t in inputs[:5]), inputs.mask.to("cuda:1"))
    got = forward(moved)
    assert got[0].device == torch.device("cuda:1")
    require_same([t.cpu() for t in got], [t.cpu() for t in want], f"cuda:1, seed {SEED}")


# ---- sequences of a buffer -----------------------------------------------------------------------

COLUMNS, PROMPT, STEPS = 700, 131, 5
PADS = (0, 1, 60, 128, 130)


@torch.no_grad()
@pytest.mark.parametrize("dim", VALUE_DIMS)
def test_a_graph_of_decoding(dim):
    """A static cache, left padding: spans on the card, on the CPU, and steps of one CUDA graph."""
    generator = torch.Generator(device=DEVICE).manual_seed(dim)
    fresh = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    batch = len(PADS)
    k, v = (torch.randn(batch, COLUMNS, 2, n, **fresh) for n in (dim, VALUE_DIMS[dim]))
    real = torch.arange(COLUMNS, device=DEVICE) >= torch.tensor(PADS, device=DEVICE)[:, None]

    def attend(q: torch.Tensor, offset: int | torch.Tensor, device: str) -> torch.Tensor:
        sizes = (batch, q.shape[1], COLUMNS)
        spans = api.kv_ranges(None, real, offset, 0, sizes, packed=False, device=device)
        return api.sequence_attention(q, k, v, spans)

    prompt = torch.randn(batch, PROMPT, 8, dim, **fresh)
    assert same_bytes(attend(prompt, 0, DEVICE), attend(prompt, 0, "cpu"))
    queries = torch.randn(STEPS, batch, 1, 8, dim, **fresh)
    query, position = queries[0].clone(), torch.full((), PROMPT, device=DEVICE)
    replay, out = captured(lambda: attend(query, position, DEVICE))
    for step in range(STEPS):
        query.copy_(queries[step])
        position.fill_(PROMPT + step)
        replay()
        assert same_bytes(out, attend(queries[step], PROMPT + step, "cpu")), step


# ---- packs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [0, 32, 64, 96, *(pytest.param(n, marks=NIGHT) for n in range(128, 512, 32))]
)
def test_drawn_packs(first):
    """Each pack against its sequences alone; every sixteenth has some of up to 2000 tokens."""
    heads = [(2, 1), (4, 4), (8, 2), (3, 1)]
    for seed in range(first, first + 32):
        lengths = pack_cases.lengths_of(seed)
        if seed % 16 == 15:
            lengths = np.random.default_rng(seed).integers(0, 2000, 4).tolist()
        dtype = (torch.bfloat16, torch.float16)[seed // 5 % 2]
        of_seed = dtype, heads[seed // len(HEAD_DIMS) % 4], HEAD_DIMS[seed % len(HEAD_DIMS)]
        rule = pack_cases.RULES[seed % len(pack_cases.RULES)]
        drawn = pack_cases.drawn(sum(lengths), seed, *of_seed)
        out = pack_cases.packed(drawn, lengths, *rule)
        assert not pack_cases.differing(out, pack_cases.alone(drawn, lengths, *rule)), seed


def test_a_padded_batch_is_a_launch_for_each():
    places = (40, sequence_cases.S + 40 - 137), (sequence_cases.S, 137), sequence_cases.S + 40
    out = sequence_cases.behind(*places)
    with mock.patch.object(attention_op, "is_one_launch", lambda t: False):
        want = sequence_cases.behind(*places)
    assert not any(map(sequence_cases.differing, out, want))


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=NIGHT) for n in range(1000, 10_000, 1000))]
)
def test_tables_of_packs(first):
    """Table and tickets against the oracle, every seventh of bounds that no pack has."""
    for seed in range(first, first + 1000):
        case = (pack_tables.wild if seed % 7 == 6 else pack_tables.drawn)(seed, DEVICE)
        if not case.tokens:
            continue
        want = pack_tables.oracle(case)
        q = torch.empty(1, case.tokens, case.kv_heads * case.group, 1, device=DEVICE)
        plan = launch.plan_varlen_tables(case.bounds, q, case.kv_heads, case.window)
        out, tickets = plan.run(case.bounds)
        alone, _ = launch.plan_varlen_tables(case.bounds, q).run(case.bounds)
        used = int(tickets[-1, 0])
        assert same_bytes(out.cpu(), torch.from_numpy(want.table)), case
        assert same_bytes(alone, out), case
        assert same_bytes(tickets[:used].cpu(), torch.from_numpy(want.tickets)), case


#: Sequences of a graph's packs: as many, of other lengths; the last two leave tokens behind them.
TOKENS = 1500
PACKS = (
    *([300, 0, 129, 571, 500], [1, 1496, 1, 1, 1], [0, 0, 0, 0, 1500]),
    *([128, 128, 256, 0, 700], [0, 0, 5, 0, 0]),
)


@pytest.mark.parametrize("rule", [pack_cases.RULES[0], pack_cases.RULES[1], (False, (200, 130))])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_offsets_on_the_card(dim, rule):
    """No pass waits for the card once compiled; replays of its graph read other offsets."""
    tensors = pack_cases.drawn(TOKENS, dim, heads=(4, 2), dim=dim)
    causal, window = rule
    options = {"causal": causal, "window_size": window, "return_lse": True}

    def attended(cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
        return pack_cases.differentiated(
            lambda *t: ck.block_sparse_attention_varlen(*t, cu_seqlens, **options), tensors
        )

    inputs = [pack_cases.offsets(lengths).to(DEVICE) for lengths in PACKS]
    want = attended(inputs[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attended(inputs[0])
        attended(inputs[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pack_cases.differing(out, want) == []
    cu_seqlens = inputs[0].clone()
    replay, out = captured(lambda: attended(cu_seqlens))
    for lengths, offsets in zip(PACKS, inputs, strict=True):
        cu_seqlens.copy_(offsets)
        replay()
        inside, behind = slice(sum(lengths)), slice(sum(lengths), None)
        want = pack_cases.alone(pack_cases.cut(tensors, inside), lengths, *rule)
        assert pack_cases.differing(pack_cases.cut(out, inside), want) == [], lengths
        out_of_none, lse, *grads = pack_cases.cut(out, behind)
        assert not any(t.view(torch.int16).any() for t in (out_of_none, *grads)), lengths
        assert (lse == -torch.inf).all(), lengths


# ---- sinks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", VALUE_DIMS)
def test_sinks_of_packs_and_spans(dim):
    """A pack; the last rows of two sequences, one behind padding, by the kernel and by runs."""
    sinks, lengths = drawn_sinks(4).detach().to(DEVICE), [130, 1, 61, 700]
    inputs = pack_cases.drawn(sum(lengths), heads=(4, 2), dim=dim)
    out = pack_cases.packed(inputs, lengths, sinks=sinks)
    assert pack_cases.differing(out, pack_cases.alone(inputs, lengths, sinks=sinks)) == []
    padding = (torch.arange(300) >= torch.tensor([[0], [11]])).to(DEVICE)
    for rows in (1, 5, 200):
        g = torch.Generator().manual_seed(rows)
        sizes = (rows, 4, dim), (300, 2, dim), (300, 2, VALUE_DIMS[dim])
        q, k, v = (torch.randn(2, *n, generator=g).bfloat16().to(DEVICE) for n in sizes)
        tables = (
            api.kv_ranges(None, padding, 300 - rows, 0, (2, rows, 300), packed=False, device=where)
            for where in ("cpu", DEVICE)
        )
        with torch.no_grad():
            out = [api.sequence_attention(q, k, v, table, sinks=sinks) for table in tables]
        assert same_bytes(*out), rows
