"""Ahead-of-time folders: what must match, what damage is found, and that nothing is compiled."""

import errno
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest

from cute_kernels import arch
from cute_kernels.compile import ahead, aot, cache, load, toolchain
from cute_kernels.compile.kernel import Kernel, symbol_of
from cute_kernels.errors import AotError, ArgumentValueError
from ptxsim.skips import requires_sim
from tests.compile import toy
from tests.compile.toy import ARCH

pytestmark = toy.needs_linker


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTE_KERNELS_CACHE", raising=False)
    monkeypatch.delenv("CUTE_KERNELS_AOT_DIR", raising=False)
    # Someone may be editing the package while its tests run.
    monkeypatch.setattr(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT)
    cache.clear()
    yield
    cache.clear()


def never() -> None:
    raise AssertionError("compiled")


def catalogue(*values):
    return [toy.kernel(value) for value in values]


def stored(value):
    """The kernel as a host knows it that cannot compile."""
    return Kernel("toy", (("value", value),), never)


@pytest.fixture
def out(tmp_path):
    """An export of two kernels; nothing of it is in memory."""
    out = tmp_path / "aot"
    aot.export(catalogue(7, 8), ARCH, out)
    cache.clear()
    return out


def library(out, value=7):
    return out / symbol_of(stored(value), ARCH) / "kernel.so"


def rewrite(out, change):
    """Changes the manifest and gives it the right digest again."""
    path = out / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    path.write_text(json.dumps(body | {"digest": ahead.digest(body)}))


# Export and load.


def test_a_loaded_folder_serves_its_kernels_and_builds_none(out, tmp_path):
    aot.load(out)
    assert [cache.get(stored(value), ARCH)() for value in (7, 8)] == [7, 8]
    assert cache.counts() == {"built": 0, "disk": 0, "ahead": 2}
    assert not (tmp_path / "cache").exists()


def test_a_folder_may_be_moved(out, tmp_path):
    moved = tmp_path / "elsewhere" / "kernels"
    shutil.copytree(out, moved)
    shutil.rmtree(out)
    aot.load(moved, ARCH)
    assert cache.get(stored(8), ARCH)() == 8


def test_the_setting_names_a_folder_that_the_first_miss_loads(out, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(out))
    assert cache.get(stored(7), ARCH)() == 7
    assert cache.get(toy.kernel(9), ARCH)() == 9  # not in the catalogue: compiled
    assert cache.counts() == {"built": 1, "disk": 0, "ahead": 2}


def test_records_describe_the_files(tmp_path):
    recorded = []
    out = tmp_path / "aot"
    records = aot.export(catalogue(7, 8), ARCH, out, lambda *step: recorded.append(step))
    assert recorded == [(1, 2, records[0]), (2, 2, records[1])]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kernels"] == records and manifest["arch"] == ARCH
    assert manifest["facts"] == toolchain.portable_facts()
    for kernel, record in zip(catalogue(7, 8), records, strict=True):
        content = (out / record["file"]).read_bytes()
        assert record["sha256"] == hashlib.sha256(content).hexdigest()
        assert record["size"] == len(content)
        assert record["key"] == cache.key(kernel, ARCH)
        assert record["symbol"] == symbol_of(kernel, ARCH)
        assert (record["name"], tuple(map(tuple, record["constexpr"]))) == (
            kernel.name,
            kernel.constexpr,
        )
    assert len({record["file"] for record in records}) == 2


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


def test_two_exports_have_the_same_bytes(out, tmp_path):
    aot.export(catalogue(7, 8), ARCH, tmp_path / "again")
    for path in out.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(out)).read_bytes()


def test_an_export_into_a_folder_with_something_in_it_is_refused(out):
    with pytest.raises(AotError, match=f"{out}: expected a new or empty folder"):
        aot.export(catalogue(9), ARCH, out)


def test_an_export_names_a_kernel_given_twice(tmp_path):
    with pytest.raises(ArgumentValueError, match="each configuration once"):
        aot.export(catalogue(7, 8, 7), ARCH, tmp_path / "aot")
    assert not (tmp_path / "aot").exists()


