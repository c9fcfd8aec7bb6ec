"""``python -m cute_kernels audit``: exit codes, the table, the JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import cute_kernels as ck
from cute_kernels import __main__ as cli
from tests.model.audit import planted

pytestmark = pytest.mark.usefixtures("empty_folder")

CLEAN, SPOILT = (f"tests.model.audit.planted:{name}" for name in ("clean", "spoilt_norm"))
KEYS = {"verdict", "unrecognised", "information",
    "version", "ok", "digest_bits", "first", "findings", "victim_count", "ran", "skipped",
    "unfollowed", "rows", "differing", "gradients", "facts",
}  # fmt: skip


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["audit", *arguments])


def test_nothing_differs_in_a_clean_model(tmp_path):
    done = run(CLEAN, "--lengths", "9,4", "--transforms", "batch,decode", "--json", "found.json")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("0 differing rows of ")
    report = json.loads((tmp_path / "found.json").read_text())
    assert set(report) == KEYS and report["ok"] and report["first"] is None
    assert list(report["ran"]) == ["batch", "decode"] and report["digest_bits"] == 128


def test_a_culprit_is_named_and_the_exit_code_is_1():
    done = run(SPOILT, "--lengths", "9,4", "--transforms", "batch", "--victims", "--device", "cpu")
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.output.split())
    assert text.startswith("first: blocks.1.norm (LanesByRows; ops: mul, ")
    assert " under batch, all in one batch " in text
    (start,) = [i for i, line in enumerate(lines) if line.strip().startswith("blocks.1.norm ")]
    cells, more = lines[start].split(), lines[start + 1].split()
    assert cells[1] == "batch" and cells[3].startswith("0x")
    assert more[0] == "LanesByRows" and more[-1].startswith("0x") and more[-1] != cells[3]
    assert any(line.startswith("passed on: blocks.1.up (Linear)") for line in lines)


def test_the_json_is_that_of_the_report():
    done = run(
        SPOILT, "--tokens", "1,2,3,4,5", "--tokens", "7,8,9,10,11,12", "--json", "-",
        "--transforms", "batch,decode", "--victims",
    )  # fmt: skip
    printed = json.loads(done.stdout)
    assert done.exit_code == 1 and set(printed) == KEYS | {"victims"}
    ids = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    report = ck.audit(planted.spoilt_norm(), ids, transforms=["batch", "decode"])
    assert printed == json.loads(json.dumps(report.as_json(victims=True)))
    assert printed["first"]["module"] == "blocks.1.norm" and len(printed["first"]["first"]) == 3


def test_gradients_can_be_left_out():
    report = json.loads(run(CLEAN, "--lengths", "5,3", "--no-gradients", "--json", "-").stdout)
    assert report["skipped"]["micro_batches"] == "gradients=False" and report["gradients"] == 0
    assert "left_padding" in report["ran"]


BAD = {
    "nosuchmodule.at_all:make": "nosuchmodule",
    "tests.model.audit.planted:nothing": "MODEL: expected a function 'nothing' in tests.model",
    "tests.model.audit.planted:no_model": "MODEL: expected tests.model.audit.planted:no_model to",
    f"{CLEAN} --dtype bf15": "--dtype: expected one of 'auto', 'bf16'",
    f"{CLEAN} --device gpu": "--device: expected cpu, or cuda where there is a GPU, got gpu",
    f"{CLEAN} --device meta": "--device: expected cpu",
    f"{CLEAN} --lengths 3,x": "--lengths: expected whole numbers of at least 1",
    f"{CLEAN} --lengths 0": "--lengths: expected whole numbers of at least 1",
    f"{CLEAN} --tokens 1;2": "--tokens: expected whole numbers of at least 0",
    f"{CLEAN} --tokens 1,61": "--tokens: expected ids from 0 to 60, got 61",
    f"{CLEAN} --tokens 1 --prompt a": "--tokens: expected --prompt or --tokens, got both",
    f"{CLEAN} --prompt hello": "--prompt: expected --tokens or --lengths for a model of a function",
    f"{CLEAN} --transforms batch,all": "--transforms: expected one of 'repeat', 'batch', ",
    f"{CLEAN} --json no/such/folder.json": "--json: expected a file in a folder that exists",
    "no_such_folder_of_a_model/x/y": "",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_one_line_and_write_nothing(line, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run(*line.split())
    assert done.exit_code == 2, done.output
    assert not done.stdout and done.stderr.startswith("audit: ") and done.stderr.count("\n") == 1
    assert BAD[line] in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_random_ids_are_those_of_the_seed():
    line = (SPOILT, "--lengths", "9,4", "--transforms", "batch", "--json", "-", "--seed")
    first, again, other = (run(*line, seed).stdout for seed in "112")
    assert first == again != other


def test_a_folder_of_transformers_patched_and_not(tmp_path):
    """The command makes the main_grads; what autograd sums in ``.grad`` is information."""
    families = pytest.importorskip("tests.model.patch.families")
    net = families.model("llama", num_hidden_layers=1, attention_bias=True)
    net.save_pretrained(tmp_path / "model")
    options = ["--lengths", "5,3,4", "--transforms", "micro_batches", "--json", "-"]
    done = run("model", "--patch", *options)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["verdict"] == "ok" and report["findings"] == [] and report["gradients"] > 0
    done = run("model", "--dtype", "bf16", *options)
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["ok"] else 1)
    assert (
        report["facts"]["model"] == "LlamaForCausalLM" and report["facts"]["dtypes"] == "bfloat16"
    )


@pytest.mark.parametrize("name", ["typo_folder", "here/typo"])
def test_a_folder_that_is_absent_asks_no_hub(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", asked.append)
    (tmp_path / "here").mkdir()
    done = run(name)
    assert done.exit_code == 2 and "MODEL: expected " in done.stderr and not asked
