"""The SM90 backward on a GPU: values, orders, SM counts, streams, graphs, what memory held before.

Its CTAs wait for each other: a launch that hangs ends the run, with the stack of the test.
"""

from __future__ import annotations

import faulthandler

import pytest
import torch

import cute_kernels as ck
from cute_kernels import settings
from cute_kernels.errors import NondeterministicError
from cute_kernels.runtime import plan_cache
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn.config import HEAD_DIMS
from tests import contract
from tests.sparse_attn import simulated_bwd
from tests.sparse_attn.gpu_cases import (
    DEVICE,
    NEEDS_GPU,
    captured,
    check,
    exact,
    gradients,
    large,
    problem,
    require_same,
)
from tests.sparse_attn.test_bwd_sm90 import (  # noqa: F401
    test_a_head_does_not_see_the_others,
    test_empty_rows_and_columns_are_zero,
    test_full_blocks_beside_partial_ones_of_bits,
    test_gradients,
    test_softcap,
    test_strides_and_what_outputs_held_do_not_matter,
    test_the_check_can_fail,
    test_the_gradient_of_lse,
)

pytestmark = [pytest.mark.gpu, NEEDS_GPU]
DIMS = pytest.mark.parametrize("dim", HEAD_DIMS)
#: Of one test: it compiles a few kernels (minutes on a loaded machine), and runs for seconds.
LIMIT_S = 600


def backward(case, schedule, *, ordered=True, dlse=None, **_: object):
    """Gradients by the op on the card, in place of the launcher in the simulator."""

    def there(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE).copy_(t)

    leaves = [there(t).requires_grad_() for t in (case.q, case.k, case.v)]
    options = {"scale": case.scale, "softcap": case.softcap, "schedule": schedule}
    options |= {"deterministic": ordered, "return_lse": True}
    out = ck.block_sparse_attention(*leaves, case.mask.to(DEVICE), **options)
    upstream = (there(case.dout), torch.zeros_like(out[1]) if dlse is None else there(dlse))
    grads = [t.cpu() for t in torch.autograd.grad(out, leaves, upstream)]
    return simulated_bwd.Gradients(*grads, grads[0])


@pytest.fixture(autouse=True)
def watchdog(monkeypatch):
    """Tests of the simulator run on the card too."""
    monkeypatch.setattr(simulated_bwd, "backward", backward)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


REPEATS = 20


def check_gradients(label: str, grads, expected, bounds) -> None:
    for part, got, want in zip(("dq", "dk", "dv"), grads, expected[2:], strict=True):
        check(f"{label}, {part}", got, want, getattr(bounds, part))


@DIMS
def test_kinds_of_schedules(dim):
    """Every kind of schedule, the longest waits included: within the bound, and repeated."""
    inputs = problem(BlockMask.causal(1000, 1000), dim, heads=4, kv_heads=2)
    expected, bounds = exact(inputs)
    for kind in kinds.KINDS:
        try:
            grads = gradients(inputs, kind)
        except ValueError:
            continue
        require_same(gradients(inputs, kind), grads, kind)
        check_gradients(kind, grads, expected, bounds)


@DIMS
def test_repeats(dim):
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
        # dK and dV have one writer each, whatever the order of dQ.
        assert differing[1:] == [0, 0] and (not deterministic or differing[0] == 0)


@DIMS
def test_sm_counts(monkeypatch, dim):
    """Check schedule_invariant: caps of the persistent grid, one CTA alone included."""
    inputs = problem(BlockMask.causal(900, 900), dim, heads=8, kv_heads=4)
    want = gradients(inputs)
    for ctas in (1, 2, 7, 64, 131, 132):
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(ctas))
        settings.reload()
        assert launch.most_ctas(inputs.q.device) == ctas
        require_same(gradients(inputs), want, f"{ctas} CTAs")


@DIMS
def test_orders(dim):
    """The launch order is not in the bits; the write order and the visits are."""
    mask = BlockMask.full(512, 768)
    inputs = problem(mask, dim, heads=4, kv_heads=2, batch=2)
    shuffled = [3, 0, 5, 1, 4, 2]

    def gradients_of(order, **options):
        return gradients(inputs, kinds.permutation(mask, order=order, heads=4, **options))

    want = gradients_of(shuffled)
    for in_flight in (2, 3, 4):
        require_same(gradients_of(shuffled, heads_in_flight=in_flight), want, "launch order")
    ascending = gradients_of(list(range(6)))
    assert not contract.same_bytes(ascending[0], want[0]), "dq does not follow the write order"
    require_same(ascending[1:], want[1:], "dk, dv under another write order")
    descending = gradients_of(shuffled, walk="descending")
    require_same(descending[:1], want[:1], "dq under other visits")
    assert not contract.same_bytes(descending[1], want[1]), "dk does not follow the visits"
    assert not contract.same_bytes(descending[2], want[2]), "dv does not follow the visits"


@DIMS
def test_many_sequences(dim):
    """More sequences than CTAs on y or z of a grid: each has the gradients that it has alone."""
    inputs = problem(BlockMask.full(5, 7), dim, heads=1, kv_heads=1, batch=65_536 + 3)
    want = gradients(inputs)
    for b in (0, 1, 65_534, 65_535, 65_536, 65_538):
        one = {n: getattr(inputs, n)[b : b + 1] for n in ("q", "k", "v", "dout")}
        mine = [t[b : b + 1] for t in want]
        require_same(gradients(inputs._replace(**one)), mine, f"sequence {b} alone")


@DIMS
def test_poisoned(monkeypatch, dim):
    """Whatever outputs and workspace held: NaN, and counters and semaphores of a killed launch."""
    inputs = problem(
        BlockMask.sliding_window(500, 500, left=100, right=0), dim, heads=4, kv_heads=2
    )
    want = gradients(inputs)
    true_allocator, true_workspace = launch.allocator, launch.plan_workspace

    def allocator(*args):
        new = true_allocator(*args)
        return lambda: new().fill_(torch.nan if args[1].is_floating_point else 0)

    monkeypatch.setattr(launch, "allocator", allocator)
    for fill in (-77, 1, 2**31 - 1):

        def plan_workspace(*args, fill=fill):
            new = true_workspace(*args)

            def new_poisoned():
                held = new()
                return held._replace(semaphore=held[3].fill_(fill), counter=held[4].fill_(fill))

            return new_poisoned

        monkeypatch.setattr(launch, "plan_workspace", plan_workspace)
        plan_cache.clear()
        require_same(gradients(inputs), want, f"poison {fill}")
    monkeypatch.undo()
    plan_cache.clear()


@DIMS
def test_graph(dim):
    """Captured forward and backward, replayed on new inputs."""
    inputs = problem(BlockMask.causal(640, 640), dim, heads=4, kv_heads=2)
    replay, grads = captured(lambda: gradients(inputs))
    for seed in range(REPEATS):
        fresh = problem(inputs.mask, dim, heads=4, kv_heads=2, seed=seed)
        for name in ("q", "k", "v", "dout"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        replay()
        require_same(grads, gradients(fresh), "graph replay")


@DIMS
def test_unordered(dim):
    """Check deterministic=False: values within the bound, refused under torch's flag."""
    inputs = problem(BlockMask.causal(600, 600), dim, heads=4, kv_heads=2)
    expected, bounds = exact(inputs)
    grads = gradients(inputs, deterministic=False)
    check_gradients("unordered", grads, expected, bounds)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NondeterministicError):
            gradients(inputs, deterministic=False)
        require_same(gradients(inputs), gradients(inputs), "under the flag")
    finally:
        torch.use_deterministic_algorithms(False)
