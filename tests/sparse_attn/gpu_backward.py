"""Checks of the SM90 backward on a card: `python -m tests.sparse_attn.gpu_backward DIM NAME ...`.

A process of its own, so that a launch that hangs can be ended (tests/sparse_attn/test_gpu.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
import traceback

import torch

from cute_kernels import settings
from cute_kernels.errors import NondeterministicError
from cute_kernels.runtime import plan_cache
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import launch, masks
from tests import contract
from tests.sparse_attn.gpu_cases import (
    DEVICE,
    HEADS,
    MASKS,
    Problem,
    check,
    exact,
    gradients,
    problem,
    require_same,
)

REPEATS = 20


def values(dim: int) -> None:
    """Gradients against float64: masks, tails, GQA, both dtypes, softcap, a gradient of lse."""
    for index, (name, make) in enumerate(MASKS.items()):
        batch, heads, kv_heads = HEADS[index % 3]
        mask = make()
        dtype = torch.float16 if index % 2 else torch.bfloat16
        sizes = heads, kv_heads, max(batch, mask.shape[0]), dtype
        for softcap, lse in ((0.0, False), (3.0, True)):
            inputs = problem(mask, dim, *sizes, softcap)
            expected, bounds = exact(inputs, lse)
            grads = gradients(inputs, lse=lse)
            for part, got, want in zip(("dq", "dk", "dv"), grads, expected[2:], strict=True):
                check(f"{name}, {part}, {softcap}", got, want, getattr(bounds, part))


def kinds_of_schedules(dim: int) -> None:
    """Every kind of schedule, the longest waits included: within the bound, and repeated."""
    inputs = problem(BlockMask.causal(1000, 1000), dim, heads=4, kv_heads=2)
    expected, bounds = exact(inputs)
    for kind in kinds.KINDS:
        try:
            grads = gradients(inputs, kind)
        except ValueError as refused:
            print(f"{kind}: {refused}")
            continue
        require_same(gradients(inputs, kind), grads, kind)
        for part, got, want in zip(("dq", "dk", "dv"), grads, expected[2:], strict=True):
            check(f"{kind}, {part}", got, want, getattr(bounds, part))


def large(dim: int) -> Problem:
    """More tickets than SMs: 16 columns, 16 KV heads."""
    return problem(BlockMask.causal(2048, 2048), dim, heads=32, kv_heads=16)


def repeats(dim: int) -> None:
    """Check that the bytes repeat, alone and beside a stream that keeps the card busy."""
    inputs = large(dim)
    for deterministic in (True, False):
        first = gradients(inputs, deterministic=deterministic)
        other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
        differing = [0, 0, 0]
        for i in range(2 * REPEATS):
            if i >= REPEATS:
                with torch.cuda.stream(other):
                    noise @ noise
            grads = gradients(inputs, deterministic=deterministic)
            for j, (a, b) in enumerate(zip(grads, first, strict=True)):
                differing[j] += int((a.view(torch.int16) != b.view(torch.int16)).sum())
        print(f"deterministic={deterministic}: {differing} elements of dq, dk, dv differ")
        # dK and dV have one writer each, whatever the order of dQ.
        assert differing[1:] == [0, 0] and (not deterministic or differing[0] == 0)


def sm_counts(dim: int) -> None:
    """Check schedule_invariant: caps of the persistent grid, one CTA alone included."""
    inputs = problem(BlockMask.causal(900, 900), dim, heads=8, kv_heads=4)
    want = gradients(inputs)
    for ctas in (1, 2, 7, 64, 131, 132):
        os.environ["CUTE_KERNELS_MAX_CTAS"] = str(ctas)
        settings.reload()
        assert launch.most_ctas(inputs.q.device) == ctas
        require_same(gradients(inputs), want, f"{ctas} CTAs")
    del os.environ["CUTE_KERNELS_MAX_CTAS"]
    settings.reload()


def orders(dim: int) -> None:
    """The launch order is not in the bits; the write order and the visits are."""
    mask = BlockMask.full(512, 768)
    inputs = problem(mask, dim, heads=4, kv_heads=2, batch=2)
    shuffled = [3, 0, 5, 1, 4, 2]

    def made(order, **options):
        return gradients(inputs, kinds.permutation(mask, order=order, heads=4, **options))

    want = made(shuffled)
    for in_flight in (2, 3, 4):
        require_same(made(shuffled, heads_in_flight=in_flight), want, "launch order")
    ascending = made(list(range(6)))
    assert not contract.same_bytes(ascending[0], want[0]), "dq does not follow the write order"
    require_same(ascending[1:], want[1:], "dk, dv under another write order")
    descending = made(shuffled, walk="descending")
    require_same(descending[:1], want[:1], "dq under other visits")
    assert not contract.same_bytes(descending[1], want[1]), "dk does not follow the visits"
    assert not contract.same_bytes(descending[2], want[2]), "dv does not follow the visits"


def neighbours(dim: int) -> None:
    """A head's gradients are those that it has alone, or in another batch."""
    inputs = problem(BlockMask.causal(700, 700), dim, heads=4, kv_heads=2, batch=3)
    want = gradients(inputs, "spt")
    order = torch.tensor([2, 0, 1], device=DEVICE)
    moved = inputs.part(**{n: getattr(inputs, n)[order] for n in ("q", "k", "v", "dout")})
    require_same(gradients(moved, "spt"), [t[order] for t in want], "batch order")
    for b in range(3):
        for h in range(2):
            rows, columns = slice(2 * h, 2 * h + 2), slice(h, h + 1)
            few = {n: getattr(inputs, n)[b : b + 1, :, rows] for n in ("q", "dout")}
            few |= {n: getattr(inputs, n)[b : b + 1, :, columns] for n in ("k", "v")}
            mine = [want[0][b : b + 1, :, rows], *(t[b : b + 1, :, columns] for t in want[1:])]
            require_same(gradients(inputs.part(**few), "spt"), mine, "one group of heads alone")


