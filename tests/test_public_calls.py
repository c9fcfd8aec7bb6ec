"""What may surround a call of a public op: processes, graphs, autocast, transforms, gradients."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.logp import op as logp_op
from tests import public_calls
from tests.contract import ROOT, same_bytes
from tests.logp.cases import SETTINGS
from tests.moe import layer
from tests.public_calls import CASES, SITE, both_passes, leaves_of, results_of, upstream_of
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32


def differentiable(name: str, leaves) -> list[torch.Tensor]:
    return [t for t in results_of(name, leaves) if t.requires_grad]


# ---- a fresh process -----------------------------------------------------------------------------


def everything() -> dict[str, list[torch.Tensor]]:
    """Both passes of every call, and a layer of experts."""
    experts = layer.row_op()
    results = {name: both_passes(name, leaves_of(name)) for name in CASES}
    return results | {"experts": [experts.run(experts.rows(20, 5))]}


def test_a_fresh_process_has_the_same_bytes(tmp_path):
    """Of all public ops at once: a process costs seconds."""
    code = f"import sys, torch, {__name__} as m; torch.save(m.everything(), sys.argv[1])"
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", code, str(tmp_path / "out.pt")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    got, want = torch.load(tmp_path / "out.pt"), everything()
    assert got.keys() == want.keys()
    assert [name for name in want if not all(map(same_bytes, got[name], want[name]))] == []


# ---- graphs --------------------------------------------------------------------------------------


#: Names of calls that one graph has: a graph of each call alone costs twice as much.
GRAPHS = [list(CASES)[first : first + 7] for first in range(0, len(CASES), 7)]


@pytest.mark.parametrize("names", GRAPHS, ids=lambda names: names[0])
def test_compiled_bits_are_eager_bits(names):
    """fullgraph, forward and backward, with other work around each call."""
    torch.compiler.reset()
    given = [upstream_of(differentiable(name, leaves_of(name))) for name in names]

    def step(leaves):
        sums = []
        for name, mine, upstream in zip(names, leaves, given, strict=True):
            out = results_of(name, [t * 1.5 for t in mine])
            sums.append(sum((t * g).float().sum() for t, g in zip(out, upstream, strict=False)))
        return torch.stack(sums)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [leaves_of(name) for name in names]
        losses = run(leaves)
        losses.sum().backward()
        results.append(
            {
                name: [loss.detach(), *(t.grad for t in mine)]
                for name, loss, mine in zip(names, losses, leaves, strict=True)
            }
        )
    eager, compiled = results
    assert [n for n in names if not all(map(same_bytes, eager[n], compiled[n]))] == []
    assert all(t.any() for of_call in eager.values() for t in of_call)


WEIGHT, SQUARE, ALPHA = drawn(8, 16), drawn(8, 12, dtype=FP32), drawn(3, dtype=FP32)
#: Functions of rows [m, ...], and the shape of a row.
OF_ROWS = {
    "linear": (lambda x: ck.linear(x, WEIGHT, WEIGHT[:, 0]), 16),
    "linear_logp": (lambda x: ck.linear_logp(x, WEIGHT, torch.arange(len(x)) % 8), 16),
    "rowwise": (lambda x: ck.silu_mul(ck.softmax(x), x), 16),
    "embedding": (lambda x: ck.embedding(torch.arange(len(x)) % 8, WEIGHT), 16),
    "norm": (lambda x: ck.rms_norm(x, WEIGHT[0], residual=ck.layer_norm(x))[0], 16),
    "mhc.projection": (lambda x: ck.mhc.projection(x, SQUARE)[0], 6, 2),
    "mhc.connect": (
        lambda x: ck.mhc.connect(x, torch.tanh, SQUARE, ALPHA, SQUARE[:, 0], options=SITE), 6, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROWS)
def test_dynamic_numbers_of_rows_compile_once(name):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    function, *row = OF_ROWS[name]
    run = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for m in (5, 17, 64):
        x = drawn(m, *row, seed=m, dtype=FP32 if name.startswith("mhc") else BF16)
        assert same_bytes(run(x), function(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_have_the_shapes_and_dtypes(name, monkeypatch):
    """Of results and of gradients."""
    want = [(t.shape, t.dtype) for t in both_passes(name, leaves_of(name))]
    for key, value in vars(public_calls).items():
        if isinstance(value, torch.Tensor | tuple) and key.isupper():
            on_meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), value)
            monkeypatch.setattr(public_calls, key, on_meta)
    leaves = [t.detach().to("meta").requires_grad_() for t in leaves_of(name)]
    out = results_of(name, leaves)
    given = [t for t in out if t.requires_grad]
    out += torch.autograd.grad(given, leaves, list(map(torch.empty_like, given)))
    assert [(t.shape, t.dtype) for t in out] == want and all(t.is_meta for t in out)


# ---- modes ---------------------------------------------------------------------------------------

#: Ops that autocast casts, as it casts products of torch; others keep their dtypes.
CAST = {
    "linear", "matmul", "skinny_linear", "grouped_linear", "linear_logp", "linear_policy_loss",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if "attention" not in name])
def test_autocast_casts_products_and_nothing_else(name, dtype):
    """Nothing inside an op is cast again, in its backward neither."""
    leaves = [t.detach().float().requires_grad_() for t in leaves_of(name)]
    count = len(leaves)
    with torch.autocast("cpu", dtype):
        got = both_passes(name, leaves)
    cast = [t.detach().to(dtype).requires_grad_() for t in leaves] if name in CAST else leaves
    want = both_passes(name, cast)
    want[-count:] = [t.float() for t in want[-count:]]
    assert all(map(same_bytes, got, want))


@contextlib.contextmanager
def setting(change, to, back):
    """Inside, a setting of the process has another value than its default."""
    change(to)
    try:
        yield
    finally:
        change(back)


def in_fp32(name: str) -> Callable[[], list[torch.Tensor]]:
    """Both passes with leaves of fp32, and with upstream gradients that are no normal numbers."""
    dtype = BF16 if "attention" in name else FP32
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves_of(name)]
    upstream = upstream_of(results_of(name, leaves))
    tiny = [g * 1e-39 for g in upstream]
    if name == "mhc.connect":  # whose sublayer is torch's, which may flush
        tiny = upstream
    return lambda: both_passes(name, leaves, upstream) + both_passes(name, leaves, tiny)


@pytest.mark.parametrize("name", CASES)
def test_settings_of_the_process_do_not_show(name):
    """Default dtype and device, subnormals, precision, deterministic algorithms, rounding modes."""
    run = in_fp32(name)
    want = run()
    for change, to, back in SETTINGS:
        with setting(change, to, back):
            got = run()
        assert all(map(same_bytes, got, want)), (change, to)


def test_without_the_environment_the_rounding_mode_shows(monkeypatch):
    run = in_fp32("linear_logp")
    want = run()
    monkeypatch.setattr(logp_op, "ieee_on", lambda t: contextlib.nullcontext())
    with setting(*SETTINGS[-1]):
        got = run()
    assert not all(map(same_bytes, got, want))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_activation_checkpointing(name, reentrant):
    def step(*leaves):
        return tuple(t * 1.5 for t in results_of(name, [t * 2 for t in leaves]))

    results = []
    for run in (step, functools.partial(checkpoint, step, use_reentrant=reentrant)):
        leaves = leaves_of(name)
        out = run(*leaves)
        given = [pair for pair in zip(out, upstream_of(out), strict=True) if pair[0].requires_grad]
        torch.autograd.backward(*zip(*given, strict=True))
        results.append([*(t.detach() for t in out), *(t.grad for t in leaves)])
    assert all(map(same_bytes, *results))


# ---- some gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_only_the_gradients_asked_for(name):
    """Each alone, and each left out, has the bytes that it has among all; without any, no graph."""
    count = len(leaves_of(name))
    every = both_passes(name, leaves_of(name))
    subsets = [{i} for i in range(count)] + [set(range(count)) - {i} for i in range(count)]
    for subset in filter(None, subsets):
        leaves = [t.requires_grad_(i in subset) for i, t in enumerate(leaves_of(name))]
        want = every[:-count] + [every[i - count] for i in sorted(subset)]
        assert all(map(same_bytes, both_passes(name, leaves), want)), subset
    plain = results_of(name, [t.detach() for t in leaves_of(name)])
    assert not any(t.requires_grad for t in plain)
    assert all(map(same_bytes, plain, every[:-count]))


@pytest.mark.parametrize("name", CASES)
def test_a_result_that_nobody_uses_has_a_gradient_of_zeros(name):
    leaves = leaves_of(name)
    given = upstream_of(differentiable(name, leaves))
    for used in range(len(given)):
        out = differentiable(name, leaves)
        options = {"materialize_grads": True}
        alone = torch.autograd.grad(out[used], leaves, given[used], **options)
        zeros = [g if i == used else torch.zeros_like(g) for i, g in enumerate(given)]
        want = torch.autograd.grad(differentiable(name, leaves), leaves, zeros, **options)
        # Zeros that were added may turn a -0.
        assert all(same_bytes(a + 0.0, b + 0.0) for a, b in zip(alone, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_is_expanded(name):
    """What .sum() sends back has strides of 0."""
    leaves, results = leaves_of(name), []
    for dense in (False, True):
        out = differentiable(name, leaves)
        ones = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in out]
        given = [t.contiguous() for t in ones] if dense else ones
        results.append(torch.autograd.grad(out, leaves, given, materialize_grads=True))
    assert all(map(same_bytes, *results))


# ---- transforms ----------------------------------------------------------------------------------

TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x * 2])),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).float().sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).float().sum()))(
        torch.stack([x, x])
    ),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_transform_is_refused_by_name_or_maps_rows(name):
    """Not a wrong tangent of zero, and not an error about somebody's setup_context."""
    x, *rest = (t.detach() for t in leaves_of(name))

    def function(x):
        return results_of(name, [x, *rest])[0]

    for transform, apply in TRANSFORMS.items():
        try:
            got = apply(function, x)
        except UnsupportedTransformError as error:
            assert re.match(r"cute_kernels[\w.]*: ", str(error)), transform
        else:
            assert transform == "vmap", transform
            assert same_bytes(got, torch.stack([function(x), function(x * 2)]))
