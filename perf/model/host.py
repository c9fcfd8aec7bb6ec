"""Host time of one call: ours and torch's, in one process, in turns.

Of ours also what its compiled kernel takes by tvm_ffi's own call: arguments, launch and driver.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

from ..core import timing

#: Tokens, hidden size, query heads, key heads, head size; small, so that the device keeps up.
TOKENS, HIDDEN, HEADS, KEY_HEADS, DIM = 64, 2048, 32, 8, 64
SHAPE = f"{TOKENS}x{HIDDEN}"
_TURNS = 100
#: Product -> the module that launches its kernel.
_LAUNCHERS = {"linear": "gemm", "attention": "sparse_attn", "rms_norm": "norm"}


class Calls(NamedTuple):
    """One thing that a model does, by both."""

    ours: Callable[[], object]
    torch: Callable[[], object]
    grad: bool = False


def calls(device: str) -> dict[str, Calls]:
    """Product -> who does it; forward calls alone, under ``grad`` with what backward needs."""
    import cute_kernels as ck

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, weight, scale = drawn(TOKENS, HIDDEN), drawn(HIDDEN, HIDDEN), drawn(HIDDEN)
    q = drawn(1, TOKENS, HEADS, DIM)
    k, v = (drawn(1, TOKENS, KEY_HEADS, DIM) for _ in range(2))
    learned = weight.clone().requires_grad_()
    learned_scale = scale.clone().requires_grad_()
    f = torch.nn.functional
    mask = ck.BlockMask.causal(TOKENS, TOKENS, device=device)

    def sdpa():
        turned = (t.transpose(1, 2) for t in (q, k, v))
        return f.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)

    return {
        "linear": Calls(lambda: ck.linear(x, weight), lambda: f.linear(x, weight)),
        "linear, grad": Calls(
            lambda: ck.linear(x, learned), lambda: f.linear(x, learned), grad=True
        ),
        "attention": Calls(lambda: ck.block_sparse_attention(q, k, v, mask), sdpa),
        "rms_norm": Calls(lambda: ck.rms_norm(x, scale), lambda: f.rms_norm(x, (HIDDEN,), scale)),
        "rms_norm, grad": Calls(
            lambda: ck.rms_norm(x, learned_scale),
            lambda: f.rms_norm(x, (HIDDEN,), learned_scale),
            grad=True,
        ),
    }


def launch_of(module: object, run: Callable[[], object]) -> Callable[[], object]:
    """The one call of a compiled kernel that ``run`` makes through ``module``, as a call."""
    from cute_kernels.compile.call import flattened
    from cute_kernels.runtime import plan_cache

    launches = []

    def bind(device: torch.device, kernel: Callable, flatten: tuple = ()) -> Callable:
        def launch(*args: object) -> None:
            args = flattened(args, flatten)
            launches.append(functools.partial(kernel, *args))
            kernel(*args)

        return launch

    plan_cache.clear()
    in_python = mock.patch.object(plan_cache.Plan, "bound", lambda plan: plan.run)  # not `Program`
    with mock.patch.object(module, "bind", bind), in_python:
        run()
    plan_cache.clear()  # the plan of that call launches through the patched function
    (only,) = launches
    return only


def _timed(product: str, calls: Calls, device: str) -> dict[str, Callable[[], object]]:
    runs = {"ours": calls.ours, "torch": calls.torch}
    if device == "cuda" and product in _LAUNCHERS:
        module = importlib.import_module(f"cute_kernels.{_LAUNCHERS[product]}.launch")
        runs["ours, launch"] = launch_of(module, calls.ours)
    return runs


def measured(device: str) -> Iterator[dict]:
    """A record for each product and system: microseconds of host time, the least of the turns.

    A turn is all of them, so that each product's turns are spread over the whole time: hosts that
    others use too have seconds in which everything takes twice as long.
    """
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    products = calls(device)
    timed = {}
    for product, pair in products.items():
        with torch.set_grad_enabled(pair.grad):
            timed[product] = _timed(product, pair, device)
    costs: dict[tuple[str, str], list[float]] = {}
    for _ in range(_TURNS):
        for product, pair in products.items():
            with torch.set_grad_enabled(pair.grad):
                for name, call in timed[product].items():
                    cost = timing.host_cost(call, finish=finish, batches=5)
                    costs.setdefault((product, name), []).append(cost)
    for (product, name), costs_us in costs.items():
        body = {"product": f"host {product}", "shape": SHAPE, "dtype": "bf16", "system": name}
        yield body | {"status": "ok", "host_us": min(costs_us)}
