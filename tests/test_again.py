"""Calls like an earlier one: the bytes of the whole way, what they are known by, and who watches.

The SM90 launchers run here in the simulator, on CPU tensors that are taken for those of a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels as ck
from cute_kernels import again, arch, dispatch, errors, settings
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.gemm import op as gemm_op
from cute_kernels.norm import launch as norm_launch
from cute_kernels.norm import op as norm_op
from cute_kernels.sparse_attn import api, sequence_op
from cute_kernels.sparse_attn import launch as attention_launch
from cute_kernels.sparse_attn import op as attention_op
from tests.contract import same_bytes
from tests.gemm.simulated import simulated as simulated_gemm
from tests.norm.simulated import simulated as simulated_norm
from tests.ptxsim.available import requires_sim
from tests.sparse_attn.simulated import simulated as simulated_attention

BF16, FP16 = torch.bfloat16, torch.float16


TRUE_REMEMBERS = again.remembers


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def on_sm90(monkeypatch):
    """CPU tensors are remembered, and an SM90 GPU is what they are on; no kernel runs yet."""
    launchers = {
        "gemm": gemm_launch.gemm,
        "column_sum": gemm_launch.column_sum,
        "norm_forward": norm_launch.forward,
        "norm_backward": norm_launch.backward,
        "norm_add_parts": norm_launch.add_parts,
        attention_op.NAME: attention_launch.forward,
        f"{attention_op.NAME}_backward": attention_launch.backward,
        sequence_op.SPANS_NAME: attention_launch.forward_of_spans,
    }
    monkeypatch.setattr(again, "remembers", lambda t: True)
    monkeypatch.setattr(dispatch, "backend", lambda *asked: arch.CUTE_SM90)
    monkeypatch.setattr(dispatch, "launcher", lambda name, *where: launchers[name])
    again.forget()
    yield
    again.forget()


@pytest.fixture
def whole_way(monkeypatch):
    """How often each op's calls went the whole way, counted where checks end."""
    counts = dict.fromkeys(("linear", "norm", "attention"), 0)

    def count(module, function, name):
        true = getattr(module, function)

        def counted(*args, **options):
            counts[name] += 1
            return true(*args, **options)

        monkeypatch.setattr(module, function, counted)

    count(gemm_op.checks, "linear", "linear")
    count(norm_op.checks, "norm", "norm")
    count(attention_op.prepare, "operands", "attention")
    count(attention_op.prepare, "by_rule", "attention")
    count(sequence_op.checks, "spans", "attention")
    return counts


@contextlib.contextmanager
def simulated():
    with simulated_gemm(), simulated_norm(), simulated_attention(ctas=4):
        yield


@contextlib.contextmanager
def idle():
    """Kernels that do nothing: what is asked of a call is all that counts."""

    def nothing(*args):
        pass

    with contextlib.ExitStack() as stack:
        for module, names in (
            (gemm_launch, ("_gemm_kernel", "_skinny_kernel", "most_ctas", "max_clusters")),
            (norm_launch, ("_kernel", "most_ctas")),
            (attention_launch, ("_forward_kernel", "most_ctas")),
        ):
            for name in names:
                value = (lambda *a: 8) if name[0] == "m" else (lambda *a: nothing)
                stack.enter_context(mock.patch.object(module, name, value))
        yield


MASK = ck.BlockMask.causal(130, 130)


def linear(x, order="chain", bias=None):
    return ck.linear(x, drawn(64, 48, seed=1), bias, order=order)


def attention(x, **options):
    q = x.view(1, 130, -1, 64)
    return ck.block_sparse_attention(
        q, q[:, :, :1].contiguous(), q[:, :, 1:2].contiguous(), **options
    )


def spanned(x):
    """Rows of a cache of 150 keys, each at its own place, half of them behind padding."""
    q = x.view(2, -1, 2, 64)
    keys = drawn(2, 150, 1, 64, seed=7)
    row = torch.arange(q.shape[1]).expand(2, -1) + 100
    first = torch.tensor([[0], [40]]).expand_as(row)
    spans = torch.stack((first, torch.zeros_like(row), first, row + 1), -1).int()[:, None]
    return api.sequence_attention(q, keys, keys * 0.5, spans.to(x.device), scale=0.2)


