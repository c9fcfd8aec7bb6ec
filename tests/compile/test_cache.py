"""The cache with builds of milliseconds: hits, damage, threads, forks, memory only."""

import hashlib
import importlib
import os
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cute_kernels.compile import aot, cache, load, store, toolchain
from cute_kernels.compile.kernel import Kernel
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, CacheError
from tests.compile import toy
from tests.compile.toy import ARCH
from tests.hang import HANG_SECONDS

pytestmark = toy.needs_linker


@dataclass
class Place:
    """The cache folder of one test and the file that counts its builds."""

    root: Path
    counter: Path

    def kernel(self, value: int = 7, before=lambda: None) -> Kernel:
        return toy.kernel(value, self.counter, before)

    def fresh(self, value: int = 7) -> int:
        """State of a new process: nothing in memory."""
        cache.clear()
        return cache.get(self.kernel(value), ARCH)()

    @property
    def builds(self) -> int:
        return toy.noted(self.counter)

    def only(self, suffix: str) -> Path:
        (path,) = self.root.glob(f"toy-*{suffix}")
        return path


@pytest.fixture
def place(root, tmp_path):
    return Place(root, tmp_path / "counter")


# Hits.


def test_another_architecture_is_lacking(place):
    kernel = place.kernel()
    cache.get(kernel, ARCH)
    assert cache.lacking([kernel], ARCH) == [] and cache.lacking([kernel], "sm_100a") == [kernel]


def test_memory_then_disk_then_build(place):
    first = cache.get(place.kernel(), ARCH)
    assert first() == 7
    assert cache.get(place.kernel(), ARCH) is first
    assert cache.counts() == {"built": 1, "disk": 0, "ahead": 0}
    assert place.fresh() == 7
    assert cache.counts() == {"built": 0, "disk": 1, "ahead": 0}
    assert place.builds == 1


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(place):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get(place.kernel(before=fail), ARCH)
    assert not list(place.root.glob("toy-*.so")) and not list(place.root.glob(".*"))
    assert not toy.is_locked(place.only(".lock"))
    assert cache.get(place.kernel(), ARCH)() == 7


FULL = "{root}: .*No space left on device.*CACHE_DIR"


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (toy.Compiled, "export_to_c", toy.full, FULL),
        (os, "fsync", toy.full, FULL),
        (toy, "_SOURCE", toy.UNLINKABLE, "(?s)could not link.*nowhere"),
    ],
)
def test_what_cannot_be_kept_is_an_error(place, monkeypatch, owner, name, value, words):
    place.fresh(8)  # the root exists
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        with pytest.raises(CacheError, match=words.format(root=place.root)):
            cache.get(place.kernel(), ARCH)
    assert len(list(place.root.glob("toy-*.so"))) == 1 and not list(place.root.glob(".*"))
    assert cache.get(place.kernel(), ARCH)() == 7


@pytest.mark.parametrize("way", ["stored", pytest.param("resident", marks=toy.needs_dsl), "ahead"])
def test_host_code_is_pinned_before_it_is_written(place, monkeypatch, tmp_path, way):
    """What the DSL made for the CPU of this host never leaves it; test_cache_real reads the pin."""
    pinned = []
    monkeypatch.setattr(toy.Compiled, "ir_module", "the module")
    monkeypatch.setattr(load, "_fix_host_cpu", pinned.append)
    written = toy.Compiled.export_to_c

    def export_to_c(self, *arguments, **options):
        assert pinned == ["the module"]
        written(self, *arguments, **options)

    monkeypatch.setattr(toy.Compiled, "export_to_c", export_to_c)
    if way == "ahead":
        aot.export([place.kernel()], ARCH, tmp_path / "aot")
    else:
        monkeypatch.setenv("CUTE_KERNELS_CACHE", "01"[way == "stored"])
        assert cache.get(place.kernel(), ARCH)() == 7
    assert pinned == ["the module"]


# Damage: each case is compiled again; the damaged bytes are never loaded.


