"""The commands: 80 columns, and errors of one line with an exit code that says whose fault."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

import cute_kernels
from cute_kernels import __main__ as cli
from cute_kernels import about, settings
from cute_kernels.cli import common, info
from cute_kernels.compile import aot, cache, toolchain
from cute_kernels.schedulers.__main__ import app as schedule_app
from perf.__main__ import app as perf_app
from perf.core import passes, record
from tests.compile import toy
from tests.model.audit import planted
from verify import command as certify
from verify import sass
from verify.__main__ import app as certify_app
from verify.report import Certificate, Finding, RegisterPool, tables

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).resolve().parent.parent
#: Commands that are modules of their own: ``python -m verify``, ``cute_kernels.schedulers``.
MODULES = {"certify": certify_app, "schedule": schedule_app}
COMMANDS = {
    "info": [],
    "audit": ["tests.model.audit.planted:clean", "--json", "out"],
    "demo": ["--steps", "1", "-o", "out"],
    "aot": ["-o", "out"],
    "certify": ["-o", "out"],
    "contract": ["-o", "out"],
    "schedule": ["--seqlen", "256"],
}


def run(name: str, *options: str):
    """Run a command."""
    if name in MODULES:
        return CliRunner().invoke(MODULES[name], options)
    return CliRunner().invoke(cli.app, [name, *options])


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


#: What is wrong, and what the one line on standard error begins with.
BAD = {
    "aot --arch sm_80": "aot: --arch: expected one of 'sm_90a', got 'sm_80'",
    "aot --only gemm_sm9O": "aot: --only: expected one of 'gemm_sm90', ",
    "certify --only sparse_atn_fwd": "certify: --only: expected one of 'sparse_attn_fwd_sm90', ",
    "certify --jobs -1": "certify: --jobs: expected a number of processes, or 0, got -1",
    "demo --steps 0": "demo: --steps: expected at least 1, or None, got 0",
    "demo --seconds nan": "demo: --seconds: expected more than 0, and finite, got nan",
    "demo --seed 99999999999999999999999": "demo: --seed: expected 0 to 2147483647, got 9999",
    "demo --device cuda:63": "demo: --device: expected one of this machine's ",
}
SETTINGS = {
    "BACKEND=cublas": "expected one of '', 'cute_sm90', 'triton', 'cpu', got",
    "MAX_CTAS=²": "expected a whole number",
    "CACHE_DIR=~nosuch/x": "expected a folder whose ~ is the home of a user",
    "MAX_CTA=1": "expected one of 'CUTE_KERNELS_MAX_CTAS'",
}
#: (command, packages that are absent) -> what the line says.
ABSENT = {
    ("aot", "cutlass"): "aot: needs nvidia-cutlass-dsl: pip install 'cute-kernels[cu13]'",
    ("aot", "cutlass tvm_ffi"): "needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install",
    ("certify", "cutlass"): "certify: needs nvidia-cutlass-dsl: pip install 'cute-kernels[cu",
    ("demo", "transformers"): "demo: needs transformers: pip install 'cute-kernels[demo]'",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_one_line_and_write_nothing(line, tmp_path):
    name, *options = line.split()
    refused(run(name, *options, "-o", "out"), BAD[line])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_with_a_bad_setting(monkeypatch, tmp_path, command):
    assert {*cli.COMMANDS, *MODULES} == set(COMMANDS)
    for setting, words in SETTINGS.items():
        name, _, value = f"CUTE_KERNELS_{setting}".partition("=")
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            refused(run(command, *COMMANDS[command]), f"{command}: ", name, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "absent"), ABSENT)
def test_a_missing_extra_is_named(monkeypatch, tmp_path, command, absent):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent.split() else find(name)
    )
    refused(run(command, *COMMANDS[command]), ABSENT[command, absent])
    assert not list(tmp_path.iterdir())


@toy.needs_dsl
def test_what_is_missing_is_known_before_the_work(monkeypatch, tmp_path):
    """A backend that can run the demo, a disassembler, a folder for the report."""
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_KERNELS_BACKEND", "triton")
        refused(run("demo"), "demo: linear: no backend for", "; cute_sm90: CUTE_KERNELS_BACKEND=")
    sass.nvdisasm.cache_clear()
    monkeypatch.setattr(certify, "_prove_all", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(certify, "certificate_sources", lambda name: "of nothing")
    with monkeypatch.context() as patch:
        patch.setattr(sass.shutil, "which", lambda name: None)
        patch.setattr(sass, "_in_wheel", lambda name: None)
        refused(run("certify"), "certify: nvdisasm: not found", "pip install nvidia-cuda-nvdisasm")
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    (tmp_path / "certify").write_text("a file")
    refused(run("certify"), "certify: --out certify: File exists")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(about, "info", lambda: 1 / 0)
    assert isinstance(run("info").exception, ZeroDivisionError)


def test_the_version_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from cute_kernels.__main__ import main; main()"
    command = [sys.executable, "-c", code, "--version"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout == f"cute-kernels {cute_kernels.__version__}\n", process.stderr
    stated = f'version = "{cute_kernels.__version__}"'
    assert stated in (ROOT / "pyproject.toml").read_text()


# aot, with a catalogue of kernels that the C compiler makes.


@toy.needs_linker
def test_an_aot_that_failed_can_be_tried_again(monkeypatch, tmp_path):
    failing = [ModuleNotFoundError("No module named 'cutlass'")]
    monkeypatch.setattr(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT)
    monkeypatch.setattr("cute_kernels.cli.aot.require", lambda *_: None)

    def before():
        if failing:
            raise failing[0]

    kernels = [(toy.kernel(7), "A", None), (toy.kernel(8, before=before), "A", None)]
    monkeypatch.setattr(about, "catalogue", lambda: kernels)
    result = run("aot", "-o", "new/out")
    assert result.exit_code == 2 and result.stderr == "aot: No module named 'cutlass'\n"
    failing.clear()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch:
        patch.setattr(aot.binaries, "build_binary", full)
        result = run("aot", "-o", "out")
    assert (result.exit_code, result.stderr) == (2, "aot: --out out: No space left on device\n")
    assert not list(tmp_path.iterdir())
    result = run("aot", "-o", "new/out")
    assert result.exit_code == 0, result.output
    assert "2 kernels in new/out; load them with CUTE_KERNELS_AOT_DIR=" in unfolded(result)
    aot.load(tmp_path / "new" / "out")
    refused(run("aot", "-o", "new/out"), "aot: --out new/out: expected a new or empty folder")
    cache.clear()


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
def no_compiler(monkeypatch):
    """``certify`` proves nothing: what it is given, or no certificate at all."""
    monkeypatch.setattr(certify, "_prove_all", lambda identities, jobs: [])
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr("verify.command.certificate_sources", lambda name: "of nothing")


@pytest.fixture
def certifying(no_compiler, monkeypatch):
    """The certificates that ``certify`` is given: one of each kernel."""
    out = list({one.name: one for one in certificates()}.values())
    monkeypatch.setattr(certify, "_prove_all", lambda identities, jobs: out)
    return out


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_certify_fits_80_columns(certifying, monkeypatch, every):
    certifying[:] = certificates()[::every]
    monkeypatch.setattr(certify.console, "_width", 80)
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


def test_certify_says_what_was_compiled(certifying, monkeypatch, tmp_path):
    """An edit while the certificates are made must not be in it: the digest is taken before."""
    taken = []

    def prove_all(identities, jobs):
        assert set(taken) == {one.name for one in certifying}
        return certifying

    monkeypatch.setattr(certify, "certificate_sources", lambda n: taken.append(n) or f"of {n}")
    monkeypatch.setattr(certify, "_prove_all", prove_all)
    assert run("certify").exit_code == 0
    data = json.loads((tmp_path / "certify" / "certificates.json").read_text())
    assert data and all(one["sources"] == f"of {one['name']}" for one in data)


def test_a_worker_that_was_killed_is_one_line(monkeypatch):
    pool = mock.MagicMock()
    pool.return_value.__enter__.return_value.map.side_effect = BrokenProcessPool("terminated")
    pool.return_value.__exit__.return_value = False
    monkeypatch.setattr(certify, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr("verify.command.certificate_sources", lambda name: "of nothing")
    refused(run("certify", "--only", "column_sum"), "certify: a process that compiles was killed: ")


# ---- 80 columns ---------------------------------------------------------------------------------

#: Lines of the commands that finish on a CPU in a second or two, and their exit codes.
LINES = {
    "info --all": 0,
    "schedule --mask sliding_window:300&causal --seqlen 4096 --kind shift --kind lpt": 0,
    "schedule --mask full --seqlen 1024 --heads 1 --slots 8 --save a-long-name-of-a-file.npz": 0,
    "audit tests.test_commands:deep --lengths 9,4 --transforms batch,decode --victims": 1,
    f"compare {ROOT}/perf/results/norm.jsonl {ROOT}/perf/results/norm.jsonl": 0,
    f"report --results {ROOT}/perf/results -o status.md": 0,
}


def deep() -> torch.nn.Module:
    """A model with a planted fault and long module names."""
    wrapped = planted.spoilt_norm()
    wrapped.blocks[1].add_module("a_name_of_a_module_that_is_longer_than_most", torch.nn.Identity())
    return wrapped


def wide(text: str) -> list[str]:
    """The lines that do not fit 80 columns, but for one word that is longer."""
    return [x for x in text.splitlines() if len(x) > 80 and " " in x.strip()]


@pytest.mark.parametrize("line", LINES)
def test_every_line_of_a_command_fits_80_columns(line, monkeypatch):
    monkeypatch.setattr("perf.core.figure.speed", lambda *_: [])
    monkeypatch.setattr("perf.report.adopt_certificates", lambda *_: None)
    name = line.split()[0]
    perf = name in ("compare", "report")
    result = CliRunner().invoke(perf_app, line.split()) if perf else run(*line.split())
    assert result.exit_code == LINES[line], result.output
    assert result.output and not wide(result.output)


def groups(group, *names: str):
    """The words of every command below a group."""
    for name in getattr(group, "list_commands", lambda context: ())(None):
        yield (*names, name)
        yield from groups(group.get_command(None, name), *names, name)


def test_help_fits_80_columns_and_flags_take_no_value():
    for one in (cli.app, perf_app):
        for words in ((), *groups(typer.main.get_command(one))):
            cli_result = CliRunner().invoke(one, [*words, "--help"])
            assert cli_result.exit_code == 0 and "--help" in cli_result.output
            assert not wide(cli_result.output) and "<bool>" not in cli_result.output, words


@pytest.mark.parametrize("kind", ["gemm", "mhc", "model"])
def test_lines_of_measurements_are_folded(kind, monkeypatch, capsys):
    """What a run on a GPU prints of each record on file."""
    name = {"gemm": "bench"}.get(kind, kind)
    line = importlib.import_module("perf.model.bench").line if kind == "model" else passes.line
    bodies = record.read(ROOT / "perf" / "results" / f"{name}.jsonl")[-40:]
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for body in bodies:
        with contextlib.suppress(KeyError):  # a record of another table in the same file
            texts.append(line(body))
    assert texts and any(len(text) > 80 for text in texts)
    for text in texts:
        common.say(text)
    printed = capsys.readouterr().out
    assert not wide(printed)
    assert printed.split() == " ".join(texts).split()


# ---- full disks ---------------------------------------------------------------------------------

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize(
    ("line", "name", "message"),
    [
        ("schedule --seqlen 512 --heads 1 --plot a.svg", "a.svg", "schedule: --plot a.svg"),
        ("schedule --seqlen 512 --heads 1 --save a.npz", "a.npz", "schedule: --save a.npz"),
        (
            "audit tests.model.audit.planted:clean --lengths 5,3 --transforms batch --json a",
            "a",
            "audit: --json a",
        ),
        ("demo --steps 1 -o out", "out/drift.svg", "demo: --out out/drift.svg"),
        ("certify -o out", "out/certificates.json", "certify: --out out/certificates.json"),
    ],
)
def test_a_full_disk_is_one_line_with_the_path(line, name, message, monkeypatch, no_compiler):
    if "demo" in line or "plot" in line:
        pytest.importorskip("matplotlib")
    if "demo" in line:
        pytest.importorskip("transformers")
        from cute_kernels.demo import compare
        from tests.demo.tiny import LEAST

        monkeypatch.setattr(compare, "Setup", lambda: LEAST)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).symlink_to(FULL)
    cli_result = run(*line.split())
    assert cli_result.exit_code == 2, cli_result.output
    assert cli_result.stderr == f"{message}: No space left on device\n"


@needs_full
def test_a_full_disk_behind_standard_output_is_one_line():
    with FULL.open("w") as out:
        command = [sys.executable, "-m", "cute_kernels", "info"]
        process = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.returncode == 2
    assert process.stderr == "info: standard output: No space left on device\n"


@needs_full
def test_a_full_disk_is_one_line_of_perf(monkeypatch):
    monkeypatch.setattr("perf.report.adopt_certificates", lambda *_: None)
    Path("page.md").symlink_to(FULL)
    cli_result = CliRunner().invoke(perf_app, ["report", "--results", ".", "-o", "page.md"])
    assert cli_result.exit_code == 2 and not cli_result.stdout
    assert cli_result.stderr == "perf: page.md: No space left on device\n"
    Path("a.jsonl").symlink_to(FULL)
    with pytest.raises(OSError, match=r"No space left on device: 'a\.jsonl'"):
        record.append("a.jsonl", {"kind": "bench"})


# ---- info ---------------------------------------------------------------------------------------


def test_info_is_short_and_all_or_json_has_every_op():
    short, every = run("info").output, run("info", "--all").output
    facts = json.loads(run("info", "--json").output)
    assert "ran" in facts
    assert len(short.splitlines()) < 15 and cute_kernels.__version__ in short
    for op, devices in facts["ops"].items():
        assert f"{op} on cpu (bf16)" in every and f"{op} on cpu" not in short
        assert devices["cpu"]["contract_id"] in every
    assert f"{len(facts['ops'])} ops on cpu" in short


def facts(**changes) -> dict:
    """Facts of a machine as tested, with these keys changed."""
    out = {
        "versions": {name: versions[0] for name, versions in about.TESTED.items()}
        | {"cute-kernels": "0.1.0", "cuda": "13.0"},
        "settings": {one.name: one.default for one in settings.TABLE},
        "cache_dir": "/x",
        "extension": None,
        "devices": {"cuda:0": {"arch": "sm_90a"}},
        "ops": {"linear": {"cuda:0": {"backends": {"cute_sm90": None, "cpu": "cpu only"}}}},
    }
    return out | {k: out[k] | v if isinstance(v, dict) else v for k, v in changes.items()}


def test_info_names_what_is_not_as_tested():
    usual = info.summary(facts())
    assert any(line.startswith("versions: as tested (python 3.11, torch ") for line in usual)
    assert "settings: all at their defaults" in usual
    assert "cuda:0: sm_90a: 1 ops on cute_sm90" in usual

    other = info.summary(facts(versions={"torch": "2.12.1+cu130", "python": "3.13.2"}))
    told = [line for line in other if line.startswith("version")]
    assert told == [
        "version: python 3.13.2, tested with 3.11",
        f"version: torch 2.12.1+cu130, tested with {', '.join(about.TESTED['torch'])}",
    ]
    built = info.summary(facts(versions={"torch": f"{about.TESTED['torch'][1]}+cu130"}))
    assert not [line for line in built if line.startswith("version:")]

    told = info.summary(facts(settings={"BACKEND": "triton"}))
    assert f"setting: {settings.PREFIX}BACKEND=triton, default ''" in told

    lost = {"linear": {"cuda:0": {"backends": {"cute_sm90": "no DSL", "cpu": "cpu only"}}}}
    told = info.summary(facts(ops=lost, extension="no compiler"))
    assert "  no backend for linear: cute_sm90: no DSL; cpu: cpu only" in told
    assert "launch plans: looked up in Python (no compiler)" in told


def test_the_tested_versions_are_the_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(
        line.partition(";")[0].strip().split("==")
        for line in lines
        if "==" in line and not line.startswith("#") and 'python_version < "3.11"' not in line
    )
    for name, versions in about.TESTED.items():
        assert name == "python" or versions[0] == pins[name]
    page = (ROOT / "docs" / "support.md").read_text().partition("## Versions")[2]
    assert all(version in page for versions in about.TESTED.values() for version in versions)
