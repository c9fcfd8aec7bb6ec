"""The commands' output: 80 columns, option names in errors, full disks, and the short `info`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cute_kernels
from cute_kernels import about, settings
from cute_kernels.__main__ import app
from cute_kernels.cli import common, info
from perf.__main__ import app as perf_app
from perf.core import record
from tests.commands import run
from tests.model.audit import planted

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).resolve().parent.parent
#: Lines of the commands that finish on a CPU in a second or two.
LINES = {
    "info": 0,
    "info --all": 0,
    "schedule --seqlen 1024 --heads 4 --slots 10": 0,
    "schedule --mask sliding_window:300&causal --seqlen 4096 --kind shift --kind lpt": 0,
    "schedule --mask full --seqlen 1024 --heads 1 --slots 8 --save a-long-name-of-a-file.npz": 0,
    "audit tests.test_command_output:deep --lengths 9,4 --transforms batch,decode --victims": 1,
    "audit tests.model.audit.planted:clean --lengths 5,3": 0,
}
PERF = {
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
def test_every_line_of_a_command_fits_80_columns(line):
    cli_result = run(*line.split())
    assert cli_result.exit_code == LINES[line], cli_result.output
    assert cli_result.output and not wide(cli_result.output)


@pytest.mark.parametrize("line", PERF)
def test_every_line_of_perf_fits_80_columns(line, monkeypatch):
    monkeypatch.setattr("perf.core.figure.speed", lambda *_: [])
    monkeypatch.setattr("perf.report.adopt_certificates", lambda *_: None)
    cli_result = CliRunner().invoke(perf_app, line.split())
    assert cli_result.exit_code == PERF[line], cli_result.output
    assert cli_result.output and not wide(cli_result.output)


def groups(group, *names: str):
    """The words of every command below a group."""
    for name in getattr(group, "list_commands", lambda context: ())(None):
        yield (*names, name)
        yield from groups(group.get_command(None, name), *names, name)


def test_help_fits_80_columns_and_flags_take_no_value():
    import typer

    for one in (app, perf_app):
        for words in ((), *groups(typer.main.get_command(one))):
            cli_result = CliRunner().invoke(one, [*words, "--help"])
            assert cli_result.exit_code == 0 and "--help" in cli_result.output
            assert not wide(cli_result.output) and "<bool>" not in cli_result.output, words


@pytest.mark.parametrize("kind", ["gemm", "logp", "attention", "mhc", "norm", "model"])
def test_lines_of_measurements_are_folded(kind, monkeypatch, capsys):
    """What a run on a GPU prints of each record on file."""
    import importlib

    from perf.core import passes

    name = {"gemm": "bench"}.get(kind, kind)
    home = f"perf.{kind}.bench" if kind not in ("mhc", "norm") else None
    line = importlib.import_module(home).line if home else passes.line
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
def test_a_full_disk_is_one_line_with_the_path(line, name, message, monkeypatch):
    if "demo" in line or "plot" in line:
        pytest.importorskip("matplotlib")
    if "demo" in line:
        pytest.importorskip("transformers")
        from cute_kernels.demo import compare
        from tests.demo.tiny import SETUP

        monkeypatch.setattr(compare, "Setup", lambda: SETUP)
    from verify import command as certify

    monkeypatch.setattr(certify, "_prove_all", lambda *_: [])
    monkeypatch.setattr(certify, "require", lambda *_: None)
    monkeypatch.setattr("verify.sass.nvdisasm", lambda: None)
    monkeypatch.setattr("verify.command.certificate_sources", lambda _: "")
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


def test_info_is_short_and_all_or_json_has_every_op(monkeypatch):
    short = CliRunner().invoke(app, ["info"]).output
    every = CliRunner().invoke(app, ["info", "--all"]).output
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
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
