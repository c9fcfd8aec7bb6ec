"""The command line: exit codes, one-line refusals, pages written."""

from __future__ import annotations

import json
import types

import pytest
import torch
from typer.testing import CliRunner

import perf.attention.bench
import perf.core.timing
import perf.core.watch
import perf.gemm.bench
import perf.probes.runner
from perf.__main__ import app
from perf.core import record
from tests.perf.core.records import bench

run = CliRunner().invoke


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "gemm", "--shape", "qkv"],
        ["bench", "attention", "--quick"],
        ["bench", "rl"],
        ["bench", "tensor-parallel"],
        ["profile", "gemm", "--shape", "qkv"],
        ["profile", "gemm", "--shape", "qkv", "--target"],
        ["profile", "attention", "--d", "64"],
        ["profile", "attention", "--mask", "full", "--d", "64", "--pass", "fwd", "--target"],
        ["soak", "attention"],
        ["sanitize", "attention"],
        ["sanitize", "target", "--plant"],
        ["probe", "width"],
        ["digest"],
        ["digest", "--check"],
        ["h200", "--out", "nowhere"],
    ],
)
def test_without_a_card_one_line_and_exit_code_2(command, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    cli_result = run(app, command)
    assert cli_result.exit_code == 2
    assert len(cli_result.output.strip().splitlines()) == 1
    assert cli_result.output.startswith(f"perf {command[0]}: needs a CUDA GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "qkv,nose"], ["--shape", "nose"]),
        (["--product", "bwd"], ["--product", "bwd"]),
        (["--m", "12,x"], ["--m", "12,x"]),
        (["--m", "0"], ["--m"]),
        (["--rivals", "magic"], ["--rivals", "magic"]),
        (["--rounds", "10"], ["--rounds"]),
    ],
)
def test_a_wrong_option_is_named(options, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cli_result = run(app, ["bench", "gemm", *options])
    assert cli_result.exit_code == 2
    assert all(word in cli_result.output for word in words), cli_result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mask", "full,nose"], ["--mask", "nose"]),
        (["--systems", "magic"], ["--systems", "magic"]),
        (["--pass", "dq"], ["--pass", "dq"]),
        (["--s", "8k"], ["--s", "8k"]),
        (["--d", "96"], ["no case of the suite"]),
        (["--mask", "pack", "--quick"], ["no case of the suite"]),
        (["--rounds", "10"], ["--rounds"]),
    ],
)
def test_a_wrong_option_of_attention_is_named(options, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cli_result = run(app, ["bench", "attention", *options])
    assert cli_result.exit_code == 2
    assert all(word in cli_result.output for word in words), cli_result.output


@pytest.fixture
def attention_run(monkeypatch):
    """Runs `bench attention` with a given result; keeps what it was asked."""
    card = types.SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(perf.core.timing, "ceilings", lambda: {"mm_tflops": 1.0, "copy_gbs": 1.0})
    requested = {}

    def runs(measured, *arguments):
        def measure(todo, options, **more):
            requested.update(todo=todo, options=options, **more)
            yield from measured(todo)

        monkeypatch.setattr(perf.attention.bench, "measure", measure)
        return run(app, ["bench", "attention", *arguments]), requested

    return runs


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_attention_fails_where_our_result_is_wrong(status, code, attention_run):
    def measured(todo):
        yield "a line"
        for name, state in (("fa4", "failed"), ("ours_unordered", status)):
            yield todo[0].items("bwd") | {"system": name, "status": state, "why": "rival"}

    cli_result, requested = attention_run(measured, "--quick", "-o", "x.jsonl")
    assert cli_result.exit_code == code, cli_result.output
    assert cli_result.output.splitlines()[0] == "a line" and "FAILED: rival" in cli_result.output
    assert len(requested["todo"]) == 7 and requested["options"].passes == ["bwd"]
    assert requested["options"].rivals == ["ours", "ours_unordered", "fa4"]
    assert requested["options"].patience_s and requested["options"].l2_bytes == 1 << 20


def test_attention_asks_for_what_the_options_say(attention_run):
    arguments = ["--mask", "causal", "--d", "64", "--group", "4", "--systems", "ours,fa4"]
    _, requested = attention_run(lambda todo: [], *arguments, "--budget", "9", "--rounds", "60")
    assert [(c.heads, c.kv_heads) for c in requested["todo"]] == [(16, 4), (32, 8)]
    options = requested["options"]
    assert (options.budget_s, options.rounds, options.passes) == (9.0, 60, ["fwd", "bwd"])
    assert options.wanted("fa4", requested["todo"][0])
    assert requested["output"].name == "attention.jsonl"
    _, requested = attention_run(lambda todo: [], "--check-only")
    assert requested["options"].check_only and requested["options"].ceilings is None
    random = next(c for c in requested["todo"] if c.mask == "random" and c.kv_heads == 4)
    assert not requested["options"].wanted("fa4", random)


def test_attention_takes_packs_where_they_are_asked_for(attention_run):
    _, requested = attention_run(lambda todo: [], "--mask", "pack", "--d", "128")
    assert [c.label for c in requested["todo"]] == [
        "pack/s8192/d128/h16/kv16",
        "pack/s8192/d128/h32/kv8",
    ]
    wanted = requested["options"].wanted
    names = [name for name in requested["options"].rivals if wanted(name, requested["todo"][1])]
    assert names == ["ours", "ours_pack", "ours_runs", "fa4_varlen"]
    _, requested = attention_run(lambda todo: [])
    assert len(requested["todo"]) == 56
    assert not any(wanted(name, case) for name in names[1:] for case in requested["todo"])


def test_attention_says_that_the_device_is_lost(attention_run):
    def measured(todo):
        yield "a line"
        raise perf.core.watch.Lost("illegal memory access")

    cli_result, _ = attention_run(measured)
    assert cli_result.exit_code == 1
    assert cli_result.output.splitlines()[-1] == (
        "perf bench: the device is lost: illegal memory access"
    )


def write(path, *items) -> str:
    for item in items:
        record.append(path, {"schema": record.SCHEMA} | item)
    return str(path)


def test_compare_says_by_its_exit_code_what_it_found(tmp_path):
    base = write(tmp_path / "a.jsonl", bench(100.0), bench(7.0, shape="o_proj"))
    slow = write(tmp_path / "b.jsonl", bench(110.0))
    other = write(tmp_path / "c.jsonl", bench(100.0, gpu="another"))
    same = run(app, ["compare", base, base])
    assert same.exit_code == 0 and "same" in same.output
    worse = run(app, ["compare", base, slow])
    assert worse.exit_code == 1
    assert "regression: slower" in worse.output and "only in A" in worse.output
    assert run(app, ["compare", slow, base]).exit_code == 0
    for files in ([base, other], [base, str(tmp_path / "none.jsonl")]):
        unusable = run(app, ["compare", *files])
        assert unusable.exit_code == 2
        assert unusable.output.startswith("perf compare: ")


def test_report_writes_the_page_and_a_broken_file_stops_it(tmp_path):
    results, page = tmp_path / "results", tmp_path / "docs" / "status.md"
    results.mkdir()
    cli_result = run(app, ["report", "--results", str(results), "-o", str(page)])
    assert cli_result.exit_code == 0 and "0 records" in " ".join(cli_result.output.split())
    assert page.read_text().startswith("# Status\n")
    absent = run(
        app, ["report", "--results", str(tmp_path / "typo"), "-o", str(tmp_path / "other")]
    )
    assert absent.exit_code == 2 and not (tmp_path / "other").exists()
    assert absent.output.startswith("perf report: --results: expected a folder that exists, got ")
    (results / "x.jsonl").write_text("{broken\n")
    cli_result = run(app, ["report", "--results", str(results), "-o", str(page)])
    assert cli_result.exit_code == 2
    assert "x.jsonl:1: not JSON" in cli_result.output


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_bench_fails_where_our_result_is_wrong(status, code, monkeypatch):
    def measured(todo, names, **_):
        for case in todo:
            body = {"status": "failed", "why": "rival", "bitwise": {}, "check": {"rel_error": 0.0}}
            yield case.items() | body | {"system": "cublas"}
            yield case.items() | body | {"system": "ours", "status": status}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(perf.gemm.bench, "gemm", measured)
    cli_result = run(app, ["bench", "gemm", "--case", "dx:qkv:48", "--json"])
    assert cli_result.exit_code == code
    shown = [json.loads(line) for line in cli_result.output.splitlines()]
    assert [(b["product"], b["shape"], b["m"]) for b in shown] == [("dx", "qkv/m48", 48)] * 2
    cli_result = run(app, ["bench", "gemm", "--shape", "qkv", "--product", "fwd"])
    assert cli_result.output.splitlines()[0].endswith("failed: rival")


@pytest.mark.parametrize(("verdict", "code"), [("yes", 0), ("no", 1), ("failed", 1)])
def test_the_smoke_probe_decides_its_exit_code(verdict, code, monkeypatch, tmp_path):
    def answer(build):
        yield {"case": "answer", "verdict": verdict, "why": "-"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda commit: {"schema": record.SCHEMA})
    monkeypatch.setattr(perf.probes.runner, "PROBES", {"smoke": answer})
    cli_result = run(app, ["probe", "all", "-o", str(tmp_path / "p.jsonl")])
    assert cli_result.exit_code == code, cli_result.output
    assert record.read(tmp_path / "p.jsonl")[0]["verdict"] == verdict
