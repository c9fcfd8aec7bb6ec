"""The cache with real kernels, compiled for sm_90a without a GPU.

Nothing is launched here; that a loaded function is alive shows in the argument checks of its
compiled entry.  tests/compile/test_aot.py runs stored kernels on the simulator.
"""

import re

import pytest

from cute_kernels.compile import cache, load, toolchain
from cute_kernels.compile.kernel import symbol_of
from tests.compile import toy
from tests.compile.complaints import complaints
from tests.compile.toy import ARCH

pytestmark = [toy.needs_linker, toy.needs_dsl]
SOURCE = "pinned: someone may be editing the package while its tests run"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTE_KERNELS_CACHE", raising=False)
    monkeypatch.delenv("CUTE_KERNELS_AOT_DIR", raising=False)
    monkeypatch.setattr(toolchain, "dsl_environment", dict)  # another test may have set some
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", SOURCE)
    monkeypatch.setattr(toolchain, "source_digest", lambda: SOURCE)
    cache.clear()
    yield tmp_path / "cache"
    cache.clear()


@pytest.fixture
def real():
    from tests.compile import toy_kernel

    return toy_kernel


PRELUDE = f"""
    import sys
    from cute_kernels.compile import cache, load, toolchain
    from cute_kernels.compile.kernel import Kernel
    from tests.compile.toy import ARCH
    toolchain.SOURCE_AT_IMPORT = {SOURCE!r}
    toolchain.source_digest = lambda: {SOURCE!r}
"""


def fresh(root, script):
    process = toy.python(PRELUDE + script, CUTE_KERNELS_CACHE_DIR=str(root))
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_hit_in_a_fresh_process_does_not_import_cutlass(root, real):
    message = complaints(cache.get(real.kernel(3), ARCH))
    assert "expected device_type=cuda" in message[2][1]
    fresh(
        root,
        f"""
    from tests.compile.complaints import complaints
    def never():
        raise AssertionError("compiled")
    kernel = Kernel("toy", (("scale", 3), ("threads", 128)), never)
    function = cache.get(kernel, ARCH)
    assert complaints(function) == {message!r}
    assert cache.counts() == {{"built": 0, "disk": 1, "ahead": 0}}
    assert "cutlass" not in sys.modules
    """,
    )


def test_memory_library_and_object_give_the_same_function(root, real, monkeypatch):
    """The three ways to a function: a linked library, an object in memory, one on disk."""
    linked = cache.get(real.kernel(3), ARCH)
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    cache.clear()
    resident = cache.get(real.kernel(3), ARCH)
    files = sorted(root.iterdir())
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "1")
    monkeypatch.setattr(load, "linker", lambda: None)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(root / "objects"))
    cache.clear()
    engine = cache.get(real.kernel(3), ARCH)
    assert sorted(set(root.iterdir()) - {root / "objects"}) == files
    assert type(linked) is type(resident) is type(engine)
    assert complaints(linked) == complaints(resident) == complaints(engine)
    library = next(root.glob("*.so")).read_bytes()
    obj = next((root / "objects").glob("*.o")).read_bytes()
    assert not list((root / "objects").glob("*.so"))
    assert device_code(library) == device_code(obj) != b""
    cache.clear()
    assert complaints(cache.get(real.kernel(3), ARCH)) == complaints(linked)
    assert cache.counts() == {"built": 0, "disk": 1, "ahead": 0}


@pytest.mark.parametrize("host", ["sm_90a", "sm_100a"])
def test_memory_only_serves_a_host_that_the_dsl_takes_for_another(root, real, monkeypatch, host):
    """The DSL compiles for sm_90a there but gives a result that cannot be called."""
    from cutlass.cutlass_dsl import CuTeDSL

    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", host)
    assert "expected device_type=cuda" in complaints(cache.get(real.kernel(3), ARCH))[2][1]


def device_code(binary: bytes) -> bytes:
    """The embedded cubin: the ELF image whose machine is 190 (CUDA), to its section table."""
    for start in [m.start() for m in re.finditer(b"\x7fELF", binary)]:
        image = binary[start:]
        if int.from_bytes(image[18:20], "little") == 190:
            return image[: int.from_bytes(image[40:48], "little")]
    return b""


def test_configurations_differ_in_code_symbol_and_file(root, real):
    for scale in (3, 5):
        cache.get(real.kernel(scale), ARCH)
    symbols = {symbol_of(real.kernel(scale), ARCH) for scale in (3, 5)}
    codes = {device_code(path.read_bytes()) for path in root.glob("*.so")}
    assert len(symbols) == len(codes) == 2 and b"" not in codes


def test_the_same_kernel_gives_the_same_bytes(root, real, monkeypatch):
    cache.get(real.kernel(3), ARCH)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(root / "again"))
    cache.clear()
    cache.get(real.kernel(3), ARCH)
    first, second = next(root.glob("*.so")), next((root / "again").glob("*.so"))
    assert first.name == second.name and first.read_bytes() == second.read_bytes()


def host_functions(compiled, tmp_path) -> list[tuple[str, str]]:
    """The CPU and its features that each host function of an export is compiled for."""
    path = tmp_path / "kernel.ll"
    compiled.export_to_c(str(path), function_name="f", export_only_tvm_ffi_symbols=True)
    text = path.read_text()
    groups = dict(re.findall(r"^attributes (#\d+) = (.*)$", text, re.M))
    used = re.findall(r"^define .*?(#\d+)?(?: section.*)? \{$", text, re.M)

    def of(group: str, name: str) -> str:
        out = re.search(rf'"{name}"="([^"]*)"', groups.get(group, ""))
        return out[1] if out else "the host's"

    return [(of(group, "target-cpu"), of(group, "target-features")) for group in used]


@pytest.mark.skipif(toolchain.platform.machine() != "x86_64", reason="the CPU's name is x86's")
def test_host_code_is_for_any_cpu_of_the_machine_and_not_for_this_one(real, tmp_path):
    """The DSL alone compiles for the build host's CPU: AVX-512 code in a shared cache folder."""
    compiled = real.compile_now(3, 128)
    before = host_functions(compiled, tmp_path)
    assert len(before) >= 3 and set(before) == {("the host's", "the host's")}
    load.write_object(compiled, "f", tmp_path / "kernel.o")
    after = host_functions(compiled, tmp_path)
    assert set(after) == {("x86-64-v2", "+cx16,+popcnt,+sahf,+sse4.2")}
    assert len(after) == len(before)


def test_threads_and_forks_with_real_compiles(root):
    """Without the process-wide lock this dies in the DSL, not in an exception."""
    fresh(
        root,
        """
    import os, threading
    from tests.compile.toy_kernel import kernel
    from tests.compile.complaints import complaints

    threads = [threading.Thread(target=cache.get, args=(kernel(i), ARCH)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert cache.counts()["built"] == 4
    before = cache.get(kernel(0), ARCH)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            threading.Timer(60, os._exit, (2,)).start()
            assert cache.get(kernel(0), ARCH) is before and complaints(before)
            assert complaints(cache.get(kernel(8), ARCH)) and cache.counts()["built"] == 5
            status = 0
        finally:
            os._exit(status)
    assert complaints(cache.get(kernel(9), ARCH)) == complaints(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.get(kernel(8), ARCH)
    assert cache.counts() == {"built": 5, "disk": 1, "ahead": 0}
    """,
    )
