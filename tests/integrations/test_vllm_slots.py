"""Slots of requests in records, through a scheduler's steps, have the bytes of one pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ContractError
from cute_kernels.integrations.vllm.slots import Slots, StatefulLayer, spare_slots, watch
from tests.contract import same_bytes

BLOCK, BLOCKS, RUNNING, CHANNELS = 64, 40, 3, 128


class Layer(StatefulLayer):
    """A layer of the gated delta rule, and vLLM's pages of it."""

    def __init__(self, count: int) -> None:
        heads = {"heads": (2, 4), "sizes": (16, 16), "conv": (CHANNELS, 4)}
        self.cache = ck.LinearAttentionCache(1, count, **heads)
        shapes = (3, CHANNELS), (4, 16, 16)
        self.kv_cache = [torch.full((BLOCKS, *shape), float("nan")) for shape in shapes]

    def run(self, rows, slots, offsets) -> torch.Tensor:
        """Convolve the first of the rows, and apply the rule with it as v."""
        x, q, k, g, beta = (t[None] for t in rows)
        options = {"cu_seqlens": offsets, "slots": slots}
        x = self.cache[0].causal_conv1d(x.mT, *taps(), "silu", **options).mT
        v = x[..., :64].unflatten(-1, (4, 16))
        return self.cache[0].gated_delta_rule(q, k, v, g, beta, **options)[0]


def taps() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(CHANNELS, 4, generator=generator), torch.zeros(CHANNELS)


def rows_of(prefix: int, seed: int, length: int) -> tuple[torch.Tensor, ...]:
    """Random rows; the first ``prefix`` are the same for all seeds."""
    parts = []
    for drawn, n in ((0, prefix), (seed, length - prefix)):
        g = torch.Generator().manual_seed(drawn)
        x, q, k = (torch.randn(n, *s, generator=g) for s in ((CHANNELS,), (2, 16), (2, 16)))
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
        decay, beta = (torch.rand(n, 4, generator=g) for _ in "gb")
        parts.append((x, q, k, -decay, beta))
    return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))


def whole(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, q, k, g, beta = (t[None] for t in rows)
    x = ck.causal_conv1d_fn(x.mT, *taps(), activation="silu").mT
    v = x[..., :64].unflatten(-1, (4, 16))
    return ck.chunk_gated_delta_rule(q, k, v, g, beta)[0][0]


def step(new=(), cached=(), resumed=(), finished=(), preempted=(), counts=None) -> SimpleNamespace:
    """A ``SchedulerOutput``; new and cached: (name, blocks of each group, computed tokens)."""
    news = [SimpleNamespace(req_id=n, block_ids=b, num_computed_tokens=c) for n, b, c in new]
    names, blocks, computed = ([*t] for t in zip(*cached, strict=True)) if cached else ([], [], [])
    known = SimpleNamespace(
        req_ids=names, new_block_ids=blocks, num_computed_tokens=computed,
        resumed_req_ids=set(resumed),
    )  # fmt: skip
    return SimpleNamespace(
        scheduled_new_reqs=news, scheduled_cached_reqs=known, finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None, num_scheduled_tokens=counts or {},
    )  # fmt: skip


def bound(block_size: int | None = BLOCK) -> tuple[Slots, dict[str, Layer]]:
    layers = {"a": Layer(RUNNING + 2), "b": Layer(RUNNING + 2)}
    slots = Slots(layers, RUNNING, RUNNING + 2)
    groups = [SimpleNamespace(layer_names=names) for names in (["a"], ["attention"], ["b"])]
    slots.bind(SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups), block_size)
    return slots, layers


def run(slots: Slots, layers: dict[str, Layer], output: SimpleNamespace, blocks, pieces):
    """One step; blocks, pieces: of each sequence, by layer and its rows.  What both layers give."""
    slots.begin(output)
    counts = torch.tensor([0, *(len(rows[0]) for rows in pieces)])
    packed = [torch.cat(t) for t in zip(*pieces, strict=True)]
    outs = [
        layer.run(packed, slots.of_blocks(torch.tensor(blocks[name])), counts.cumsum(0))
        for name, layer in layers.items()
    ]
    slots.end(output)
    assert same_bytes(*outs)
    return outs[0].split(counts[1:].tolist())


def cut(rows, start: int, stop: int):
    return [t[start:stop] for t in rows]


