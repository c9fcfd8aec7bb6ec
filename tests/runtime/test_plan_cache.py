"""Calls like an earlier one: what they are known by, and what is asked of each.

The SM90 launchers plan here for CPU tensors that are taken for those of a GPU; their kernels do
nothing.  test_plan_bytes.py runs them in the simulator.
"""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors, settings
from cute_kernels.compile import extension
from cute_kernels.gemm import op as gemm_op
from cute_kernels.runtime import dispatch, plan_cache, torch_ops
from cute_kernels.sparse_attn import op as attention_op
from tests.anchors import replaced
from tests.compile.toy import needs_linker
from tests.runtime.cached_calls import counted, drawn, one_mask, rewritten
from tests.runtime.pretended_sm90 import idle

BF16, FP16 = torch.bfloat16, torch.float16


TRUE_ON_GPU = plan_cache.on_gpu
MASK = one_mask(torch.device("cpu"))


@pytest.fixture
def whole_way(monkeypatch):
    return counted(monkeypatch)


@pytest.fixture(params=[pytest.param("C", marks=needs_linker), "Python"])
def found_by(request, monkeypatch):
    """Whether calls.c finds cached plans, or `PlanCache.find`."""
    if request.param == "Python":
        monkeypatch.setattr(extension, "calls", lambda: None)
    yield request.param
    assert ("find" in vars(gemm_op.linear.planned.cache)) is (
        request.param == "C" and bool(gemm_op.linear.planned.cache._plans)
    )


by_both = pytest.mark.usefixtures("found_by")


# ---- what a call is known by ---------------------------------------------------------------------


def moved(t, by: int = 1):
    """Copy of the values at an address that is no multiple of 16 bytes."""
    memory = torch.empty(t.numel() + by, dtype=t.dtype)
    return memory[by:].view(t.shape).copy_(t)


X, W = drawn(8, 48), drawn(64, 48, seed=1)
Q, K = drawn(1, 130, 2, 64), drawn(1, 130, 1, 64, seed=1)
#: Calls of which each is of another kind than the first of its row.
OTHER = {
    "linear": [
        lambda: ck.linear(X, W),
        lambda: ck.linear(X[:7], W),
        lambda: ck.linear(X, W[:32]),
        lambda: ck.linear(X.mT.contiguous().mT, W),
        lambda: ck.linear(X, W.mT.contiguous().mT),
        lambda: ck.linear(X.half(), W.half()),
        lambda: ck.linear(X, W, drawn(64)),
        lambda: ck.linear(X, W, order="tree"),
        lambda: ck.linear(X.view(2, 4, 48), W),
    ],
    "norm": [
        lambda: ck.rms_norm(X, W[0]),
        lambda: ck.rms_norm(X, W[0], 1e-5),
        lambda: ck.rms_norm(X, W[0], offset=1.0),
        lambda: ck.rms_norm(X, W[0], offset=-0.0),
        lambda: ck.rms_norm(X, W[0].float()),
        lambda: ck.rms_norm(X, W[0], residual=X),
        lambda: ck.layer_norm(X, W[0], W[1]),
        lambda: ck.rms_norm(X.half(), W[0].half()),
        lambda: ck.rms_norm(X[:4], W[0]),
    ],
    "attention": [
        lambda: ck.block_sparse_attention(Q, K, K),
        lambda: ck.block_sparse_attention(Q, K, K, causal=True),
        lambda: ck.block_sparse_attention(Q, K, K, scale=0.5),
        lambda: ck.block_sparse_attention(Q, K, K, softcap=2.0),
        lambda: ck.block_sparse_attention(Q, K, K, MASK),
        lambda: ck.block_sparse_attention(Q, K, K, ck.BlockMask.full(130, 130)),
        lambda: ck.block_sparse_attention(Q, K, K, schedule="spt"),
        lambda: ck.block_sparse_attention(Q[:, :100], K, K),
        lambda: ck.block_sparse_attention(Q.half(), K.half(), K.half()),
    ],
}


@by_both
@pytest.mark.parametrize("name", OTHER)
def test_another_kind_of_call_is_not_taken_for_a_known_one(on_sm90, whole_way, name):
    with idle():
        for i, call in enumerate(OTHER[name]):
            call()
            assert whole_way[name] == i + 1
        for call in OTHER[name][:3]:
            call()
        assert whole_way[name] == len(OTHER[name])


def with_setting(name, value):
    true = settings.get
    get = lambda asked: value if asked == name else true(asked)  # noqa: E731
    with mock.patch.object(settings, "get", get):
        ck.linear(X, W)


def again():
    ck.linear(X, W)


def on_a_default_device():
    with torch.device("cpu"):
        again()


def under_fully_shard():
    with sharded_by_fsdp():
        again()


