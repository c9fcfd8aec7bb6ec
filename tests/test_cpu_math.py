"""IEEE fp32 on the CPU: torch's bits, and no setting of a process or a thread changes them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.cpu import c_library, ieee
from cute_kernels.gemm import cpu, op
from cute_kernels.runtime import dispatch
from tests.contract import same_bytes
from tests.watchers import Seen

ROOT = Path(__file__).resolve().parent.parent
N, K = 200, 150
TINY = 1e-20


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_a_thread(function):
    """What ``function`` returns in a thread of its own: OpenMP gives each thread its own team."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# ---- mm -----------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere torch.mm may not be sgemm")
def test_mm_has_the_bits_of_torch():
    """In the shapes and layouts that the backends use: blocks of rows, groups of tokens, tiles."""
    for m, n, k in itertools.product((64, 128, 256), (16, 64, 208), (16, 128, 160)):
        for a, b in itertools.product((drawn(m, k), drawn(k, m).mT), (drawn(k, n), drawn(n, k).mT)):
            assert same_bytes(ieee.mm(a, b), torch.mm(a, b)), (m, n, k)
    for m, n in itertools.product((1, 2, 15, 40, 129), (1, 3, 16, 65)):
        a, b, start = drawn(16, m + 7)[:, :m].mT, drawn(16, n), drawn(m, n, seed=1)
        want = start.clone().addmm_(a, b)
        assert same_bytes(ieee.mm(a, b, start, add=True), want), (m, n)
    with threads(2):
        a, b = drawn(64, 1024), drawn(1024, 512)
        assert same_bytes(ieee.mm(a, b), torch.mm(a, b))


def products_asked(run) -> list[str]:
    """Products that ``run`` asks of torch, which may answer them in bf16."""
    with Seen() as seen:
        run()
    words = ("mm", "matmul", "mv", "dot", "aten::linear")
    return [name for name in seen.names if any(word in name for word in words)]


def every_product() -> list[torch.Tensor]:
    """The launchers of the CPU backend, forward and backward, on small tensors."""
    a, b, state = drawn(70, K), drawn(N, K), drawn(N, K)
    made = [cpu.gemm(a, b, None, None), cpu.gemm(drawn(N, 40), drawn(K, 40), None, state)]
    q, k, v = (drawn(1, 150, 2, 64, seed=s).bfloat16().requires_grad_() for s in range(3))
    out = ck.block_sparse_attention(q, k, v, causal=True)
    out.backward(drawn(*out.shape).bfloat16())
    return [*made, out.detach(), q.grad, k.grad, v.grad]


def test_no_product_is_asked_of_torch(monkeypatch):
    """torch.mm reads a switch of the whole process; a mutant that asks it is noticed."""
    assert products_asked(every_product) == []
    monkeypatch.setattr(cpu, "mm", lambda a, b, out: torch.mm(a, b, out=out))
    asked = products_asked(lambda: cpu.gemm(drawn(70, K), drawn(N, K), None, None))
    assert asked == ["aten::mm.out"] * 2


def precisions() -> list[str]:
    """What the three levels of torch's precision settings say."""
    backends = torch.backends
    levels = backends, backends.mkldnn, backends.mkldnn.matmul
    return [level.fp32_precision for level in levels]


@pytest.fixture
def kept_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("asked", ["bf16", "tf32"])
def test_a_call_leaves_the_precision_to_the_user(kept_precision, asked):
    """ "bf16" asked for, a product, "ieee" again: nothing stays pinned below the level of both."""
    want = every_product()
    torch.backends.fp32_precision = asked
    before = precisions()
    got = every_product()
    assert precisions() == before and asked in before
    torch.backends.fp32_precision = "ieee"
    assert asked not in precisions()
    assert all(map(same_bytes, got, want))


