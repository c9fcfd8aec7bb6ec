"""The commands as a user mistypes them: one line, and an exit code that says whose fault it is."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import __main__ as cli
from cute_kernels import about
from cute_kernels.compile import aot, cache, toolchain
from tests.commands import MODULES, run
from tests.compile import toy
from verify import command as certify
from verify.report import Certificate, Finding, RegisterPool, tables

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "info": [],
    "audit": ["tests.model.audit.planted:clean", "--json", "out"],
    "demo": ["--steps", "1", "-o", "out"],
    "aot": ["-o", "out"],
    "certify": ["-o", "out"],
    "contract": ["-o", "out"],
    "schedule": ["--seqlen", "256"],
}


def unfolded(result) -> str:
    """Standard output with its lines joined: folds are single spaces."""
    return " ".join(result.stdout.split())


def refused(result, *words: str) -> None:
    """One line on standard error, nothing else, exit code 2."""
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert not result.stdout
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    for word in words:
        assert word in result.stderr


def test_every_command_is_here():
    assert {*cli.COMMANDS, *MODULES} == set(COMMANDS)


BAD = {
    "aot --arch sm_80": "aot: --arch: expected one of 'sm_90a', got 'sm_80'",
    "aot --arch sm_100a": "aot: --arch: expected one of 'sm_90a', got 'sm_100a'",
    "aot --only nosuchkernel": "aot: --only: expected one of 'gemm_sm90', ",
    "aot --only gemm_sm9O": "aot: --only: expected one of 'gemm_sm90', ",
    "certify --only sparse_atn_fwd": "certify: --only: expected one of 'sparse_attn_fwd_sm90', ",
    "certify --jobs -1": "certify: --jobs: expected a number of processes, or 0, got -1",
    "demo --steps 0": "demo: --steps: expected at least 1, or None, got 0",
    "demo --steps -5": "demo: --steps: expected at least 1, or None, got -5",
    "demo --seconds 0": "demo: --seconds: expected more than 0, and finite, got 0.0",
    "demo --seconds nan": "demo: --seconds: expected more than 0, and finite, got nan",
    "demo --seconds inf": "demo: --seconds: expected more than 0, and finite, got inf",
    "demo --seed -1": "demo: --seed: expected 0 to 2147483647, got -1",
    "demo --seed 99999999999999999999999": "demo: --seed: expected 0 to 2147483647, got 9999",
    "demo --device cuda:63": "demo: --device: expected one of this machine's ",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_one_line_and_write_nothing(line, tmp_path):
    name, *options = line.split()
    refused(run(name, *options, "-o", "out"), BAD[line])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUTE_KERNELS_BACKEND", "cublas", "expected one of '', 'cute_sm90', 'triton', 'cpu', got"),
        ("CUTE_KERNELS_MAX_CTAS", "abc", "expected a whole number"),
        ("CUTE_KERNELS_MAX_CTAS", "²", "expected a whole number"),
        ("CUTE_KERNELS_CACHE_DIR", "~nosuch/x", "expected a folder whose ~ is the home of a user"),
        ("CUTE_KERNELS_MAX_CTA", "1", "expected one of 'CUTE_KERNELS_MAX_CTAS'"),
    ],
)
def test_no_command_runs_with_a_bad_setting(monkeypatch, tmp_path, command, name, value, words):
    monkeypatch.setenv(name, value)
    refused(run(command, *COMMANDS[command]), f"{command}: ", name, words)
    assert not list(tmp_path.iterdir())


def test_help_does_not_need_good_settings(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cublas")
    assert run("aot", "--help").exit_code == 0


def test_a_backend_that_cannot_run_the_demo_is_one_line(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    refused(run("demo"), "demo: linear: no backend for", "; cute_sm90: CUTE_KERNELS_BACKEND=triton")


@pytest.mark.parametrize(
    ("command", "absent", "words"),
    [
        ("aot", "cutlass", "aot: needs nvidia-cutlass-dsl: pip install 'cute-kernels[cu13]'"),
        ("aot", "cutlass tvm_ffi", "needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install"),
        ("certify", "cutlass", "certify: needs nvidia-cutlass-dsl: pip install 'cute-kernels[cu"),
        ("demo", "transformers", "demo: needs transformers: pip install 'cute-kernels[demo]'"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, tmp_path, command, absent, words):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent.split() else find(name)
    )
    refused(run(command, *COMMANDS[command]), words)
    assert not list(tmp_path.iterdir())


@toy.needs_dsl
def test_a_disassembler_is_looked_for_before_anything_is_compiled(monkeypatch, tmp_path):
    from verify import sass

    sass.nvdisasm.cache_clear()
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(sass, "_in_wheel", lambda name: None)
    refused(run("certify"), "certify: nvdisasm: not found", "pip install nvidia-cuda-nvdisasm")
    assert not list(tmp_path.iterdir())


def test_with_torch_alone_in_a_fresh_interpreter(tmp_path):
    """Not a patched look-up: none of what the extras bring can be imported."""
    script = """
