"""Building the library: once for all processes, by content, with errors that say why."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptxsim import available, build, skips
from ptxsim.errors import PtxsimError

pytestmark = skips.requires_core

ROOT = Path(__file__).resolve().parents[2]
# Stands for g++: counts its runs of one source, takes a while, and writes small files.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = "--version" ]; then echo fake; exit 0; fi
for a in "$@"; do
  case "$previous" in -o) target="$a";; esac
  previous="$a"
done
case "$*" in *core_atom.cpp*) echo run >> "$LOG"; sleep 0.5;; esac
echo built > "$target"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A build with a compiler that only counts; the file with its count."""
    compiler, log = tmp_path / "cxx", tmp_path / "log"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    for name in ("PTXSIM_LIBRARY", "PTXSIM_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PTXSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOG", str(log))
    return log


def test_only_one_of_several_processes_builds(fake):
    code = "from ptxsim import build; b = build.build(); print(b.library, b.complete())"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {job.communicate()[0] for job in jobs}
    assert [job.returncode for job in jobs] == [0] * 4
    assert len(said) == 1 and said.pop().endswith("libptxsim.so True\n")
    assert fake.read_text() == "run\n"


def test_a_failed_build_leaves_nothing(fake, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text(FAKE_COMPILER.replace("sleep 0.5", "echo no such thing; exit 1"))
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(PtxsimError, match=r"(?s)core_atom\.cpp failed.*no such thing"):
        build.build()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_what_dead_and_old_builds_left_goes(fake, tmp_path):
    first = build.build()
    cache = tmp_path / "cache"
    dead, old, recent = cache / "build-dead", cache / "old", cache / "recent"
    for folder in (dead, old, recent):
        folder.mkdir()
        (folder / "libptxsim.so").write_text("x")
    long_ago = time.time() - 30 * 86400
    os.utime(old, (long_ago, long_ago))
    first.thunks.unlink()  # incomplete: built again
    assert build.build() == first and first.complete()
    assert fake.read_text() == "run\nrun\n"
    left = {p.name for p in cache.iterdir()}
    assert left == {"build.lock", "recent", first.library.parent.name}


def test_flags_and_compiler_version_make_another_build(fake, monkeypatch, tmp_path):
    first = build.build()
    monkeypatch.setenv("PTXSIM_CXXFLAGS", "-O1")
    second = build.build()
    Path(os.environ["CXX"]).write_text(FAKE_COMPILER.replace("echo fake", "echo newer"))
    assert len({first, second, build.build()}) == 3


def test_cache_folder_that_cannot_be_written(fake, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PTXSIM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(PtxsimError, match="PTXSIM_CACHE_DIR"):
        build.build()


def test_prebuilt_library(monkeypatch, tmp_path):
    monkeypatch.setenv("PTXSIM_LIBRARY", str(tmp_path / "libptxsim.so"))
    expected = build.Built(tmp_path / "libptxsim.so", tmp_path / "thunks.o")
    assert build.build() == expected


def test_why_not(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in available.why_no_core()
    monkeypatch.setattr(available, "_installed", lambda name: name == "torch")
    assert available.why_not() == "ptxsim needs nvidia-cutlass-dsl, apache-tvm-ffi"


def test_tests_skip_without_a_compiler():
    """In another process: marks and module imports skip, and say why."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["ptxsim/tests/test_atomics.py", "ptxsim/tests/test_patch.py"]
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    assert "skipped" in last and "passed" not in last and "failed" not in last, done.stdout
    assert "no-such-compiler is not found" in done.stdout
    assert "error" not in last, done.stdout