def overwrite(path: Path, content: bytes) -> None:
    """A new file of that name: this process has the old one mapped."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


DAMAGE = {
    "empty": lambda path: overwrite(path, b""),
    "last byte lost": lambda path: overwrite(path, path.read_bytes()[:-1]),
    "a byte more": lambda path: overwrite(path, path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "symbolic link": toy.swap_link,
    "fifo": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "group can write": lambda path: path.chmod(0o620),
    "others can write": lambda path: path.chmod(0o602),
    "of another user": lambda path: os.chown(path, 12345, 12345),
}


@pytest.fixture
def loads(monkeypatch):
    """The digests of the libraries that were handed to the loader."""
    recorded = []
    spied = load.function

    def spy(path, symbol):
        recorded.append(hashlib.sha256(path.read_bytes()).hexdigest())
        return spied(path, symbol)

    monkeypatch.setattr(load, "function", spy)
    return recorded


def assert_rebuilt(place, loads, good):
    before = place.builds
    assert place.fresh() == 7
    assert place.builds == before + 1
    assert set(loads) == {good}
    assert place.fresh() == 7
    assert place.builds == before + 1  # repaired: the next process hits


@pytest.mark.parametrize("suffix", [".so", ".manifest"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_compiled_again(place, loads, suffix, how, caplog):
    if how == "of another user" and os.geteuid():
        pytest.skip("only root can give a file away")
    place.fresh()
    good = loads[0]
    DAMAGE[how](place.only(suffix))
    assert_rebuilt(place, loads, good)
    # A missing manifest is no entry; everything else is damage, and is said.
    assert ("compiling again" in caplog.text) == (how != "missing" or suffix == ".so")


@pytest.mark.parametrize("suffix", [".so", ".manifest"])
def test_any_flipped_bit_is_found(place, loads, suffix):
    place.fresh()
    good = loads[0]
    path = place.only(suffix)
    content = path.read_bytes()
    draw = random.Random(f"flip{suffix}")
    ends = [0, 8 * len(content) - 1]
    for bit in ends + [draw.randrange(8 * len(content)) for _ in range(200)]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        overwrite(path, flipped)
        with pytest.raises(store.BadEntry):
            store.Store(place.root).read(path.stem)
    assert_rebuilt(place, loads, good)


def test_a_store_that_believes_what_it_finds_is_seen(place, monkeypatch):
    place.fresh()
    monkeypatch.setattr(store, "_sha256", lambda content: "same")
    place.fresh()  # compiled again once: the old digest is not "same"
    builds, path = place.builds, place.only(".so")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    overwrite(path, content)
    assert place.fresh() == 7 and place.builds == builds


def test_a_verified_file_that_does_not_load_is_an_error_that_names_it(place, monkeypatch):
    place.fresh()
    cache.clear()
    monkeypatch.setattr(cache, "symbol_of", lambda kernel, arch: "ck_other")
    monkeypatch.setattr(load, "_from_library", lambda path, symbol: 1 / 0)
    with pytest.raises(CacheError, match=rf"{place.only('.so')}: .*does not load"):
        cache.get(place.kernel(), ARCH)


def test_a_bad_root_is_an_error_and_not_a_cold_cache(place):
    place.root.mkdir()
    place.root.chmod(0o777)
    with pytest.raises(CacheError, match="lets group or others write"):
        cache.get(place.kernel(), ARCH)
    assert place.builds == 0


# Memory only.


@toy.needs_dsl
def test_memory_only_leaves_no_file(place, monkeypatch, tmp_path):
    importlib.import_module("cutlass.cute")  # makes a folder of its own in the temporary folder
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    function = cache.get(place.kernel(), ARCH)
    assert function() == 7 and cache.get(place.kernel(), ARCH) is function
    assert sorted(tmp_path.iterdir()) == [place.counter, tmp_path / "temporary"]
    assert not list((tmp_path / "temporary").iterdir())
    place.fresh()
    assert place.builds == 2


# Source edited while the process runs.


@toy.needs_dsl
def test_a_kernel_of_edited_source_is_not_stored(place, monkeypatch, caplog):
    monkeypatch.setattr(toolchain, "source_digest", lambda: "edited")
    assert place.fresh() == 7
    assert not list(place.root.glob("toy-*.so"))
    assert "source changed since import" in caplog.text


# Threads and forks.


@pytest.mark.parametrize("disk", ["1", pytest.param("0", marks=toy.needs_dsl)])
def test_threads_build_each_kernel_once_and_share_it(place, monkeypatch, disk):
    monkeypatch.setenv("CUTE_KERNELS_CACHE", disk)
    ready = threading.Barrier(8)
    got = []

    def work(value):
        ready.wait()
        got.append((value, cache.get(place.kernel(value, lambda: time.sleep(0.05)), ARCH)))

    run_threads(*(lambda value=i % 2: work(value) for i in range(8)))
    assert sorted((value, function()) for value, function in got) == [(0, 0)] * 4 + [(1, 1)] * 4
    assert place.builds == len({id(function) for _, function in got}) == 2


def run_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_builds_never_overlap_in_a_process(place, tmp_path):
    """Two threads inside cute.compile crash the process (DSL 4.8.1)."""
    inside, most = [], []

    def before():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.03)
        inside.pop()

    def export():
        aot.export([place.kernel(10 + i, before) for i in range(3)], ARCH, tmp_path / "aot")

    gets = [partial(cache.get, place.kernel(i, before), ARCH) for i in range(4)]
    run_threads(*gets[:2], export, *gets[2:])
    assert most == [1] * 7


def in_child(work) -> int:
    """Forks; the exit status is 0 if ``work()`` returned true."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            threading.Timer(HANG_SECONDS, os._exit, (2,)).start()
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_uses_what_its_parent_loaded_and_builds_more(place):
    function = cache.get(place.kernel(), ARCH)

    def work():
        same = cache.get(place.kernel(), ARCH) is function and function() == 7
        return same and cache.get(place.kernel(8), ARCH)() == 8

    assert in_child(work) == 0
    assert place.builds == 2
    assert place.fresh(8) == 8
    assert place.builds == 2  # from the child's entry


