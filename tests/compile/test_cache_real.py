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


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    monkeypatch.setattr(toolchain, "dsl_environment", dict)  # another test may have set some
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", SOURCE)


@pytest.fixture
def real():
    from tests.compile import toy_kernel

    return toy_kernel


def another_place(monkeypatch, folder):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(folder))
    cache.clear()


def test_memory_library_and_object_give_the_same_function(root, real, monkeypatch):
    """The three ways to a function: a linked library, an object in memory, one on disk.  The same
    kernel has the same bytes, another configuration another code, symbol and file."""
    linked = cache.get(real.kernel(3), ARCH)
    (library,) = root.glob("*.so")
    files = sorted(root.iterdir())
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    cache.clear()
    resident = cache.get(real.kernel(3), ARCH)
    assert sorted(root.iterdir()) == files
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "1")
    another_place(monkeypatch, root / "again")
    cache.get(real.kernel(3), ARCH)
    (again,) = (root / "again").glob("*.so")
    assert again.name == library.name and again.read_bytes() == library.read_bytes()
    monkeypatch.setattr(load, "linker", lambda: None)
    another_place(monkeypatch, root / "objects")
    engine = cache.get(real.kernel(3), ARCH)
    (obj,) = (root / "objects").glob("*.o")
    assert type(linked) is type(resident) is type(engine)
    message = complaints(linked)
    assert "expected device_type=cuda" in message[2][1]
    assert message == complaints(resident) == complaints(engine)
    cache.get(real.kernel(5), ARCH)
    codes = {device_code(path.read_bytes()) for path in (root / "objects").glob("*.o")}
    assert len(codes) == 2 and b"" not in codes
    assert symbol_of(real.kernel(3), ARCH) != symbol_of(real.kernel(5), ARCH)
    assert device_code(library.read_bytes()) == device_code(obj.read_bytes())
    cache.clear()
    assert complaints(cache.get(real.kernel(3), ARCH)) == message
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


def test_hits_threads_and_forks_in_a_fresh_process(root, real):
    """A hit imports no cutlass.  Without the process-wide lock two compiles die in the DSL, not in
    an exception."""
    message = complaints(cache.get(real.kernel(3), ARCH))
    script = f"""
    import os, sys, threading
    from cute_kernels.compile import cache, toolchain
    from cute_kernels.compile.kernel import Kernel
    from tests.compile.complaints import complaints
    from tests.compile.toy import ARCH
    toolchain.SOURCE_AT_IMPORT = {SOURCE!r}
    toolchain.source_digest = lambda: {SOURCE!r}

    def never():
        raise AssertionError("compiled")

    stored = Kernel("toy", (("scale", 3), ("threads", 128)), never)
    assert complaints(cache.get(stored, ARCH)) == {message!r}
    assert cache.counts() == {{"built": 0, "disk": 1, "ahead": 0}}
    assert "cutlass" not in sys.modules

    from tests.compile.toy_kernel import kernel
    threads = [threading.Thread(target=cache.get, args=(kernel(i), ARCH)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert cache.counts()["built"] == 2
    before = cache.get(kernel(0), ARCH)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert cache.get(kernel(0), ARCH) is before and complaints(before)
            assert complaints(cache.get(kernel(8), ARCH)) and cache.counts()["built"] == 3
            status = 0
        finally:
            os._exit(status)
    assert complaints(cache.get(kernel(9), ARCH)) == complaints(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.get(kernel(8), ARCH)
    assert cache.counts() == {{"built": 3, "disk": 2, "ahead": 0}}
    """
    process = toy.python(script, CUTE_KERNELS_CACHE_DIR=str(root))
    assert process.returncode == 0, process.stderr