#: What comes between two equal calls, and how many of the three are checked.
BETWEEN = {
    "another backend": (lambda: with_setting("BACKEND", "cute_sm90"), 2),
    "another number of CTAs": (lambda: with_setting("MAX_CTAS", "3"), 2),
    "devices forgotten": (lambda: (dispatch.forget(), again()), 2),
    "a default device": (on_a_default_device, 1),
    "fully_shard without a main_grad": (under_fully_shard, 1),
    "a cache that is full": (lambda: (ck.linear(X[:1], W), ck.linear(X[:2], W)), 4),
}


@by_both
@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between(on_sm90, whole_way, monkeypatch, name):
    between, checks = BETWEEN[name]
    monkeypatch.setattr(gemm_op.linear.planned.cache, "_capacity", 2)
    with idle():
        again(), between(), again()
    assert whole_way["linear"] == checks and len(gemm_op.linear.planned.cache._plans) <= 2


def test_a_graph_that_is_captured_keeps_the_lists_it_reads(on_sm90, whole_way, monkeypatch):
    """Attention's come from a cache, which must know of the graph; other calls hold no memory."""
    pinned = []
    monkeypatch.setattr(
        attention_op.lowering, "mask_of_op", lambda *given: pinned.append(1) or true_mask(*given)
    )
    with idle():
        for mask in (None, MASK):
            for capturing in (False, False, True, True):
                monkeypatch.setattr(torch_ops, "capturing", lambda now=capturing: now)
                before = len(pinned)
                ck.block_sparse_attention(Q, K, K, mask)
                assert not capturing or len(pinned) > before


def test_no_call_keeps_a_tensor_that_left_the_cache(on_sm90, monkeypatch):
    """The cache waits for every stream before it gives memory away; a call could not."""
    cache = attention_op.lowering.cache

    def call_with_bits():
        ck.block_sparse_attention(Q, K, K, ck.BlockMask.from_dense(torch.rand(130, 130) < 0.5))

    with idle():
        call_with_bits()
        ck.block_sparse_attention(Q, K, K, MASK)
        ck.block_sparse_attention(Q, K, K, causal=True)
        # The next of that size fits alone, and not beside all that is there.
        monkeypatch.setattr(cache, "limit", cache.size()["bytes"])
        call_with_bits()
        assert len(attention_op.block_sparse_attention.planned.cache._plans) == 1


true_mask = attention_op.lowering.mask_of_op


# ---- who watches, and what is asked of each ------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def with_main_grad():
    ck.linear(X, W.clone().requires_grad_(), main_grad=torch.zeros(64, 48))


def sharded_by_fsdp(**attributes):
    """Pretend that fully_shard gathered W from a parameter with these attributes."""
    of_w = lambda t: types.SimpleNamespace(**attributes) if t is W else None  # noqa: E731
    return mock.patch.multiple(
        plan_cache.data_parallel, sharding=lambda: True, sharded=mock.Mock(side_effect=of_w)
    )


def sharded_with_main_grad():
    refused = contextlib.suppress(errors.ArgumentValueError)
    with sharded_by_fsdp(main_grad=torch.zeros(2)), refused:
        ck.linear(X, W)


def on_a_cpu():
    # A signature that is in no cache: whether its device has cached plans is asked.
    with mock.patch.object(plan_cache, "on_gpu", TRUE_ON_GPU):
        ck.linear(X[:5], W)


WATCHED = {
    "main_grad": with_main_grad,
    "fully_shard": sharded_with_main_grad,
    "autocast": lambda: torch.autocast("cpu", BF16)(again)(),
    "vmap": lambda: torch.func.vmap(lambda rows: ck.linear(rows, W))(X.view(2, 4, 48)),
    "subclass": lambda: ck.linear(X.as_subclass(Subclass), W),
    "subclass of another": lambda: ck.linear(X, W.as_subclass(Subclass)),
    "address": lambda: ck.linear(moved(X), W),
    "negated": lambda: ck.linear(torch._neg_view(X), W),
    "a CPU": on_a_cpu,
}


@by_both
@pytest.mark.parametrize("name", WATCHED)
def test_nobody_is_passed_by(on_sm90, whole_way, name):
    with idle():
        ck.linear(X, W)
        ck.linear(X.view(2, 4, 48), W)
        for _ in range(2):
            before = whole_way["linear"]
            WATCHED[name]()
            # A transform checks what it makes of a call as well.
            assert whole_way["linear"] > before


@by_both
@pytest.mark.parametrize("offset", [0, 8, 4096])
@pytest.mark.parametrize("freed", ["x", "weight"])
def test_freed_storage_is_refused_once_the_call_is_cached(on_sm90, freed, offset):
    """As fully_shard leaves a parameter; a view of it is at an address of its offset."""
    call = {"x": X, "weight": W}
    memory = torch.zeros(W.numel() + offset, dtype=BF16)
    gone = memory[offset:][: call[freed].numel()].view(call[freed].shape)
    with idle():
        ck.linear(**call), ck.linear(**call)
        assert ck.linear(**call | {freed: gone}).shape == (8, 64)
        memory.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(errors.ArgumentValueError, match=rf"^{freed}: "):
                ck.linear(**call | {freed: gone})


