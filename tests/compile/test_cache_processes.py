"""Several processes, and processes that are killed: one compile per key, nothing half written."""

import pytest

from tests.compile import toy

pytestmark = toy.needs_linker

PRELUDE = """
    import os, signal, sys, time
    from pathlib import Path
    sys.modules["torch"] = None  # nothing here takes tensors, and each process would import it
    from cute_kernels.compile import cache, store, toolchain
    from tests.compile import toy
    from tests.hang import HANG_SECONDS

    # Someone may be editing the package while its tests run.
    toolchain.source_digest = lambda: toolchain.SOURCE_AT_IMPORT
    toolchain.cuda_runtime_version = lambda: "none"
    counter = Path(sys.argv[1])

    def in_child(work):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = work() or 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        return child

    def status(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script after the prelude; returns the builds counted and the cache folder."""

    def run(script):
        root, counter = tmp_path / "cache", tmp_path / "counter"
        process = toy.python(PRELUDE + script, counter, CUTE_KERNELS_CACHE_DIR=str(root))
        assert process.returncode == 0, process.stderr
        return toy.noted(counter), root

    return run


def test_eight_cold_processes_compile_once(run):
    builds, root = run("""
    toolchain.facts()  # what takes long comes before the race

    def work():
        while not gate.exists():
            pass
        kernel = toy.kernel(7, counter, before=lambda: time.sleep(0.3))
        assert cache.get(kernel, toy.ARCH)() == 7

    gate = counter.with_name("gate")
    children = [in_child(work) for _ in range(8)]
    gate.touch()
    assert [status(child) for child in children] == [0] * 8
    """)
    assert builds == 1
    assert len(list(root.glob("toy-*.so"))) == 1 and not list(root.glob(".*"))


def test_the_race_test_sees_a_missing_lock(run):
    """The mutant: without the file lock two processes meet inside their builds."""
    builds, _ = run("""
    cache.get(toy.kernel(1), toy.ARCH)  # the root exists
    store.fcntl.flock = lambda *_: None

    def meet():
        counter.with_name(f"inside{os.getpid()}").touch()
        for _ in range(100 * HANG_SECONDS):
            if len(list(counter.parent.glob("inside*"))) >= 2:
                break
            time.sleep(0.01)

    def work():
        cache.get(toy.kernel(7, counter, before=meet), toy.ARCH)

    children = [in_child(work) for _ in range(8)]
    [status(child) for child in children]
    """)
    assert builds > 1


def test_a_killed_process_leaves_nothing_half_written(run):
    """Before the object has its name, before the manifest has, and in a write."""
    builds, _ = run("""
    cache.get(toy.kernel(1, counter), toy.ARCH)  # the root exists
    root = Path(os.environ["CUTE_KERNELS_CACHE_DIR"])

    def whole(path, *_):
        assert path.stat().st_size > 0

    def half(descriptor):
        # Half of the bytes are in the temporary file; its name was never given.
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)

    def killed(value, name, before, at):
        real, calls = getattr(os, name), []

        def dying(*args):
            before(*args)
            calls.append(args)
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        def work():
            setattr(os, name, dying)
            cache.get(toy.kernel(value, counter), toy.ARCH)

        assert status(in_child(work)) == -signal.SIGKILL
        assert [path for path in root.glob(".toy-*") if path.is_file()], "killed before the file"
        (lock,) = [p for p in root.glob("*.lock") if not p.with_suffix(".manifest").exists()]
        assert not toy.is_locked(lock)
        for _ in range(2):
            assert cache.get(toy.kernel(value, counter), toy.ARCH)() == value
            assert not list(root.glob(".*"))
            cache.clear()

    killed(7, "replace", whole, 1)
    killed(8, "replace", whole, 2)
    killed(9, "fsync", half, 1)
    """)
    assert builds == 1 + 3 * 2  # the first kernel; each killed build and the one after it


def test_a_waiter_takes_over_when_the_builder_is_killed(run):
    builds, _ = run("""
    started = counter.with_name("started")

    def builder():
        def before():
            toy.note(counter)
            started.touch()
            time.sleep(HANG_SECONDS)
        cache.get(toy.kernel(7, counter, before), toy.ARCH)

    def waiter():
        assert cache.get(toy.kernel(7, counter), toy.ARCH)() == 7

    victim = in_child(builder)
    while not started.exists():
        time.sleep(0.01)
    heir = in_child(waiter)
    time.sleep(0.3)
    assert os.waitpid(heir, os.WNOHANG) == (0, 0), "it did not wait"
    os.kill(victim, signal.SIGKILL)
    assert status(victim) == -signal.SIGKILL
    assert status(heir) == 0
    """)
    assert builds == 2
