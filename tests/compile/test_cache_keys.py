"""Ingredients of a cache key: each of them changes it, and nothing else."""

import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("what", CHANGES)
def test_each_fact_changes_the_key(host, what):
    before = cache.key(kernel(a=1), ARCH)
    host(*CHANGES[what])
    assert cache.key(kernel(a=1), ARCH) != before


def test_the_changes_above_give_different_keys(host):
    keys = set()
    for change in CHANGES.values():
        host(*change)
        keys.add(cache.key(kernel(a=1), ARCH))
    assert len(keys) == len(CHANGES)


def test_the_source_and_the_machine_change_the_key(host, monkeypatch):
    keys = {cache.key(kernel(a=1), ARCH)}
    monkeypatch.setattr(toolchain, "SOURCE_AT_IMPORT", "abce")
    keys.add(cache.key(kernel(a=1), ARCH))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    keys.add(cache.key(kernel(a=1), ARCH))
    assert len(keys) == 3


@pytest.mark.parametrize(
    "name",
    ["CUTE_DSL_COMPILER_OPT", "CUTE_DSL_LINEINFO", "CUTE_DSL_ARCH", "CUTE_DSL_NOT_YET_KNOWN"],
)
def test_dsl_variables_that_may_change_code_change_the_key(host, monkeypatch, name):
    keys = {cache.key(kernel(a=1), ARCH)}
    for value in ("0", "1"):
        monkeypatch.setenv(name, value)
        keys.add(cache.key(kernel(a=1), ARCH))
    assert len(keys) == 3


NOTHING = ["PATH", "HOME", "CC", "CUTE_KERNELS_CACHE_DIR", "CUTE_KERNELS_MAX_CTAS", "PYTHONPATH"]
NOTHING += [f"CUTE_DSL_{x}" for x in ("LOG_LEVEL", "KEEP", "KEEP_PTX", "DUMP_DIR", "CACHE_DIR")]


@pytest.mark.parametrize("name", NOTHING)
def test_other_variables_do_not(host, monkeypatch, name):
    before = cache.key(kernel(a=1), ARCH)
    monkeypatch.setenv(name, "7")
    assert cache.key(kernel(a=1), ARCH) == before


def test_the_builder_the_order_and_the_folder_do_not(host, monkeypatch, tmp_path):
    before = cache.key(kernel(a=1, b=2), ARCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
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


@pytest.mark.parametrize("field", ["identity", "key", "symbol"])
def test_lookalike_constexprs_share_nothing(field):
    def of(constexpr):
        out = Kernel("toy", tuple(constexpr.items()), list)
        ways = {
            "identity": lambda kernel, _: kernel.identity,
            "key": cache.key,
            "symbol": symbol_of,
        }
        return ways[field](out, ARCH)

    assert len({of(constexpr) for constexpr in LOOKALIKES}) == len(LOOKALIKES)


def test_lookalike_kernels_are_not_equal():
    kernels = [Kernel("toy", tuple(c.items()), list) for c in LOOKALIKES]
    assert not [pair for pair in itertools.combinations(kernels, 2) if pair[0] == pair[1]]
    assert len(set(kernels)) == len(LOOKALIKES)


values = st.one_of(st.integers(), st.booleans(), st.text(max_size=4))
constexprs = st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=3)


@settings(max_examples=200, deadline=None)
@given(constexprs, constexprs)
def test_keys_are_equal_exactly_when_constexprs_are(left, right):
    """Typed: 1 and True differ."""
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    kernels = [Kernel("toy", tuple(c.items()), list) for c in (left, right)]
    assert (kernels[0].identity == kernels[1].identity) == same
    assert (symbol_of(kernels[0], ARCH) == symbol_of(kernels[1], ARCH)) == same


def test_name_and_arch_change_the_key(host):
    keys = {cache.key(kernel(name), arch) for name in ("toy", "toy2") for arch in (ARCH, "sm_90")}
    assert len(keys) == 4


# The toolchain's facts.


@pytest.mark.parametrize(
    ("driver", "chosen"),
    [("none", "cu13"), ("13010", "cu13"), ("14000", "cu13"), ("12090", "cu12"), ("11080", "none")],
)
def test_the_variant_is_the_newest_that_the_driver_supports(host, driver, chosen):
    host("driver_version", driver)
    assert toolchain.variant() == chosen


def distribution(name, version):
    out = types.SimpleNamespace()
    out.name, out.version = name, version
    return out