def test_a_fork_waits_for_the_compile_of_another_thread(place):
    started, finished = threading.Event(), threading.Event()

    def before():
        started.set()
        time.sleep(0.3)
        finished.set()

    builder = threading.Thread(target=cache.get, args=(place.kernel(before=before), ARCH))
    builder.start()
    started.wait()
    status = in_child(lambda: finished.is_set() and cache.get(place.kernel(8), ARCH)() == 8)
    builder.join()
    assert status == 0
    assert cache.get(place.kernel(), ARCH)() == 7
    assert place.builds == 2


def test_a_child_forked_inside_a_build_does_not_keep_the_lock(place):
    """The child of a build (a compiler driver, say) outlives it and has copies of its files."""
    reader, writer = os.pipe()

    def before():
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            os._exit(0)

    cache.get(place.kernel(before=before), ARCH)
    locked = toy.is_locked(place.only(".lock"))
    os.close(writer)
    os.close(reader)
    os.wait()
    assert not locked


# The door.


def values(value):
    return lambda place: Kernel("toy", (("tile", value),), toy.Compiled)


BAD = {
    "no name": (lambda place: Kernel("", (), toy.Compiled), "name"),
    "a name of capitals": (lambda place: Kernel("Gemm", (), toy.Compiled), "name"),
    "a name above": (lambda place: Kernel("../a", (), toy.Compiled), "name"),
    "a float": (values(1.5), r"constexpr tile: .*got"),
    "a tuple": (values((1,)), r"constexpr tile: .*got"),
    "twice": (lambda place: Kernel("toy", (("a", 1), ("a", 2)), toy.Compiled), "each name once"),
    "no arch": (lambda place: cache.get(place.kernel(), ""), "arch"),
    "an arch above": (lambda place: cache.get(place.kernel(), "sm_90a/.."), "arch"),
    "an arch of another vendor": (lambda place: cache.get(place.kernel(), "gfx942"), "arch"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(place, what):
    call, words = BAD[what]
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=words):
        call(place)
