"""Ahead-of-time folders: what must match, what damage is found, and that nothing is compiled."""

import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import stat
from unittest import mock

import pytest

from cute_kernels import arch
from cute_kernels.compile import ahead, aot, cache, load, toolchain
from cute_kernels.compile.kernel import Kernel, symbol_of
from cute_kernels.errors import AotError, ArgumentValueError
from ptxsim.skips import requires_sim
from tests.compile import toy
from tests.compile.toy import ARCH

pytestmark = [toy.needs_linker, pytest.mark.usefixtures("root")]


def never() -> None:
    raise AssertionError("compiled")


def catalogue(*values):
    return [toy.kernel(value) for value in values]


def stored(value):
    """The kernel as a host knows it that cannot compile."""
    return Kernel("toy", (("value", value),), never)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export of two kernels."""
    out = tmp_path_factory.mktemp("exported") / "aot"
    with mock.patch.object(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT):
        aot.export(catalogue(7, 8), ARCH, out)
    return out


@pytest.fixture
def out(exported, tmp_path):
    """A copy of that export for one test; nothing of it is in memory."""
    cache.clear()
    return shutil.copytree(exported, tmp_path / "aot")


def library(out, value=7):
    return out / symbol_of(stored(value), ARCH) / "kernel.so"


# Export and load.


def test_a_loaded_folder_serves_its_kernels_and_builds_none(out, tmp_path, monkeypatch):
    """Moved elsewhere, and compiled on a CPU host, loaded on a GPU host."""
    moved = tmp_path / "elsewhere" / "kernels"
    shutil.copytree(out, moved)
    shutil.rmtree(out)
    monkeypatch.setattr(toolchain, "driver_version", lambda: "13000")
    monkeypatch.setattr(toolchain, "cuda_runtime_version", lambda: "13.0")
    aot.load(moved, ARCH)
    assert [cache.get(stored(value), ARCH)() for value in (7, 8)] == [7, 8]
    assert cache.counts() == {"built": 0, "disk": 0, "ahead": 2}
    assert not (tmp_path / "cache").exists()


def test_the_setting_names_a_folder_that_the_first_miss_loads(out, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(out))
    assert cache.get(stored(7), ARCH)() == 7
    assert cache.get(toy.kernel(9), ARCH)() == 9  # not in the catalogue: compiled
    assert cache.counts() == {"built": 1, "disk": 0, "ahead": 2}


def test_every_file_can_be_read_and_none_written_by_others(tmp_path):
    old = os.umask(0)
    try:
        aot.export(catalogue(7), ARCH, tmp_path / "aot")
    finally:
        os.umask(old)
    paths = [tmp_path / "aot", *(tmp_path / "aot").rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    folder = symbol_of(stored(7), ARCH)
    assert modes == {"aot": 0o755, folder: 0o755, "manifest.json": 0o644, "kernel.so": 0o644}


def other_source(patch):
    patch.setattr(toolchain, "source_digest", lambda: "edited")


def no_linker(patch):
    patch.setattr(load, "linker", lambda: None)


REFUSED = {
    "twice": (lambda patch: None, (7, 8, 7), ArgumentValueError, "each configuration once"),
    "no linker": (no_linker, (7,), AotError, "needs a linker"),
    "edited source": (other_source, (7,), AotError, "source changed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_exports(tmp_path, monkeypatch, what):
    prepare, values, error, words = REFUSED[what]
    prepare(monkeypatch)
    with pytest.raises(error, match=words):
        aot.export(catalogue(*values), ARCH, tmp_path / "aot")
    assert not (tmp_path / "aot").exists()


# Exports that do not end.


def failing(error: BaseException) -> Kernel:
    def fail():
        raise error

    return Kernel("bad", (), fail)


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(5, "x"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["aot", "new/folders/aot", "there"])
def test_an_export_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path, error, place):
    (tmp_path / "there").mkdir()
    out = tmp_path / place
    with pytest.raises(type(error)):
        aot.export([*catalogue(7), failing(error)], ARCH, out)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    aot.export(catalogue(7), ARCH, out)
    aot.load(out)


def test_a_killed_export_cannot_be_loaded_and_can_be_tried_again(tmp_path):
    """Unless others have put something beside it, which is not removed."""
    out = tmp_path / "aot"

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            aot.export([*catalogue(7), Kernel("bad", (), die)], ARCH, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert library(out).exists()
    with pytest.raises(AotError, match=r"manifest\.json"):
        aot.load(out)
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(AotError, match=f"{out}: expected a new or empty folder"):
        aot.export(catalogue(8), ARCH, out)
    assert (out / "mine" / "notes.txt").read_text() == "mine"
    shutil.rmtree(out / "mine")
    aot.export(catalogue(8), ARCH, out)
    assert {path.name for path in out.iterdir()} == {"manifest.json", library(out, 8).parent.name}
    aot.load(out)
    with pytest.raises(AotError, match=f"{out}: expected a new or empty folder"):
        aot.export(catalogue(8), ARCH, out)


def test_a_second_export_into_a_folder_that_is_being_written_is_refused(tmp_path):
    out = tmp_path / "aot"

    def meanwhile():
        with pytest.raises(AotError, match=f"{out}: another export is writing it"):
            aot.export(catalogue(8), ARCH, out)

    aot.export([toy.kernel(7, before=meanwhile)], ARCH, out)
    aot.load(out)
    assert cache.get(stored(7), ARCH)() == 7


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (toy.Compiled, "export_to_c", toy.full),
        (toy, "_SOURCE", toy.UNLINKABLE),
        (os, "fsync", toy.full),
    ],
)
def test_a_disk_that_is_full_is_an_error_that_names_the_folder(
    tmp_path, monkeypatch, owner, name, value
):
    out = tmp_path / "new" / "aot"
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(AotError, match=f"^{out}: (No space left on device|.*could not link)"):
        aot.export(catalogue(7), ARCH, out)
    assert not list(tmp_path.iterdir())


# Mismatch.


def test_another_architecture_is_named(out):
    aot.load(out)
    with pytest.raises(AotError, match=r"arch: .*compiled for sm_90a, not for sm_100a"):
        cache.get(stored(7), "sm_100a")
    assert cache.get(toy.kernel(9), "sm_100a")() == 9  # never in the catalogue


@pytest.mark.parametrize(
    ("what", "owner", "name", "value"),
    [
        ("source", toolchain, "SOURCE_AT_IMPORT", "other"),
        ("ffi", toolchain, "ffi_version", lambda: "0.0.1"),
        ("ffi", toolchain, "ffi_version", lambda: toolchain.NONE),
        ("variant", toolchain, "variant", lambda: "cu99"),
        ("machine", platform, "machine", lambda: "riscv64"),
    ],
)
def test_each_mismatch_is_named(out, monkeypatch, what, owner, name, value):
    theirs = toolchain.portable_facts()[what]
    monkeypatch.setattr(owner, name, value)
    ours = toolchain.portable_facts()[what]
    with pytest.raises(AotError) as caught:
        aot.load(out)
    assert str(caught.value) == f"{out}: {what}: compiled with {theirs}, here is {ours}"
    with pytest.raises(AotError, match=f"asked for sm_80.*{what}: "):
        aot.load(out, "sm_80")
    assert not cache._loaded


@toy.needs_dsl
def test_each_dsl_version_is_compared_and_absent_parts_are_not(out, monkeypatch):
    installed = toolchain.dsl_distributions()
    for name in installed:
        monkeypatch.setattr(toolchain, "dsl_distributions", lambda n=name: installed | {n: "0.1"})
        with pytest.raises(AotError, match=rf"dsl {name}: compiled with .*, here is 0\.1"):
            aot.load(out)
    only = f"nvidia-cutlass-dsl-libs-{toolchain.variant()}"
    monkeypatch.setattr(toolchain, "dsl_distributions", lambda: {only: installed[only]})
    aot.load(out)
    assert cache.get(stored(7), ARCH)() == 7


# Damage.


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "missing": lambda path: path.unlink(),
    "symbolic link": toy.swap_link,
    "group can write": lambda path: path.chmod(0o664),
    "others can write": lambda path: path.chmod(0o646),
}
FOLDERS = {
    "group can write": (lambda path: path.chmod(0o775), "{path}: its mode 0775"),
    "symbolic link": (toy.swap_link, "not a folder"),
    "missing": (shutil.rmtree, "{path}"),
}


def refused(out, words):
    with pytest.raises(AotError, match=words):
        aot.load(out)
    assert not cache._loaded


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["library", "manifest"])
def test_damage_is_an_error_that_names_the_file(out, what, how):
    path = library(out) if what == "library" else out / "manifest.json"
    DAMAGE[how](path)
    refused(out, re.escape(str(path)))


@pytest.mark.parametrize(
    ("which", "how"),
    [*itertools.product(("sub",), FOLDERS), ("root", "group can write"), ("root", "missing")],
)
def test_folders_that_others_can_write_links_and_none_are_refused(out, which, how):
    path = out if which == "root" else library(out).parent
    change, words = FOLDERS[how]
    change(path)
    refused(out, words.format(path=re.escape(str(path))))


@pytest.mark.parametrize("what", ["library", "manifest"])
def test_any_flipped_bit_is_found(out, what, monkeypatch):
    monkeypatch.setattr(load, "function", lambda *_: pytest.fail("loaded"))
    path = library(out) if what == "library" else out / "manifest.json"
    content = path.read_bytes()
    draw = random.Random(f"flip {what}")
    space = set(range(len(content))) - {i for i, c in enumerate(content) if c in b" \n"}
    for index in draw.sample(sorted(space if what == "manifest" else range(len(content))), 100):
        flipped = bytearray(content)
        flipped[index] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(AotError, match="damaged"):
            aot.load(out)


def put(value, *names):
    """Another value at a place of the manifest, or none."""

    def change(body):
        *path, last = names
        for name in path:
            body = body[name]
        body[last] = value
        if value is None:
            del body[last]

    return change


DAMAGED = "it is damaged: "
OUTSIDE = "not a name that export writes"
WRONG = {
    "another format": (put(2, "format"), "expected format 1, got 2"),
    "outside": (put("../evil/kernel.so", "kernels", 0, "file"), OUTSIDE),
    "an absolute path": (put("/evil/kernel.so", "kernels", 0, "file"), OUTSIDE),
    "no folder": (put("evil.so", "kernels", 0, "file"), OUTSIDE),
    **{f"no {name}": (put(None, name), DAMAGED) for name in ("format", "arch", "facts", "kernels")},
    **{
        f"a kernel without {name}": (put(None, "kernels", 0, name), DAMAGED)
        for name in ("name", "constexpr", "symbol", "file", "sha256")
    },
    "kernels is no list": (put({}, "kernels"), DAMAGED),
    "facts is no object": (put([], "facts"), DAMAGED),
    "arch is no text": (put(90, "arch"), DAMAGED),
    "a kernel is no object": (put([], "kernels", 0), DAMAGED),
    "a name that is none": (put("../x", "kernels", 0, "name"), DAMAGED),
    "a constexpr that is no pair": (put([["value"]], "kernels", 0, "constexpr"), DAMAGED),
    "a constexpr that is no list": (put([7], "kernels", 0, "constexpr"), DAMAGED),
    "a constexpr of a list": (put([["value", [7]]], "kernels", 0, "constexpr"), DAMAGED),
    "a name twice": (put([["value", 7], ["value", 8]], "kernels", 0, "constexpr"), DAMAGED),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_without_what_export_writes_is_named(out, what):
    """Its digest is right."""
    path, (change, words) = out / "manifest.json", WRONG[what]
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    path.write_text(json.dumps(body | {"digest": ahead.digest(body)}))
    refused(out, words if words == OUTSIDE else f"^{path}: .*{words}")


@pytest.mark.parametrize(
    "text", [b"[]", b"null", b"", b"[" * 100_000, b'{"digest": 1}', b"\xff\xfe"]
)
def test_a_file_that_is_no_manifest_is_named(out, monkeypatch, text):
    """By a load, and where its facts are asked for."""
    path = out / "manifest.json"
    path.write_bytes(text)
    refused(out, f"^{path}: {DAMAGED}")
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(out))
    for reason in ("no facts can be read from it: ", ""):
        with pytest.raises(AotError, match=f"^{path}: {reason}"):
            arch.toolchain(arch.CUTE_SM90)
        path.unlink(missing_ok=True)


# Real kernels: exported here, loaded and run on the simulator in another process.

LOAD = """
    import sys
    from pathlib import Path
    from cute_kernels.compile import aot, cache, toolchain
    from cute_kernels.compile.kernel import Kernel
    from tests.compile.toy import ARCH
    toolchain.SOURCE_AT_IMPORT = "pinned"
    out, ptx, work = map(Path, sys.argv[1:])
    class Absent:
        def find_spec(self, name, *_):
            if name.partition(".")[0] == "cutlass":
                raise ImportError("cutlass is not installed here")
    sys.meta_path.insert(0, Absent())
    from tests.compile.toy_simulated import replace_runtime, simulated
    replace_runtime(work)
    aot.load(out, ARCH)
    def never():
        raise AssertionError("compiled")
    functions = {
        scale: cache.get(Kernel("toy", (("scale", scale), ("threads", 64)), never), ARCH)
        for scale in (3, 5)
    }
    assert cache.counts() == {"built": 0, "disk": 0, "ahead": 2}
    import pytest, torch
    import ptxsim
    from tests.compile.complaints import complaints
    for function in functions.values():
        count, few, device = complaints(function)
        assert "Expects 3 parameters" in count[1], count
        assert "expected device_type=cuda" in device[1], device
    draw = torch.Generator().manual_seed(1)
    for n in (1, 64, 65, 1000):
        # Multiples of 1/64 below 32: the product and the sum are exact, so the bits are decided.
        a, b = (torch.randint(-2048, 2048, (n,), generator=draw) / 64 for _ in range(2))
        for scale, function in functions.items():
            got = torch.full((n,), float("nan"))
            simulated(function, ptx / str(scale))(a, b, got)
            want = a * scale + b
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (n, scale)
    a = ptxsim.wrap(torch.randn(8))
    half, short = ptxsim.wrap(torch.randn(8).half()), ptxsim.wrap(torch.randn(7))
    with pytest.raises(ValueError, match="argument #1 .*expected dtype=float32"):
        functions[3](a, half, a)
    with pytest.raises(ValueError, match="gB.shape"):
        functions[3](a, short, a)
    assert "cutlass" not in sys.modules
"""


@pytest.mark.sim
@requires_sim
@toy.needs_dsl
def test_a_host_without_the_dsl_loads_real_kernels_and_computes_on_the_simulator(
    tmp_path, monkeypatch
):
    """Two configurations of one kernel class, and the PTX of each."""
    from tests.compile import toy_kernel

    out, ptx, work = (tmp_path / name for name in ("out", "ptx", "work"))
    work.mkdir()
    kernels = []
    for scale in (3, 5):
        (ptx / str(scale)).mkdir(parents=True)
        kernels.append(toy_kernel.kernel(scale, 64, f"--keep-ptx --dump-dir={ptx / str(scale)}"))
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", "pinned")
    aot.export(kernels, ARCH, out)
    process = toy.python(LOAD, out, ptx, work)
    assert process.returncode == 0, process.stderr