def many_sequences(dim: int) -> None:
    """More sequences than CTAs on y or z of a grid: each has the gradients that it has alone."""
    inputs = problem(BlockMask.full(5, 7), dim, heads=1, kv_heads=1, batch=65_536 + 3)
    want = gradients(inputs)
    for b in (0, 1, 65_534, 65_535, 65_536, 65_538):
        one = {n: getattr(inputs, n)[b : b + 1] for n in ("q", "k", "v", "dout")}
        mine = [t[b : b + 1] for t in want]
        require_same(gradients(inputs.part(**one)), mine, f"sequence {b} alone")


def layouts(dim: int) -> None:
    """Strides that TMA cannot address are copied: the bits of packed tensors."""
    inputs = problem(BlockMask.causal(333, 333), dim, heads=4, kv_heads=2, batch=2)
    want = gradients(inputs)

    def odd(t: torch.Tensor) -> torch.Tensor:
        wider = torch.full((*t.shape[:3], t.shape[3] + 1), torch.nan, dtype=t.dtype, device=DEVICE)
        wider[..., :-1] = t
        return wider[..., :-1]

    other = {n: odd(getattr(inputs, n)) for n in ("q", "k", "v", "dout")}
    require_same(gradients(inputs._replace(**other)), want, "odd strides")
    by_head = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in other}
    require_same(gradients(inputs._replace(**by_head)), want, "head-major")


def poisoned(dim: int) -> None:
    """Whatever outputs and workspace held: NaN, and counters and semaphores of a killed launch."""
    inputs = problem(
        BlockMask.sliding_window(500, 500, left=100, right=0), dim, heads=4, kv_heads=2
    )
    want = gradients(inputs)
    true_allocator, true_workspace = launch.allocator, launch.plan_workspace

    def allocator(*args):
        new = true_allocator(*args)
        return lambda: new().fill_(torch.nan if args[1].is_floating_point else 0)

    launch.allocator = allocator
    for fill in (-77, 1, 2**31 - 1):

        def plan_workspace(*args, fill=fill):
            new = true_workspace(*args)

            def new_poisoned():
                held = new()
                return held._replace(semaphore=held[3].fill_(fill), counter=held[4].fill_(fill))

            return new_poisoned

        launch.plan_workspace = plan_workspace
        plan_cache.clear()
        require_same(gradients(inputs), want, f"poison {fill}")
    launch.allocator, launch.plan_workspace = true_allocator, true_workspace
    plan_cache.clear()


def graph(dim: int) -> None:
    """Captured forward and backward, replayed on new inputs."""
    inputs = problem(BlockMask.causal(640, 640), dim, heads=4, kv_heads=2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(inputs)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        grads = gradients(inputs)
    for seed in range(REPEATS):
        fresh = problem(inputs.mask, dim, heads=4, kv_heads=2, seed=seed)
        for name in ("q", "k", "v", "dout"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        captured.replay()
        require_same(grads, gradients(fresh), "graph replay")


def unordered(dim: int) -> None:
    """Check deterministic=False: values within the bound, refused under torch's flag."""
    inputs = problem(BlockMask.causal(600, 600), dim, heads=4, kv_heads=2)
    expected, bounds = exact(inputs)
    grads = gradients(inputs, deterministic=False)
    for part, got, want in zip(("dq", "dk", "dv"), grads, expected[2:], strict=True):
        check(part, got, want, getattr(bounds, part))
    torch.use_deterministic_algorithms(True)
    try:
        gradients(inputs, deterministic=False)
    except NondeterministicError:
        pass
    else:
        raise AssertionError("deterministic=False ran under the determinism flag")
    require_same(gradients(inputs), gradients(inputs), "under the flag")
    torch.use_deterministic_algorithms(False)


def by_head(dim: int) -> None:
    """A mask for each query head, whether they share keys or not."""
    mask = BlockMask.from_dense(masks_by_head(256, 4))
    for kv_heads in (4, 2):
        inputs = problem(mask, dim, heads=4, kv_heads=kv_heads)
        expected, bounds = exact(inputs)
        for part, got, want in zip(
            ("dq", "dk", "dv"), gradients(inputs), expected[2:], strict=True
        ):
            check(f"a mask per head, {kv_heads} KV heads, {part}", got, want, getattr(bounds, part))


def masks_by_head(length: int, heads: int) -> torch.Tensor:
    """Other elements in every head."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(1, heads, length, length, generator=generator) < 0.4


def digest(dim: int) -> None:
    """Prints what a fresh process gets: the parent compares two of them."""
    inputs = large(dim)
    schedule = kinds.spt(masks.lower(inputs.mask).mask, heads=16)
    grads = gradients(inputs, dataclasses.replace(schedule, name="fresh"))
    raw = b"".join(contract.bits(t).numpy().tobytes() for t in grads)
    print("digest", hashlib.sha256(raw).hexdigest())


#: Those of one process each, in the order in which they are run.
GROUPS = (
    (values, by_head, layouts, poisoned, unordered),
    (sm_counts, orders, neighbours, many_sequences, kinds_of_schedules),
    (graph, repeats, digest),
)


def main(names: list[str], dim: int) -> int:
    """Runs checks by name, each after the other whatever it finds; 1 if one failed."""
    every = {one.__name__: one for group in GROUPS for one in group}
    failed = []
    for name in names:
        start = time.monotonic()
        try:
            every[name](dim)
            torch.cuda.synchronize()
            print(f"{name}: {time.monotonic() - start:.1f} s")
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {failed}" if failed else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], int(sys.argv[1])))