@pytest.mark.parametrize(
    "spelt",
    [
        "nvidia-cutlass-dsl-libs-cu13",
        "nvidia_cutlass_dsl_libs_cu13",
        "NVIDIA-CUTLASS-DSL-Libs-CU13",
        "nvidia.cutlass__dsl-_.libs.cu13",
    ],
)
def test_distributions_are_found_however_their_names_are_spelt(monkeypatch, spelt):
    """A wheel's metadata may spell the name in every way that PEP 503 makes the same."""
    there = [
        distribution("nvidia-cuda-nvdisasm", "1"),
        distribution(None, "2"),  # what an interrupted uninstall leaves
        distribution(spelt, "4.8.1"),
        distribution("Nvidia_Cutlass_DSL", "4.8.2"),
        distribution("nvidia-cutlass-dsl", "4.7"),  # further down the path: not what is imported
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: there)
    out = toolchain.dsl_distributions.__wrapped__()
    assert out == {"nvidia-cutlass-dsl": "4.8.2", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}
    monkeypatch.setattr(toolchain, "dsl_distributions", lambda: out)
    monkeypatch.setattr(toolchain, "driver_version", lambda: "13000")
    assert toolchain.variant() == "cu13"


@toy.needs_dsl
def test_the_variant_and_the_library_are_those_of_the_dsl():
    """The DSL chooses when it is imported; we say the same without importing it."""
    script = """
        import sys
        from cute_kernels.compile import toolchain
        ours = toolchain.variant(), str(toolchain.runtime_library())
        assert "cutlass" not in sys.modules
        from cutlass.base_dsl.version_info import CUDA_VERSION
        from cutlass.runtime import find_runtime_libraries
        theirs = f"cu{CUDA_VERSION.major}", find_runtime_libraries(enable_tvm_ffi=False)[0]
        assert ours == theirs, (ours, theirs)
    """
    process = toy.python(script)
    assert process.returncode == 0, process.stderr


@toy.needs_dsl
def test_every_installed_dsl_distribution_is_found():
    out = toolchain.dsl_distributions()
    assert "nvidia-cutlass-dsl" in out and f"nvidia-cutlass-dsl-libs-{toolchain.variant()}" in out
    assert all(out.values())


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "package"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    (folder / "sub" / "b.py").write_text("y = 2\n")
    (folder / "notes.txt").write_text("not source")
    return folder


def digest(folder):
    return toolchain.digest_of({"package": folder})


EDITS = {
    "one character": lambda tree: (tree / "a.py").write_text("x = 2\n"),
    "a new file": lambda tree: (tree / "c.py").write_text(""),
    "a file gone": lambda tree: (tree / "sub" / "b.py").unlink(),
    "a file renamed": lambda tree: (tree / "a.py").rename(tree / "z.py"),
    "a file moved": lambda tree: (tree / "a.py").rename(tree / "sub" / "a.py"),
    "text moved to the next file": lambda tree: [
        (tree / "a.py").write_text("x = 1"),
        (tree / "sub" / "b.py").write_text("\ny = 2\n"),
    ],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_source_digest(tree, edit):
    before = digest(tree)
    EDITS[edit](tree)
    assert digest(tree) != before


def test_one_file_cannot_pass_for_two(tmp_path):
    for name, files in {
        "two": {"a.py": b"1", "b.py": b"2"},
        "one": {"a.py": b"1p/b.py\x002"},
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    digests = {toolchain.digest_of({"p": tmp_path / name}) for name in ("one", "two")}
    assert len(digests) == 2


def test_place_time_and_other_files_do_not(tree, tmp_path):
    before = digest(tree)
    (tree / "notes.txt").write_text("changed")
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    os.utime(tree / "a.py", (0, 0))
    assert digest(tree) == before
    assert digest(Path(shutil.copytree(tree, tmp_path / "copy"))) == before


def test_schedulers_count_the_same_beside_the_package_and_inside_it(tree, tmp_path):
    """The source tree keeps schedulers/ at the top; a wheel has it inside the package."""
    (tmp_path / "schedulers").mkdir()
    (tmp_path / "schedulers" / "s.py").write_text("z = 3\n")
    beside = {"package": tree, "package/schedulers": tmp_path / "schedulers"}
    apart = toolchain.digest_of(beside)
    shutil.copytree(tmp_path / "schedulers", tree / "schedulers")
    inside = {"package": tree, "package/schedulers": tree / "schedulers"}
    assert toolchain.digest_of(inside) == apart


def test_the_schedulers_are_part_of_the_source(monkeypatch):
    recorded = {}
    monkeypatch.setattr(toolchain, "digest_of", recorded.update)
    toolchain.source_digest()
    assert (recorded["cute_kernels"] / "compile" / "toolchain.py").is_file()
    assert (recorded["cute_kernels/schedulers"] / "__init__.py").is_file()
