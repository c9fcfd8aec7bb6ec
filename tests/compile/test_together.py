"""Several processes that fill the cache folder from one list."""

from __future__ import annotations

import os
import time

import pytest

from cute_kernels.compile import cache, together
from tests.compile import toy
from tests.compile.toy import ARCH
from tests.compile.toy_together import CATALOGUE, COUNT, NOTES, kernels
from tests.hang import HANG_SECONDS

pytestmark = toy.needs_linker


@pytest.fixture
def notes(root, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


def test_two_processes_compile_each_kernel_once(notes):
    """And who asks meanwhile gets what they compile."""
    every = kernels()
    assert cache.lacking(every, ARCH) == every
    with together.compiling(every, ARCH, CATALOGUE) as workers:
        assert workers == 2  # of the three CPUs one is this process's own
        while not os.listdir(notes):
            time.sleep(0.01)
        assert [cache.get(kernel, ARCH)() for kernel in every[:2]] == [0, 1]
        assert cache.counts()["built"] == 0
        for _ in range(20 * HANG_SECONDS):
            if not cache.lacking(every, ARCH):
                break
            time.sleep(0.05)
    out = [name.split("-")[1:] for name in os.listdir(notes)]
    assert sorted(int(value) for value, _ in out) == list(range(COUNT))
    assert len({pid for _, pid in out}) == 2
    assert [cache.get(kernel, ARCH)() for kernel in every] == list(range(COUNT))
    assert cache.counts() == {"built": 0, "disk": COUNT, "ahead": 0}
    assert cache.loaded() == [kernel.identity for kernel in every]


def test_nothing_is_started_for_what_is_there_or_cannot_be_kept(notes, monkeypatch):
    every = [toy.kernel(value) for value in range(3)]  # not in it: a worker would fail
    assert [cache.get(kernel, ARCH)() for kernel in every] == [0, 1, 2]
    with together.compiling(every, ARCH, CATALOGUE) as workers:
        assert workers == 0
    cache.clear()
    with together.compiling(every, ARCH, CATALOGUE) as workers:
        assert workers == 0  # on disk
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    cache.clear()
    with together.compiling(kernels(), ARCH, CATALOGUE) as workers:
        assert workers == 0


def test_processes_end_with_the_block(notes, monkeypatch):
    started = []
    popen = together.subprocess.Popen

    def spied(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(together.subprocess, "Popen", spied)
    with pytest.raises(ZeroDivisionError), together.compiling(kernels(), ARCH, CATALOGUE):
        1 / 0  # noqa: B018
    assert len(started) == 2 and all(worker.poll() is not None for worker in started)


def test_what_another_process_compiles_is_left(notes):
    (kernel,) = kernels()[:1]
    store, stem = cache._place(kernel, ARCH)
    with store.locked(stem):
        cache.fill(kernel, ARCH)
    assert not os.listdir(notes)
    assert cache.lacking([kernel], ARCH) == [kernel]