CASES = {
    "linear": (lambda x: linear(x), (33, 48)),
    "linear of three dimensions": (lambda x: linear(x), (3, 5, 48)),
    "linear, bias": (lambda x: linear(x, bias=drawn(64, seed=2)), (33, 48)),
    "linear, tree": (lambda x: linear(x, "tree"), (33, 48)),
    "rms_norm": (lambda x: ck.rms_norm(x, drawn(64, seed=3), 1e-5, offset=1.0), (5, 64)),
    "rms_norm, residual": (
        lambda x: torch.stack(ck.rms_norm(x, drawn(64, seed=3), residual=x * 0.5)),
        (2, 3, 64),
    ),
    "layer_norm": (lambda x: ck.layer_norm(x, drawn(64, seed=3), drawn(64, seed=4)), (2, 3, 64)),
    "attention, mask": (lambda x: attention(x, block_mask=MASK, softcap=30.0), (130, 2 * 64)),
    "attention, rule": (lambda x: attention(x, causal=True, scale=0.3), (130, 2 * 64)),
    "spans": (spanned, (2, 5 * 2 * 64)),
    "spans of one row": (spanned, (2, 2 * 64)),
    "attention, lse": (lambda x: attention(x, causal=True, return_lse=True)[1], (130, 2 * 64)),
}


@requires_sim
@pytest.mark.parametrize("name", CASES)
def test_a_known_call_has_the_bytes_of_the_first(on_sm90, whole_way, name):
    run, shape = CASES[name]
    one, other = drawn(*shape, seed=5), drawn(*shape, seed=6)
    with simulated():
        first = [run(x) for x in (one, other)]
        count = sum(whole_way.values())
        later = [run(x) for x in (one, other)]
        assert sum(whole_way.values()) == count == 1
        again.forget()
        assert all(map(same_bytes, later, [run(one), first[1]]))
    assert same_bytes(first[0], later[0]) and not same_bytes(first[0], first[1])


