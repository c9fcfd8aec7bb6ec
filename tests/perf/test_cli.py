"""The command line: which commands there are, one-line refusals, exit codes by what was found."""

from __future__ import annotations

import types

import pytest
import torch
from typer.testing import CliRunner

import perf.attention.bench
import perf.core.soak
import perf.core.timing
import perf.gemm.bench
import perf.probes.runner
import perf.rl.commands
from perf.__main__ import app
from perf.core import record
from perf.core.watch import Lost
from tests.perf.records import H100
from tests.perf.records import gemm as timed

#: Command lines that measure, and so need a card.
ON_A_CARD = {
    "bench gemm": "--shape qkv",
    "bench attention": "--quick",
    "bench rl": "",
    "bench tensor-parallel": "",
    "profile gemm": "--shape qkv --target",
    "profile attention": "--mask full --d 64 --pass fwd --target",
    "soak attention": "",
    "sanitize attention": "",
    "sanitize target": "--plant",
    "probe": "width",
    "digest": "--check",
    "headline": "-o nowhere/run.jsonl",
}


def run(command: str):
    return CliRunner().invoke(app, command.split())


@pytest.fixture
def a_card(monkeypatch):
    card = types.SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(perf.core.timing, "ceilings", lambda: {"mm_tflops": 1.0, "copy_gbs": 1.0})


@pytest.mark.parametrize("command", ON_A_CARD)
def test_without_a_card_one_line_and_exit_code_2(command, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    result = run(f"{command} {ON_A_CARD[command]}")
    assert result.exit_code == 2 and len(result.output.strip().splitlines()) == 1
    assert result.output.startswith(f"perf {command.split()[0]}: needs a CUDA GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench gemm --shape qkv,nose", "--shape nose"),
        ("bench gemm --m 0", "--m"),
        ("bench gemm --rounds 10", "--rounds"),
        ("bench attention --mask full,nose", "--mask nose"),
        ("bench attention --d 96", "no case of the suite"),
        ("bench mhc --list none", "none"),
        ("bench rl --systems magic", "--systems"),
        ("bench rl --size 70b", "--size"),
        ("bench rl --device tpu", "--device"),
        ("bench rl --device cpu", "-o expected a file"),
        ("bench rl --device cpu -o x.jsonl --work .", "--work expected an empty folder"),
        ("bench rl --device cpu -o x.jsonl", "vllm is not installed"),
        ("soak attention --only nose", "nose"),
        ("digest --device tpu", "tpu"),
        ("digest --device cpu --only nose", "nose"),
        ("report --results typo -o other", "--results expected a folder that exists"),
        ("refit none.jsonl", "none.jsonl no such file"),
        ("show magic", "magic expected one of"),
    ],
)
def test_a_wrong_option_is_named(command, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(perf.rl.commands.importlib.util, "find_spec", lambda name: None)
    result = run(command)
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and all(word in output for word in words.split()), output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def attention_run(monkeypatch, a_card):
    """Runs `bench attention` with a given result; keeps what it was asked."""
    requested = {}

    def runs(measured, arguments=""):
        def measure(todo, options, **more):
            requested.update(todo=todo, options=options, **more)
            yield from measured(todo)

        monkeypatch.setattr(perf.attention.bench, "measure", measure)
        return run(f"bench attention {arguments}"), requested

    return runs


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_attention_fails_where_our_result_is_wrong(status, code, attention_run):
    def measured(todo):
        yield "a line"
        for name, state in (("fa4", "failed"), ("ours_unordered", status)):
            yield todo[0].items("bwd") | {"system": name, "status": state, "why": "rival"}

    result, requested = attention_run(measured, "--quick -o x.jsonl")
    assert result.exit_code == code and result.output.splitlines()[0] == "a line", result.output
    options = requested["options"]
    assert len(requested["todo"]) == 7 and options.passes == ["bwd"]
    assert options.rivals == ["ours", "ours_unordered", "fa4"] and options.l2_bytes == 1 << 20


def test_a_lost_device_is_one_line_and_1(attention_run):
    def measured(todo):
        yield "a line"
        raise Lost("illegal memory access")

    result, _ = attention_run(measured)
    assert result.exit_code == 1
    assert result.output.endswith("perf bench: the device is lost: illegal memory access\n")


@pytest.mark.parametrize(("verdict", "code"), [("yes", 0), ("no", 1), ("failed", 1)])
def test_the_smoke_probe_decides_its_exit_code(verdict, code, monkeypatch, tmp_path, a_card):
    def answer(build):
        yield {"case": "answer", "verdict": verdict, "why": "-"}

    monkeypatch.setattr(record, "environment", lambda commit: {"schema": record.SCHEMA})
    monkeypatch.setattr(perf.probes.runner, "PROBES", {"smoke": answer})
    path = tmp_path / "p.jsonl"
    assert run(f"probe all -o {path}").exit_code == code
    assert record.read(path)[0]["verdict"] == verdict


def test_compare_says_by_its_exit_code_what_it_found(tmp_path):
    def write(name: str, *items) -> str:
        for item in items:
            record.append(tmp_path / name, item)
        return str(tmp_path / name)

    one = timed("fwd", "qkv", 4096, 100.0, {})
    base = write("a.jsonl", one, timed("fwd", "o_proj", 4096, 7.0, {}))
    slow = write("b.jsonl", timed("fwd", "qkv", 4096, 110.0, {}))
    other = write("c.jsonl", one | {"gpu": H100})
    pairs = {(base, base): 0, (base, slow): 1, (slow, base): 0, (base, other): 2, (base, "no"): 2}
    for files, code in pairs.items():
        assert run(f"compare {' '.join(files)}").exit_code == code, files
    assert "only in A" in run(f"compare {base} {slow}").output


def test_report_writes_the_page_and_a_broken_file_stops_it(tmp_path):
    results, page = tmp_path / "results", tmp_path / "docs" / "status.md"
    results.mkdir()
    command = f"report --results {results} -o {page}"
    assert run(command).exit_code == 0 and page.read_text().startswith("# Status\n")
    (results / "x.jsonl").write_text("{broken\n")
    result = run(command)
    assert result.exit_code == 2 and "x.jsonl:1: not JSON" in result.output
