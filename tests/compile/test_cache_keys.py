"""Ingredients of a cache key: each of them changes it, and nothing else."""

import importlib.metadata
import os
import platform
import shutil
import types
from pathlib import Path

import pytest

from cute_kernels.compile import cache, toolchain
from cute_kernels.compile.kernel import Kernel, symbol_of
from tests.compile import toy
from tests.compile.toy import ARCH

DISTRIBUTIONS = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
}


def kernel(name="toy", build=toy.Compiled, **constexpr):
    return Kernel(name, tuple(constexpr.items()), build)


@pytest.fixture
def host(monkeypatch):
    """A host whose facts are all known; the fixture changes one of them."""

    def change(what, value):
        monkeypatch.setattr(toolchain, what, lambda *_: value)

    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        monkeypatch.delenv(name)
    change("dsl_distributions", DISTRIBUTIONS)
    change("ffi_version", "0.1.15")
    change("driver_version", "none")
    change("cuda_runtime_version", "none")
    change("runtime_library", Path("libcute_dsl_runtime.so"))
    change("_runtime_digest", "1234")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", "abcd")
    return change


def test_the_facts_are_these_and_no_others(host):
    assert toolchain.facts() == {
        "source": "abcd",
        "ffi": "0.1.15",
        "variant": "cu13",
        "machine": "x86_64",
        "driver": "none",
        "cuda runtime": "none",
        "dsl runtime library": "1234",
        **{f"dsl {name}": version for name, version in DISTRIBUTIONS.items()},
    }


CHANGES = {
    **{
        f"version of {name}": ("dsl_distributions", DISTRIBUTIONS | {name: "4.8.2"})
        for name in DISTRIBUTIONS
    },
    "another DSL distribution": (
        "dsl_distributions",
        DISTRIBUTIONS | {"nvidia-cutlass-dsl-libs-core": "4.8.1"},
    ),
    "ffi": ("ffi_version", "0.1.16"),
    "driver": ("driver_version", "13000"),
    "driver for which the DSL takes cu12": ("driver_version", "12090"),
    "cuda runtime": ("cuda_runtime_version", "13.0"),
    "dsl runtime library": ("_runtime_digest", "5678"),
}