import importlib.util, runpy, sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {"cutlass", "tvm_ffi", "triton", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
find = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return find(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
sys.argv = ["cute_kernels", "aot", "-o", sys.argv[1]]
runpy.run_module("cute_kernels", run_name="__main__")
"""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2 and not process.stdout
    want = "aot: needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install 'cute-kernels[cu13]'\n"
    assert process.stderr == want
    assert not list(tmp_path.iterdir())


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(about, "info", lambda: 1 / 0)
    assert isinstance(run("info").exception, ZeroDivisionError)


def test_the_version():
    cli_result = run("--version")
    assert (
        cli_result.exit_code == 0
        and cli_result.stdout == f"cute-kernels {cute_kernels.__version__}\n"
    )
    stated = f'version = "{cute_kernels.__version__}"'
    assert stated in (ROOT / "pyproject.toml").read_text()


def test_the_version_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from cute_kernels.__main__ import main; main()"
    command = [sys.executable, "-c", code, "--version"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout == f"cute-kernels {cute_kernels.__version__}\n", process.stderr


def test_info_holds_what_ran():
    assert "ran" in json.loads(run("info", "--json").stdout)


# aot, with a catalogue of kernels that the C compiler makes.


@pytest.fixture
def toys(monkeypatch):
    """The catalogue is two kernels; the values in the list that is returned fail to compile."""
    failing: list[int] = []
    monkeypatch.setattr(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT)
    monkeypatch.setattr("cute_kernels.cli.aot.require", lambda *_: None)

    def entry(value):
        def before():
            if value in failing:
                raise ModuleNotFoundError("No module named 'cutlass'")

        return toy.kernel(value, before=before), "A", None

    monkeypatch.setattr(about, "catalogue", lambda: [entry(7), entry(8)])
    yield failing
    cache.clear()


@toy.needs_linker
def test_an_aot_that_failed_can_be_tried_again(toys, tmp_path):
    toys.append(8)
    result = run("aot", "-o", "new/out")
    assert result.exit_code == 2 and result.stderr == "aot: No module named 'cutlass'\n"
    assert not list(tmp_path.iterdir())
    toys.clear()
    result = run("aot", "-o", "new/out")
    assert result.exit_code == 0, result.output
    assert "2 kernels in new/out; load them with CUTE_KERNELS_AOT_DIR=" in unfolded(result)
    aot.load(tmp_path / "new" / "out")
    refused(run("aot", "-o", "new/out"), "aot: --out new/out: expected a new or empty folder")


@toy.needs_linker
def test_a_full_disk_is_one_line(toys, tmp_path, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(aot.binaries, "build_binary", lambda c, s, folder: full(folder / "k.so"))
    result = run("aot", "-o", "out")
    assert (result.exit_code, result.stderr) == (2, "aot: --out out: No space left on device\n")
    assert not list(tmp_path.iterdir())


# certify, with certificates that are made up: no compiler.


def certificates() -> list[Certificate]:
    """One for each of the catalogue, as wide as they come."""
    pool = RegisterPool(384, 168, (24, 240, 240))
    return [
        Certificate(
            name=kernel.name,
            constexpr=kernel.constexpr,
            arch="sm_90a",
            toolchain="cutlass-dsl 4.8.1",
            kind=kind,
            opcodes=(("HGMMA", 1024), ("UBLKRED", 128)),
            registers=168,
            shared_static=1024,
            shared_dynamic=232448 - 1024,
            stack=0,
            spills=0,
            sass_sha256="ab" * 32,
            findings=(),
            register_pool=pool,
        )
        for kernel, kind, _ in about.catalogue()
        if kind is not None
    ]


@pytest.fixture
def certifying(monkeypatch):
    """``certify`` is given these certificates; nothing is compiled."""
    out = certificates()
    monkeypatch.setattr(certify, "_prove_all", lambda identities, jobs: out)
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr("verify.command.certificate_sources", lambda name: "of nothing")
    monkeypatch.setattr(certify.console, "_width", 80)
    return out


def test_certify_fits_80_columns(certifying):
    result = run("certify")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in result.stdout
    rows = [line for line in lines if "24+240+240  232448  1024      128  ok" in line]
    assert len(rows) == len(certifying)
    titles = [line for line in lines if ", class " in line]
    assert (
        len(titles) == len({(one.name, one.kind) for one in certifying}) == len(tables(certifying))
    )
    # A row, folded where it is long, tells its configuration from every other of its kernel.
    spans = [i for i, line in enumerate(lines) if ", class " in line] + [len(lines)]
    for begin, end in itertools.pairwise(spans):
        group: list[str] = []
        for line in lines[begin:end]:
            if "24+240+240" in line:
                group.append(line)
            elif group and line.startswith(" ") and line.strip():
                group[-1] += line
        assert len(set(group)) == len(group) > 0


def test_a_broken_rule_is_exit_code_one_and_told(certifying, tmp_path):
    finding = Finding("R4", "f: PTX line 3", "mul.lo.s32 feeds an address")
    wrong = dataclasses.replace(certifying[5], findings=(finding, finding, Finding("A1", "x", "y")))
    certifying[5] = wrong
    result = run("certify")
    assert result.exit_code == 1 and not result.stderr
    assert "A1 x1, R4 x2" in result.stdout
    line = f"R4: {finding.where}: {finding.text} (2 times, all in certificates.json)"
    assert line in unfolded(result)
    assert json.loads((tmp_path / "certify" / "certificates.json").read_text())[5]["ok"] is False


def test_a_report_says_what_each_certificate_was_made_from(certifying, tmp_path):
    """An edit while the certificates are made must not be in it: the digest is taken before."""
    taken = []

    def digest(name):
        taken.append(name)
        return f"of {name}"

    def prove_all(identities, jobs):
        assert set(taken) == {one.name for one in certifying}
        return certifying

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "_prove_all", prove_all)
        patch.setattr(certify, "certificate_sources", digest)
        assert run("certify").exit_code == 0
    data = json.loads((tmp_path / "certify" / "certificates.json").read_text())
    assert data and all(one["sources"] == f"of {one['name']}" for one in data)


def test_a_worker_that_was_killed_is_one_line(monkeypatch):
    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, *_):
            raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(certify, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr("verify.command.certificate_sources", lambda name: "of nothing")
    result = run("certify", "--only", "column_sum")
    assert result.exit_code == 2
    assert (
        result.stderr == "certify: a process that compiles was killed: try with fewer --jobs, "
        "each takes half a GiB\n"
    )


def test_a_report_that_cannot_be_written_is_known_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "certify").write_text("a file")
    monkeypatch.setattr(certify, "_prove_all", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr(certify, "certificate_sources", lambda name: "of nothing")
    refused(run("certify"), "certify: --out certify: File exists")