@requires_sim
@pytest.mark.parametrize("name", ["linear, bias", "rms_norm, residual", "layer_norm"])
def test_so_have_its_gradients(on_sm90, whole_way, name):
    run, shape = CASES[name]

    def results():
        x = drawn(*shape, seed=5).requires_grad_()
        y = run(x)
        return y.detach(), torch.autograd.grad(y, x, drawn(*y.shape, seed=9))[0]

    with simulated():
        first, later = results(), results()
    assert all(map(same_bytes, first, later)) and sum(whole_way.values()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_too(name, whole_way):
    run, shape = CASES[name]
    true = drawn
    again.forget()
    with mock.patch.object(sys.modules[__name__], "drawn", lambda *a, **b: true(*a, **b).cuda()):
        x = drawn(*shape, seed=5).requires_grad_()

        def results():
            y = run(x)
            return y.detach(), torch.autograd.grad(y, x, drawn(*y.shape, seed=9).to(y.dtype))[0]

        with mock.patch.object(sys.modules[__name__], "MASK", MASK.to("cuda")):
            first, count = results(), sum(whole_way.values())
            later = results()
            assert count == sum(whole_way.values()) == 1
            again.forget()
            assert all(map(same_bytes, first, later)) and all(map(same_bytes, first, results()))
            with torch.no_grad():
                assert same_bytes(run(x), first[0]) and same_bytes(run(x), first[0])


# ---- what a call is known by ---------------------------------------------------------------------


def turned(t):
    return t.mT.contiguous().mT


def moved(t, by: int = 1):
    """The same values at an address that is no multiple of 16 bytes."""
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
        lambda: ck.linear(turned(X), W),
        lambda: ck.linear(X, turned(W)),
        lambda: ck.linear(X.half(), W.half()),
        lambda: ck.linear(X, W, drawn(64)),
        lambda: ck.linear(X, W, order="tree"),
        lambda: ck.linear(X.view(2, 4, 48), W),
    ],
    "norm": [
        lambda: ck.rms_norm(X, W[0]),
        lambda: ck.rms_norm(X, W[0], 1e-5),
        lambda: ck.rms_norm(X, W[0], offset=1.0),
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


@pytest.mark.parametrize("name", OTHER)
def test_another_kind_of_call_is_not_taken_for_a_known_one(on_sm90, whole_way, name):
    with idle():
        for i, call in enumerate(OTHER[name]):
            call()
            assert whole_way[name] == i + 1
        for call in OTHER[name][:3]:
            call()
        assert whole_way[name] == len(OTHER[name])


@pytest.mark.parametrize("setting", ["BACKEND", "MAX_CTAS"])
def test_settings_are_part_of_a_call(on_sm90, whole_way, setting):
    values = {"BACKEND": "cute_sm90", "MAX_CTAS": "3"}
    true = settings.get
    with idle():
        ck.linear(X, W)
        with mock.patch.object(
            settings, "get", lambda name: values[name] if name == setting else true(name)
        ):
            ck.linear(X, W)
        ck.linear(X, W)
    assert whole_way["linear"] == 2


def test_devices_forgotten_are_calls_forgotten(on_sm90, whole_way):
    with idle():
        ck.linear(X, W)
        dispatch.forget()
        ck.linear(X, W)
    assert whole_way["linear"] == 2


def test_a_mask_takes_its_calls_with_it(on_sm90):
    mask = ck.BlockMask.causal(130, 130)
    before = len(attention_op._of_mask)
    with idle():
        ck.block_sparse_attention(Q, K, K, mask)
    assert len(attention_op._of_mask) == before + 1
    del mask
    gc.collect()
    assert len(attention_op._of_mask) == before


def test_so_many_and_no_more(on_sm90, whole_way, monkeypatch):
    monkeypatch.setattr(gemm_op.calls, "_most", 2)
    with idle():
        for rows in (1, 2, 3, 1):
            ck.linear(X[:rows], W)
    assert whole_way["linear"] == 4 and len(gemm_op.calls._known) == 2


# ---- who watches, and what is asked of each ------------------------------------------------------


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def with_main_grad():
    ck.linear(X, W.clone().requires_grad_(), main_grad=torch.zeros(64, 48))


def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ck.linear(X, W)


def cast():
    with torch.autocast("cpu", BF16):
        ck.linear(X, W)


def moded():
    with Mode():
        ck.linear(X, W)


def owned():
    with mock.patch.object(again.data_parallel, "sharding", lambda: True):
        ck.linear(X, W)


def on_a_cpu():
    with mock.patch.object(again, "remembers", TRUE_REMEMBERS):
        ck.linear(X, W)


WATCHED = {
    "main_grad": with_main_grad,
    "profile": profiled,
    "autocast": cast,
    "mode": moded,
    "fully_shard": owned,
    "vmap": lambda: torch.func.vmap(lambda rows: ck.linear(rows, W))(X.view(2, 4, 48)),
    "subclass": lambda: ck.linear(X.as_subclass(Subclass), W),
    "address": lambda: ck.linear(moved(X), W),
    "negated": lambda: ck.linear(torch._neg_view(X), W),
    "a CPU": on_a_cpu,
}


@pytest.mark.parametrize("name", WATCHED)
def test_nobody_is_passed_by(on_sm90, whole_way, name):
    with idle():
        ck.linear(X, W)
        ck.linear(X.view(2, 4, 48), W)
        for _ in range(2):
            before = whole_way["linear"]
            WATCHED[name]()
            assert whole_way["linear"] == before + 1


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


@pytest.mark.parametrize("part", ["t.shape, ", "t.stride(), ", "t.dtype, ", "options, "])
def test_a_key_without_a_part_is_killed(on_sm90, whole_way, monkeypatch, part):
    source = inspect.getsource(again._key)
    assert source.count(part) == 1
    changed = dict(vars(again))
    exec(source.replace(part, ""), changed)
    monkeypatch.setattr(again, "_key", changed["_key"])
    with pytest.raises((AssertionError, TypeError)):
        test_another_kind_of_call_is_not_taken_for_a_known_one(on_sm90, whole_way, "linear")


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (" or t.is_neg()", "negated"),
        (" or t.data_ptr() % _ALIGN", "address"),
        ("None if data_parallel.sharding() else ", "fully_shard"),
        (" or not remembers(t)", "a CPU"),
        ("type(t) not in _TYPES or ", "subclass"),
    ],
)
def test_a_key_that_asks_less_is_killed(on_sm90, whole_way, monkeypatch, part, name):
    source = inspect.getsource(again._key)
    assert source.count(part) == 1
    changed = dict(vars(again))
    exec(source.replace(part, ""), changed)
    # Its globals are this copy's, where `remembers` is patched like in the module.
    monkeypatch.setattr(again, "_key", changed["_key"])
    with pytest.raises(AssertionError):
        test_nobody_is_passed_by(on_sm90, whole_way, name)