def test_each_fact_changes_the_key(host, monkeypatch):
    def key(name="toy", arch=ARCH):
        return cache.key(kernel(name, a=1), arch)

    keys = [key(), key("toy2"), key(arch="sm_90"), key("toy2", "sm_90")]
    for change in CHANGES.values():
        host(*change)
        keys.append(key())
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", "abce")
    keys.append(key())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    keys.append(key())
    for name in ("COMPILER_OPT", "LINEINFO", "ARCH", "NOT_YET_KNOWN"):
        for value in ("0", "1"):
            monkeypatch.setenv(f"CUTE_DSL_{name}", value)
            keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_builder_the_order_the_folder_and_other_variables_do_not(host, monkeypatch, tmp_path):
    before = cache.key(kernel(a=1, b=2), ARCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    for name in ("PATH", "CC", "CUTE_KERNELS_CACHE_DIR", "CUTE_KERNELS_MAX_CTAS", "PYTHONPATH"):
        monkeypatch.setenv(name, "7")
    for name in ("LOG_LEVEL", "KEEP", "KEEP_PTX", "DUMP_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"CUTE_DSL_{name}", "7")
    assert cache.key(kernel(b=2, a=1, build=list), ARCH) == before
    assert kernel(b=2, a=1, build=list) == kernel(a=1, b=2)


def test_fresh_interpreters_agree(tmp_path):
    script = """
        from cute_kernels.compile import cache, toolchain
        from cute_kernels.compile.kernel import Kernel, symbol_of
        toolchain.SOURCE_AT_IMPORT = "pinned: someone may be editing the package"
        toolchain.cuda_runtime_version = lambda: "none"  # spares the import of torch
        kernel = Kernel("toy", (("b", True), ("a", "x")), list)
        print(cache.key(kernel, "sm_90a"), symbol_of(kernel, "sm_90a"))
    """
    runs = [
        toy.python(script, PYTHONHASHSEED="1", HOME=str(tmp_path)),
        toy.python(script, PYTHONHASHSEED="2", PYTHONOPTIMIZE="1", LC_ALL="C"),
    ]
    assert [run.stderr for run in runs] == ["", ""]
    assert runs[0].stdout == runs[1].stdout != ""


LOOKALIKES = [
    {},
    {"a": 1},
    {"a": "1"},
    {"a": True},
    {"a": "true"},
    {"a": "True"},
    {"a": 0},
    {"a": False},
    {"a": ""},
    {"a": -1},
    {"ab": "c"},
    {"a": "bc"},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {"a": 12},
    {"a": '1], ["b", 2'},
    {"a": "1\n"},
    {"a": "\x00"},
    {"a": "\\u0000"},
]


def test_lookalike_constexprs_share_nothing():
    kernels = [Kernel("toy", tuple(c.items()), list) for c in LOOKALIKES]
    for of in (lambda k: k, lambda k: k.identity, lambda k: cache.key(k, ARCH)):
        assert len(set(map(of, kernels))) == len(LOOKALIKES)
    assert len({symbol_of(k, ARCH) for k in kernels}) == len(LOOKALIKES)


# The toolchain's facts.


@pytest.mark.parametrize(
    ("driver", "chosen"),
    [("none", "cu13"), ("13010", "cu13"), ("14000", "cu13"), ("12090", "cu12"), ("11080", "none")],
)
def test_the_variant_is_the_newest_that_the_driver_supports(host, driver, chosen):
    host("driver_version", driver)
    assert toolchain.variant() == chosen


@toy.needs_dsl
def test_the_variant_and_the_library_are_those_of_the_dsl():
    """The DSL chooses when it is imported; we say the same without importing it.

    Without: a hit in test_cache_real.py leaves it unimported.
    """
    from cutlass.base_dsl.version_info import CUDA_VERSION
    from cutlass.runtime import find_runtime_libraries

    (library, *_) = find_runtime_libraries(enable_tvm_ffi=False)
    assert toolchain.variant() == f"cu{CUDA_VERSION.major}"
    assert toolchain.runtime_library().samefile(library)


def test_distributions_are_found_however_their_names_are_spelt(monkeypatch):
    """A wheel's metadata may spell the name in every way that PEP 503 makes the same."""
    monkeypatch.setattr(toolchain, "driver_version", lambda: "13000")
    for spelt in ("nvidia_cutlass_dsl_libs_cu13", "NVIDIA-CUTLASS.DSL-Libs-_.CU13"):
        there = [
            ("nvidia-cuda-nvdisasm", "1"),
            (None, "2"),  # what an interrupted uninstall leaves
            (spelt, "4.8.1"),
            ("Nvidia_Cutlass_DSL", "4.8.2"),
            ("nvidia-cutlass-dsl", "4.7"),  # further down the path: not what is imported
        ]
        there = [types.SimpleNamespace(name=name, version=version) for name, version in there]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda there=there: there)
        out = toolchain.dsl_distributions.__wrapped__()
        assert out == {"nvidia-cutlass-dsl": "4.8.2", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "dsl_distributions", lambda out=out: out)
            assert toolchain.variant() == "cu13"


# The source's digest.


def digest(folder: Path, files: dict[str, str]) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return toolchain.digest_of({"package": folder})


FILES = {"a.py": "x = 1\n", "sub/b.py": "y = 2\n", "notes.txt": "not source"}
EDITS = {
    "one character": FILES | {"a.py": "x = 2\n"},
    "a new file": FILES | {"c.py": ""},
    "a file gone": {"a.py": "x = 1\n"},
    "a file renamed": {"z.py": "x = 1\n", "sub/b.py": "y = 2\n"},
    "a file moved": {"sub/a.py": "x = 1\n", "sub/b.py": "y = 2\n"},
    "text moved to the next file": {"a.py": "x = 1", "sub/b.py": "\ny = 2\n"},
    "one file for two": {"a.py": "x = 1\npackage/sub/b.py\x00y = 2\n"},
}


def test_each_edit_changes_the_source_digest_and_nothing_else_does(tmp_path):
    digests = {digest(tmp_path / "package", files) for files in (FILES, *EDITS.values())}
    assert len(digests) == 1 + len(EDITS)
    other = {"notes.txt": "changed", "__pycache__/a.cpython-311.pyc": "x"}
    same = digest(tmp_path / "elsewhere", FILES | other)
    os.utime(tmp_path / "elsewhere" / "a.py", (0, 0))
    assert same in digests and toolchain.digest_of({"package": tmp_path / "elsewhere"}) == same


def test_schedulers_are_part_of_it_beside_the_package_and_inside_it(tmp_path, monkeypatch):
    """The source tree keeps schedulers/ at the top; a wheel has it inside the package."""
    folder, schedulers = tmp_path / "package", tmp_path / "schedulers"
    digest(folder, FILES)
    digest(schedulers, {"s.py": "z = 3\n"})
    beside = toolchain.digest_of({"package": folder, "package/schedulers": schedulers})
    shutil.copytree(schedulers, folder / "schedulers")
    inside = {"package": folder, "package/schedulers": folder / "schedulers"}
    assert toolchain.digest_of(inside) == beside
    recorded = {}
    monkeypatch.setattr(toolchain, "digest_of", recorded.update)
    toolchain.source_digest()
    assert (recorded["cute_kernels"] / "compile" / "toolchain.py").is_file()
    assert (recorded["cute_kernels/schedulers"] / "__init__.py").is_file()