@by_both
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda: ck.linear(X, W, order=["chain"]), errors.ArgumentValueError),
        (lambda: ck.linear(X, W.half()), errors.DtypeError),
        (lambda: ck.linear(X, W[:, :40]), errors.ShapeError),
        (lambda: ck.linear(X, [1]), errors.ArgumentTypeError),
        (lambda: ck.linear(X.to_sparse(), W), errors.ArgumentTypeError),
        (lambda: ck.linear(torch.nested.nested_tensor([X, X[:3]]), W), errors.ArgumentTypeError),
        (lambda: ck.rms_norm(X, W[0], True), errors.ArgumentTypeError),
        (lambda: ck.rms_norm(X, W[0], [1e-6]), errors.ArgumentTypeError),
        (lambda: ck.rms_norm(X, W[0], offset=False), errors.ArgumentTypeError),
        (lambda: ck.block_sparse_attention(Q, K, K, causal=1), errors.ArgumentTypeError),
        (lambda: ck.block_sparse_attention(Q, K, K, scale=[1]), errors.ArgumentTypeError),
        (lambda: ck.block_sparse_attention(Q, K, None), errors.ArgumentTypeError),
        (lambda: ck.block_sparse_attention(Q, K, K, MASK.hash()), errors.ArgumentTypeError),
        (lambda: ck.block_sparse_attention(Q, K, K, deterministic=1), errors.ArgumentTypeError),
    ],
)
def test_what_was_refused_is_refused_after_good_calls(on_sm90, bad, error):
    with idle():
        for _ in range(2):
            ck.linear(X, W)
            ck.rms_norm(X, W[0], 1.0, offset=0)
            ck.rms_norm(X, W[0])
            for causal in (True, False):
                ck.block_sparse_attention(Q, K, K, causal=causal, scale=1.0)
                ck.block_sparse_attention(Q, K, K, MASK, causal=causal)
        with pytest.raises(error):
            bad()


# ---- mutants -------------------------------------------------------------------------------------


#: What Python's functions lose, and the call that kills it: one of `OTHER`, or of `WATCHED`.
OF_PYTHON = [
    (plan_cache._key, "options, ", "linear"),
    (plan_cache.describe, "t.shape, ", "linear"),
    (plan_cache.describe, "t.stride(), ", "linear"),
    (plan_cache.describe, "t.dtype, ", "linear"),
    (plan_cache.describe, " or t.is_neg()", "negated"),
    (plan_cache.describe, " or t.data_ptr() % _ALIGN", "address"),
    (plan_cache.describe, "type(t) not in _TYPES or ", "subclass of another"),
    (plan_cache.is_cacheable, "on_gpu(tensors[0]) and ", "a CPU"),
    (
        plan_cache.is_cacheable,
        "data_parallel.sharding() and any(map(data_parallel.has_sharded_main_grad, tensors))",
        "fully_shard",
    ),
]
#: And calls.c, which is compiled for each: one by day.
OF_C = [
    ("  for (int i = 0; i < t.ndim; i++) *at++ = t.shape[i];", "linear"),
    ("  for (int i = 0; i < t.ndim; i++) *at++ = t.strides[i];", "linear"),
    ("t.dtype.code | (int64_t)t.dtype.bits << 8 | (int64_t)t.dtype.lanes << 16", "linear"),
    ("address % ALIGNMENT || ", "address"),
    ("negative != Py_False || ", "negated"),
    (
        "  if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type) return NULL;",
        "subclass of another",
    ),
    ("  if (intercepted) Py_RETURN_FALSE;\n", "autocast"),
]


@pytest.mark.parametrize(
    ("function", "part", "name"),
    [
        *OF_PYTHON,
        pytest.param(None, *OF_C[0], marks=needs_linker),
        *(pytest.param(None, *row, marks=[needs_linker, pytest.mark.nightly]) for row in OF_C[1:]),
    ],
)
def test_mutants_are_killed(on_sm90, whole_way, monkeypatch, tmp_path, function, part, name):
    module = None
    if function is None:
        text = replaced({"": extension.SOURCE.read_text()}, part, "0" * part.startswith("t.dtype"))
        (tmp_path / "calls.c").write_text(text[""])
        module = extension.imported(extension.build(tmp_path / "calls.c", tmp_path))
    else:
        monkeypatch.setattr(plan_cache, function.__name__, rewritten(function, part))
    monkeypatch.setattr(extension, "calls", lambda: module)
    with pytest.raises((AssertionError, TypeError)):
        if name in OTHER:
            test_another_kind_of_call_is_not_taken_for_a_known_one(on_sm90, whole_way, name)
        else:
            test_nobody_is_passed_by(on_sm90, whole_way, name)


def test_freed_storage_is_not_described(monkeypatch):
    """Without the question it is: 0 is a multiple of 16.  calls.c: tests/compile/test_extension."""
    freed = drawn(4, 16)
    freed.untyped_storage().resize_(0)
    assert plan_cache.describe(freed) is None
    monkeypatch.setattr(plan_cache, "_has_storage", lambda t: True)
    assert plan_cache.describe(freed) is not None