def test_threads_that_switch_everything(kept_precision):
    """Four threads compute while a fifth and they themselves flip what torch lets them flip."""
    x, weight = drawn(70, K) * TINY, drawn(N, K) * TINY
    want = ck.linear(x, weight)
    finished, wrong = threading.Event(), []

    def switch():
        for name in itertools.cycle(("medium", "highest", "high")):
            torch.set_float32_matmul_precision(name)
            if finished.is_set():
                return

    def compute(number: int):
        for i in range(25):
            torch.set_flush_denormal(bool((i + number) % 3))
            if not same_bytes(ck.linear(x, weight), want):
                wrong.append((number, i))

    switcher = threading.Thread(target=switch)
    workers = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
    for thread in (switcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    finished.set()
    switcher.join()
    assert wrong == []


# ---- the floating-point environment -------------------------------------------------------------


def subnormal() -> list[torch.Tensor]:
    """Inputs of every kind of product and sum, 64 equal rows first; all results are subnormal."""
    row, weight = drawn(1, 2048) * TINY, drawn(512, 2048) * TINY
    bias, dy = drawn(512) * 1e-38, drawn(64, 4096) * 1e-39
    return [row.expand(64, 2048), weight, bias, dy, drawn(64, 512) * TINY, drawn(64, 96) * TINY]


def results(x, weight, bias, dy, left, right) -> list[torch.Tensor]:
    state = torch.zeros(512, 96)
    op.linear_dw_(left, right, state, "chain")
    y = [op.linear(x, weight, b, None, "chain") for b in (None, bias)]
    return [*y, op.linear_dbias(dy, "chain"), state]


def switch(flush: bool) -> None:
    """Starts the thread's team while its caller flushes or not, then does the opposite."""
    torch.set_flush_denormal(not flush)
    torch.ones(1 << 20).mul_(1.5)
    torch.set_flush_denormal(flush)


def results_after(flush: bool, inputs: list[torch.Tensor]) -> tuple[bool, list[torch.Tensor]]:
    """Of a thread, and so of a team, that is new."""

    def run():
        switch(flush)
        return ieee._flushes(), results(*inputs)

    return in_a_thread(run)


@pytest.mark.parametrize("flush", [False, True])
def test_flushing_of_subnormals_changes_no_bit(monkeypatch, flush):
    """The caller flushes and its team does not, and the other way round.  The mutant has no
    environment for the team: rows that were equal are not."""
    with threads(2):
        inputs = subnormal()
        want = in_a_thread(lambda: results(*inputs))
        still, got = results_after(flush, inputs)
    assert all(map(same_bytes, got, want)) and still == flush
    assert same_bytes(want[0], want[0][:1].expand(64, 512))
    for t in want:
        assert ((t != 0) & (t.abs() < 1e-38)).float().mean() > 0.2
    with threads(2):
        monkeypatch.setattr(ieee, "_everywhere", lambda environment, count: None)
        _, (y, *_) = results_after(flush, inputs)
    assert not same_bytes(y, y[:1].expand(64, 512))


@pytest.mark.parametrize("flush", [False, True])
def test_the_team_has_the_callers_environment_afterwards(flush):
    values = torch.full((1 << 20,), 1e-39)

    def flushed() -> list[torch.Tensor]:
        switch(flush)
        with ieee.ieee():
            inside = values * 1.5
        return [inside.view(torch.int32), (values * 1.5).view(torch.int32)]

    with threads(2):
        inside, after = in_a_thread(flushed)
    assert (inside != 0).all() and (after == 0).float().mean() == flush


@pytest.mark.parametrize("flush", [False, True])
def test_the_guard_puts_everything_back_after_an_error(flush):
    c, upward = c_library.functions(), 0x800 if platform.machine() == "x86_64" else 0x400000
    torch.set_flush_denormal(flush)
    c.fesetround(upward)
    c.omp_set_dynamic(1)
    try:
        with pytest.raises(KeyError), ieee.ieee():
            assert not ieee._flushes() and not c.omp_get_dynamic()
            assert 1.0 + 2.0**-60 == 1.0
            raise KeyError
        assert ieee._flushes() == flush and c.omp_get_dynamic()
        assert float("1") + 2.0**-60 > 1.0
    finally:
        c.fesetround(0)
        c.omp_set_dynamic(0)
        torch.set_flush_denormal(False)


# ---- the number of threads ----------------------------------------------------------------------

PROBE = """
import torch
from tests.test_cpu_math import counted, ids
torch.set_num_threads(2)
print(*counted(), *ids())
"""


def counted() -> tuple[int, ...]:
    """(threads asked for, threads given, threads that ran) of a product's team."""
    c, ran = c_library.functions(), []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ran.append(1))
    with ieee.ieee() as team:
        c.GOMP_parallel(ctypes.cast(note, ctypes.c_void_p).value, None, team[0], 0)
    return *team, len(ran)


def ids() -> list[str]:
    return [ck.contract_id(name) for name in ("linear", "matmul", "block_sparse_attention")]


def test_the_contract_id_counts_the_threads_that_there_are():
    """OMP_THREAD_LIMIT gives fewer than torch counts; OMP_DYNAMIC would, while it is busy."""
    with threads(2):
        assert counted() == (2, 2, 2)
        c_library.functions().omp_set_dynamic(1)
        try:
            assert counted() == (2, 2, 2)
        finally:
            c_library.functions().omp_set_dynamic(0)
        plain = ids()
    run = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=ROOT,
        env=os.environ | {"OMP_THREAD_LIMIT": "1"},
        check=True,
        stdout=subprocess.PIPE,
    )
    *numbers, linear, matmul, attention = run.stdout.decode().split()
    assert numbers == ["2", "1", "1"]
    assert not set(plain) & {linear, matmul, attention}


def test_a_build_without_the_functions_is_refused_by_name(monkeypatch):
    caches = c_library.functions, c_library.missing, dispatch._choose
    with monkeypatch.context() as patch:
        patch.setitem(c_library._SIGNATURES, "no_such_function_", (None, (), False))
        for cached in caches:
            cached.cache_clear()
        with pytest.raises(ck.errors.BackendUnavailable, match=r"cpu: .*no_such_function"):
            ck.linear(drawn(2, K), drawn(N, K))
        assert ck.info()
    for cached in caches:
        cached.cache_clear()