def test_sequences_have_the_bytes_of_one_pass_preempted_or_behind_a_prefix():
    slots, layers = bound()
    first, second = rows_of(128, 1, 150), rows_of(128, 2, 200)
    wholes = whole(first), whole(second)
    # The first to the end of its second block, beside one token of another request.
    other = rows_of(0, 3, 3)
    new = [("first", ([1], [2], [3]), 0), ("other", ([4], [5], [6]), 0)]
    out = run(
        slots, layers, step(new, counts={"first": 64, "other": 1}),
        {"a": [1, 4], "b": [3, 6]}, [cut(first, 0, 64), cut(other, 0, 1)],
    )  # fmt: skip
    assert same_bytes(out[0], wholes[0][:64])
    cached = [("first", ([7], [8], [9]), 64), ("other", None, 1)]
    out = run(
        slots, layers, step(cached=cached, counts={"first": 64, "other": 1}),
        {"a": [7, 4], "b": [9, 6]}, [cut(first, 64, 128), cut(other, 1, 2)],
    )  # fmt: skip
    assert same_bytes(out[0], wholes[0][64:128])
    # The second begins behind the 128 tokens they share, as the first goes on in its next block.
    new = [("second", ([0, 7, 10], [2, 8, 11], [0, 9, 12]), 128)]
    cached = [("first", ([13], [14], [15]), 128)]
    out = run(
        slots, layers, step(new, cached, counts={"second": 5, "first": 22}),
        {"a": [10, 13], "b": [12, 15]}, [cut(second, 128, 133), cut(first, 128, 150)],
    )  # fmt: skip
    assert same_bytes(out[0], wholes[1][128:133])
    assert same_bytes(out[1], wholes[0][128:])
    # Preempted, and resumed from nothing, in other blocks and beside rows of padding.
    run(slots, layers, step(finished=["first"], preempted=["second"]), {"a": [4], "b": [6]},
        [cut(other, 2, 3)])  # fmt: skip
    cached = [("second", ([0, 0, 0, 16], [17, 20, 21, 22], [0, 0, 0, 18]), 0)]
    out = run(
        slots, layers, step(cached=cached, resumed=["second"], counts={"second": 200}),
        {"a": [16, 0], "b": [18, -1]}, [second, cut(other, 0, 1)],
    )  # fmt: skip
    assert same_bytes(out[0], wholes[1])


def test_slots_come_back_and_rows_of_padding_have_others():
    slots, _ = bound(None)
    assert slots.of_blocks(torch.tensor([0, 0])).tolist() == [RUNNING, RUNNING + 1]
    for n in range(5):
        names = [f"{n}.{i}" for i in range(RUNNING)]
        new = [(name, ([i + 1], [], [i + 11]), 0) for i, name in enumerate(names)]
        slots.begin(step(new, finished=[f"{n - 1}.{i}" for i in range(RUNNING)]))
        found = slots.of_blocks(torch.tensor([1, 2, 3, 0])).tolist()
        assert sorted(found[:3]) == [*range(RUNNING)]
        assert found[3] >= RUNNING
        assert slots.of_blocks(torch.tensor([11, 12, 13])).tolist() == found[:3]


def test_a_prefix_that_no_state_is_behind_is_refused():
    for block_size, length in ((None, 64), (BLOCK, 65)):
        slots, _ = bound(block_size)
        with pytest.raises(ContractError, match="enable_prefix_caching: expected"):
            slots.begin(step([("a", ([1, 2], [1, 2], [1, 2]), length)]))


def test_a_step_that_passes_the_end_of_a_block_that_would_be_cached_is_refused():
    for block, match in ((0, None), (5, "mamba_cache_mode: expected")):
        slots, _ = bound()
        output = step([("a", ([block, 1], [9, 2], [0, 3]), 0)], counts={"a": BLOCK + 1})
        slots.begin(output)
        if match is None:
            slots.end(output)
        else:
            with pytest.raises(ContractError, match=match):
                slots.end(output)


def test_spare_slots_are_as_many_as_a_graph_has_rows_beyond_a_batch():
    def config(sizes):
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))

    assert [spare_slots(config(sizes)) for sizes in (None, [], [1, 2, 4, 8, 16, 24])] == [1, 1, 8]


def test_a_worker_without_such_layers_runs_as_it_did():
    class Worker:
        vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"attention": object()})
        )

        def execute_model(self, scheduler_output):
            return scheduler_output

    watch(Worker)
    watched = Worker.execute_model
    watch(Worker)
    assert Worker.execute_model is watched
    assert Worker().execute_model("step") == "step"
