"""`perf digest` on a CPU: inputs that never change, digests that change with the order of a sum."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import cute_kernels as ck
from perf.__main__ import app
from perf.core import record
from perf.digest import cases, inputs, run
from tests.contract import same_bytes
from tests.perf.records import record as made

SMALL = "m77,fp16/m15,random"


def small() -> list[cases.Case]:
    return cases.chosen(SMALL)


def taken(case: cases.Case) -> dict:
    return run.body(case, "cpu")


def command(*arguments: str):
    return CliRunner().invoke(app, ["digest", *arguments])


# ---- inputs -------------------------------------------------------------------------------------


def test_the_words_are_splitmix64s():
    """The published test vector of seed 1234567."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert inputs.words(1234567, 3).tolist() == want
    assert inputs.words(1234567, 2, start=1).tolist() == want[1:]


@pytest.mark.parametrize("dtype", inputs.FORMATS, ids=str)
def test_a_number_is_its_word_by_the_formula(dtype):
    """Each value anew, in Python's whole numbers and floats; across two chunks of words."""
    count = inputs._CHUNK + 50
    got = inputs.Draw("a case", 7).numbers("x", (2, count // 2), dtype).reshape(-1)
    key = inputs.key_of("a case", "x", 7)
    fraction = inputs.FORMATS[dtype].fraction
    for i in [*range(300), *range(count - 100, count)]:
        word = int(inputs.words(key, 1, start=i)[0])
        size = (1 + (word & (1 << fraction) - 1) / 2**fraction) * 2.0 ** (1 - (word >> 60 & 7))
        size = 0.0 if word >> 54 & 63 == 0 else size
        want = torch.tensor(-size if word >> 63 else size, dtype=dtype)
        assert same_bytes(got[i], want), i


def test_the_inputs_of_the_records_are_these():
    """Another formula, name or case would leave the recorded digests without a meaning."""
    out = {case.name: run.combined(run.digests(case.inputs())) for case in small()}
    assert out == {
        "linear/bf16/m77k333n131/bias": "38cb3cf7fa749f9abfc3b07115093d2d"
        "7a9c5558bbc67a2e0e4713858e27e43f",
        "linear/fp16/m15k72n88/bias": "fd5cc5479cd14f82f98261b46a45827e"
        "e9f63f251732101dbd506ca84632870c",
        "attention/fp16/random/b1s300d64h4kv4/spt": "43db12a35aa88d6f81c0df669028a555"
        "fcec90ac261d67575b90e335d3854c56",
    }


# ---- digests ------------------------------------------------------------------------------------


def test_the_command_records_the_digests(tmp_path):
    """Bytes in a fresh process: tests/test_process_contract.py."""
    path = tmp_path / "there.jsonl"
    options = ("--device", "cpu", "--only", SMALL, "--out", str(path), "--commit", "abc")
    printed = command(*options)
    assert printed.exit_code == 0, printed.output
    for case, body in zip(small(), record.read(path), strict=True):
        mine = taken(case)
        assert run.comparable(mine, body) and body["case"] == case.name
        assert (body["results"], body["digest"]) == (mine["results"], mine["digest"])
        assert body["digest"][:16] in printed.output
        assert body["gpu"] == "none" and body["arch"] == mine["contract_id"].split("/")[2]


def changed(case: cases.Case, change) -> set[str]:
    """The results whose digests a change alters."""
    before = taken(case)
    change()
    after = taken(case)
    assert after["inputs"] == before["inputs"] and after["contract_id"] == before["contract_id"]
    assert (after["digest"] != before["digest"]) == (after["results"] != before["results"])
    return {n for n in before["results"] if after["results"][n] != before["results"][n]}


def test_a_sum_over_tokens_in_another_order_shows(monkeypatch):
    """The mutant adds tokens from the last to the first: y and dx keep their bytes, sums do not."""
    linear = ck.linear

    def mutant(x, *others, **options):
        return linear(x.flip(0), *others, **options).flip(0)

    out = changed(small()[0], lambda: monkeypatch.setattr(ck, "linear", mutant))
    assert out - {"dbias"} == {"dw"}  # rounding to bf16 may hide it in the 131 numbers of dbias


def test_another_schedule_shows(monkeypatch):
    """The mutant adds to dQ in another order; nothing else may change."""
    attention = ck.block_sparse_attention

    def mutant(*tensors, schedule, **options):
        return attention(*tensors, schedule="left_to_right", **options)

    case = small()[2]
    assert case.schedule == "spt"
    patch = lambda: monkeypatch.setattr(ck, "block_sparse_attention", mutant)  # noqa: E731
    assert changed(case, patch) == {"dq"}


def test_a_single_bit_shows():
    x = torch.zeros(3, 5)
    digest = run.digest(x)
    assert run.digest(x.mT.contiguous().mT) == digest  # the bytes, whatever the strides
    x[1, 2] = -0.0
    assert run.digest(x) != digest
    known = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert run.digest(x[:0]) == known  # SHA-256 of nothing
    assert run.combined({"a": "1", "b": "2"}) == run.combined({"b": "2", "a": "1"})
    assert run.combined({"a": "1", "b": "2"}) != run.combined({"a": "2", "b": "1"})


# ---- the comparison -----------------------------------------------------------------------------


def kept(tmp_path, *bodies: dict) -> str:
    for body in bodies:
        record.append(tmp_path / "digests.jsonl", made("digest", command="perf digest") | body)
    return str(tmp_path)


def check(folder: str, *more: str):
    return command("--device", "cpu", "--only", "m15", "--check", "--results", folder, *more)


def test_check_says_by_its_exit_code_what_it_found(tmp_path):
    body = taken(small()[1])
    same = check(kept(tmp_path / "same", body))
    assert same.exit_code == 0, same.output
    assert same.output.endswith("1 equal, 0 differs, 0 no record\n")
    wrong = body | {"digest": "0" * 64, "results": body["results"] | {"dw": "0" * 64}}
    for bodies in ([wrong], [body, wrong], [wrong, body]):
        other = check(kept(tmp_path / str(len(list(tmp_path.iterdir()))), *bodies))
        assert other.exit_code == 1, other.output
        assert "differs in dw from NVIDIA H200, 0123456789, 2026-11-21" in other.output


@pytest.mark.parametrize("field", ["case", "contract_id", "inputs"])
def test_only_equal_ids_inputs_and_cases_are_compared(field, tmp_path):
    body = taken(small()[1])
    cli_result = check(kept(tmp_path, body | {field: "other", "digest": "0" * 64}))
    assert cli_result.exit_code == 2
    assert cli_result.output.endswith("0 equal, 0 differs, 1 no record: nothing to compare\n")