def test_an_export_needs_a_linker(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "linker", lambda: None)
    with pytest.raises(AotError, match="needs a linker"):
        aot.export(catalogue(7), ARCH, tmp_path / "aot")


def test_an_export_of_edited_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "source_digest", lambda: "edited")
    with pytest.raises(AotError, match="source changed"):
        aot.export(catalogue(7), ARCH, tmp_path / "aot")


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


def killed_in_an_export(out):
    """A child exports a kernel and is killed while it compiles the next one."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            aot.export([*catalogue(7), Kernel("bad", (), die)], ARCH, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_an_export_that_was_killed_cannot_be_loaded_and_can_be_tried_again(tmp_path):
    out = tmp_path / "aot"
    killed_in_an_export(out)
    assert library(out).exists()
    with pytest.raises(AotError, match=r"manifest\.json"):
        aot.load(out)
    aot.export(catalogue(8), ARCH, out)
    assert {path.name for path in out.iterdir()} == {"manifest.json", library(out, 8).parent.name}
    aot.load(out)


def test_what_others_put_beside_a_killed_export_is_not_removed(tmp_path):
    out = tmp_path / "aot"
    killed_in_an_export(out)
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(AotError, match="expected a new or empty folder"):
        aot.export(catalogue(8), ARCH, out)
    assert (out / "mine" / "notes.txt").read_text() == "mine"


def test_a_second_export_into_a_folder_that_is_being_written_is_refused(tmp_path):
    out = tmp_path / "aot"

    def meanwhile():
        with pytest.raises(AotError, match=f"{out}: another export is writing it"):
            aot.export(catalogue(8), ARCH, out)

    aot.export([toy.kernel(7, before=meanwhile)], ARCH, out)
    aot.load(out)
    assert cache.get(stored(7), ARCH)() == 7


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_at_the_object(patch):
    def export_to_c(self, path, **_):
        Path(path).write_bytes(b"half")
        raise FULL

    patch.setattr(toy.Compiled, "export_to_c", export_to_c)


def full_at_the_library(patch):
    patch.setattr(toy, "_SOURCE", "int __tvm_ffi_{symbol}(void) {{ extern int f(); return f(); }}")


def full_at_the_manifest(patch):
    def fsync(_):
        raise FULL

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("full", [full_at_the_object, full_at_the_library, full_at_the_manifest])
def test_a_disk_that_is_full_is_an_error_that_names_the_folder(tmp_path, monkeypatch, full):
    out = tmp_path / "new" / "aot"
    full(monkeypatch)
    with pytest.raises(AotError, match=f"^{out}: (No space left on device|.*could not link)"):
        aot.export(catalogue(7), ARCH, out)
    assert not list(tmp_path.iterdir())


# Mismatch.


def test_another_architecture_is_named(out):
    with pytest.raises(AotError, match="arch: compiled for sm_90a, asked for sm_100a"):
        aot.load(out, "sm_100a")
    aot.load(out)
    with pytest.raises(AotError, match=r"arch: .*compiled for sm_90a, not for sm_100a"):
        cache.get(stored(7), "sm_100a")
    assert cache.get(toy.kernel(9), "sm_100a")() == 9  # never in the catalogue


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("source", lambda m: m.setattr(toolchain, "SOURCE_AT_IMPORT", "other")),
        ("ffi", lambda m: m.setattr(toolchain, "ffi_version", lambda: "0.0.1")),
        ("ffi", lambda m: m.setattr(toolchain, "ffi_version", lambda: toolchain.NONE)),
        ("variant", lambda m: m.setattr(toolchain, "variant", lambda: "cu99")),
        ("machine", lambda m: m.setattr(platform, "machine", lambda: "riscv64")),
    ],
)
def test_each_mismatch_is_named(out, monkeypatch, what, change):
    theirs = toolchain.portable_facts()[what]
    change(monkeypatch)
    ours = toolchain.portable_facts()[what]
    with pytest.raises(AotError) as caught:
        aot.load(out)
    assert str(caught.value) == f"{out}: {what}: compiled with {theirs}, here is {ours}"
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


def test_all_mismatches_are_listed(out, monkeypatch):
    monkeypatch.setattr(toolchain, "ffi_version", lambda: "0.0.1")
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", "other")
    with pytest.raises(AotError, match=r"asked for sm_80.*(ffi: .*source: |source: .*ffi: )"):
        aot.load(out, "sm_80")


def test_a_driver_or_a_gpu_build_of_torch_makes_no_difference(out, monkeypatch):
    """Compiled on a CPU host, loaded on a GPU host."""
    monkeypatch.setattr(toolchain, "driver_version", lambda: "13000")
    monkeypatch.setattr(toolchain, "cuda_runtime_version", lambda: "13.0")
    aot.load(out)
    assert cache.get(stored(7), ARCH)() == 7


# Damage.


def swap_link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "symbolic link": swap_link,
    "group can write": lambda path: path.chmod(0o664),
    "others can write": lambda path: path.chmod(0o646),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["library", "manifest"])
def test_damage_is_an_error_that_names_the_file(out, what, how):
    path = library(out) if what == "library" else out / "manifest.json"
    DAMAGE[how](path)
    with pytest.raises(AotError, match=re.escape(str(path))):
        aot.load(out)
    assert not cache._loaded


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


@pytest.mark.parametrize("which", ["folder", "subfolder"])
def test_a_folder_that_others_can_write_is_refused(out, which):
    folder = out if which == "folder" else library(out).parent
    folder.chmod(0o775)
    with pytest.raises(AotError, match=f"{folder}: its mode 0775"):
        aot.load(out)


def test_a_link_in_place_of_a_kernel_folder_is_refused(out):
    swap_link(library(out).parent)
    with pytest.raises(AotError, match="not a folder"):
        aot.load(out)


@pytest.mark.parametrize("file", ["../evil/kernel.so", "/evil/kernel.so", "evil.so"])
def test_a_manifest_cannot_point_outside(out, file):
    rewrite(out, lambda body: body["kernels"][0].update(file=file))
    with pytest.raises(AotError, match="not a name that export writes"):
        aot.load(out)


def test_another_format_is_refused(out):
    rewrite(out, lambda body: body.update(format=2))
    with pytest.raises(AotError, match="expected format 1, got 2"):
        aot.load(out)


NOT_A_MANIFEST = [
    "[]",
    "{}",
    "null",
    "1",
    '"text"',
    "",
    "[" * 100_000,
    '{"digest": 1}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("text", NOT_A_MANIFEST, ids=lambda text: repr(text[:12]))
def test_a_file_that_is_no_manifest_is_named(out, monkeypatch, text):
    path = out / "manifest.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AotError, match=f"^{path}: it is damaged: "):
        aot.load(out)
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(out))
    with pytest.raises(AotError, match=f"^{path}: no facts can be read from it: "):
        arch.toolchain(arch.CUTE_SM90)


def test_a_contract_id_names_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_AOT_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(AotError, match=f"^{tmp_path / 'nowhere' / 'manifest.json'}: "):
        arch.toolchain(arch.CUTE_SM90)


def drop(*names):
    def change(body):
        *path, last = names
        for name in path:
            body = body[name]
        del body[last]

    return change


def put(value, *names):
    def change(body):
        *path, last = names
        for name in path:
            body = body[name]
        body[last] = value

    return change


WRONG = {
    **{f"no {name}": drop(name) for name in ("format", "arch", "facts", "kernels")},
    **{
        f"a kernel without {name}": drop("kernels", 0, name)
        for name in ("name", "constexpr", "symbol", "file", "sha256")
    },
    "kernels is no list": put({}, "kernels"),
    "facts is no object": put([], "facts"),
    "arch is no text": put(90, "arch"),
    "a kernel is no object": put([], "kernels", 0),
    "a name that is none": put("../x", "kernels", 0, "name"),
    "a constexpr that is no pair": put([["value"]], "kernels", 0, "constexpr"),
    "a constexpr that is no list": put([7], "kernels", 0, "constexpr"),
    "a constexpr of a list": put([["value", [7]]], "kernels", 0, "constexpr"),
    "a constexpr given twice": put([["value", 7], ["value", 8]], "kernels", 0, "constexpr"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_without_what_export_writes_is_named(out, what):
    rewrite(out, WRONG[what])
    with pytest.raises(AotError, match=f"^{out / 'manifest.json'}: it is damaged: "):
        aot.load(out)
    assert not cache._loaded


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(AotError, match=str(tmp_path / "nowhere")):
        aot.load(tmp_path / "nowhere")


# Real kernels: exported in one process, loaded and run on the simulator in another.

PINNED = """
    import sys
    from pathlib import Path
    from cute_kernels.compile import aot, cache, toolchain
    from cute_kernels.compile.kernel import Kernel
    from tests.compile.toy import ARCH
    toolchain.SOURCE_AT_IMPORT = "pinned"
    toolchain.source_digest = lambda: "pinned"
    out, ptx, work = map(Path, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two configurations of one kernel class, and the PTX of each."""
    folder = tmp_path_factory.mktemp("real")
    places = [folder / name for name in ("out", "ptx", "work")]
    for place in places[1:]:
        place.mkdir()
    script = """
    from tests.compile import toy_kernel
    kernels = []
    for scale in (3, 5):
        (ptx / str(scale)).mkdir()
        kernels.append(toy_kernel.kernel(scale, 64, f"--keep-ptx --dump-dir={ptx / str(scale)}"))
    aot.export(kernels, ARCH, out)
    """
    process = toy.python(PINNED + script, *places)
    assert process.returncode == 0, process.stderr
    return places


LOAD = """
    aot.load(out, ARCH)
    def never():
        raise AssertionError("compiled")
    functions = {
        scale: cache.get(Kernel("toy", (("scale", scale), ("threads", 64)), never), ARCH)
        for scale in (3, 5)
    }
    assert cache.counts() == {"built": 0, "disk": 0, "ahead": 2}
"""


@toy.needs_dsl
def test_a_host_without_the_dsl_python_package_loads_real_kernels(real):
    script = """
    class Absent:
        def find_spec(self, name, *_):
            if name.partition(".")[0] == "cutlass":
                raise ImportError("cutlass is not installed here")
    sys.meta_path.insert(0, Absent())
    """
    check = """
    import torch
    from tests.compile.complaints import complaints
    for function in functions.values():
        count, few, device = complaints(function)
        assert "Expects 3 parameters" in count[1], count
        assert "expected device_type=cuda" in device[1], device
    assert "cutlass" not in sys.modules
    """
    process = toy.python(PINNED + script + LOAD + check, *real)
    assert process.returncode == 0, process.stderr


@pytest.mark.sim
@requires_sim
def test_loaded_libraries_compute_on_the_simulator(real):
    replaced = """
    from tests.compile.toy_simulated import replace_runtime, simulated
    replace_runtime(work)
    """
    check = """
    import pytest, torch
    import ptxsim
    draw = torch.Generator().manual_seed(1)
    for n in (1, 63, 64, 65, 1000):
        # Multiples of 1/64 below 32: the product and the sum are exact, so the bits are decided.
        a, b = (torch.randint(-2048, 2048, (n,), generator=draw) / 64 for _ in range(2))
        for scale, function in functions.items():
            got = torch.full((n,), float("nan"))
            simulated(function, ptx / str(scale))(a, b, got)
            want = a * scale + b
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (n, scale)
    a = ptxsim.wrap(torch.randn(8))
    half = ptxsim.wrap(torch.randn(8).half())
    short = ptxsim.wrap(torch.randn(7))
    with pytest.raises(ValueError, match="argument #1 .*expected dtype=float32"):
        functions[3](a, half, a)
    with pytest.raises(ValueError, match="gB.shape"):
        functions[3](a, short, a)
    assert "cutlass" not in sys.modules
    """
    process = toy.python(PINNED + replaced + LOAD + check, *real)
    assert process.returncode == 0, process.stderr
