"""``ck.contract`` and ``ck.compare_contracts``: what two processes compare before a step."""

from __future__ import annotations

import dataclasses
import json
import os
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import contracts
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ContractError
from cute_kernels.gemm import config
from cute_kernels.integrations import contract_exchange as exchange
from cute_kernels.integrations.publish import Manifest
from cute_kernels.runtime import dispatch, process_contract
from tests.integrations.vllm.stand_in import Worker

ROOT = os.path.dirname(os.path.dirname(__file__))


class Mlp(torch.nn.Module):
    """Layers of torch that ``ck.patch`` replaces."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(64, 64), torch.nn.RMSNorm(64, eps=1e-5)
        self.act, self.table = torch.nn.SiLU(), torch.nn.Embedding(32, 64)

    def forward(self, ids):
        return self.act(self.up(self.norm(self.table(ids))))


def manifest(version: int, digest: str = "ab") -> Manifest:
    files = {"model.safetensors": {"size": 8, "sha256": digest}}
    return Manifest("safetensors", version, 0, 1, 0, 1, {}, files, {}, {})


def differing(ours, theirs) -> list[str]:
    """Names of the entries that an error lists."""
    with pytest.raises(ContractError) as error:
        ck.compare_contracts(ours, theirs)
    names = [d.name for d in ours.differences(theirs)]
    assert all(f"  {d}" in str(error.value).splitlines() for d in ours.differences(theirs)[:12])
    return names


# ---- what is in it ------------------------------------------------------------------------------


def test_every_op_of_the_registry_is_in_it(monkeypatch):
    before = ck.contract("cpu")
    assert set(before.ops) == set(contracts.ops()) >= {"linear", "mhc", "row_parallel_linear"}
    assert before.ops["linear"] == ck.contract_id("linear", "cpu")

    monkeypatch.setattr(contracts, "_CONTRACTS", dict(contracts._CONTRACTS))
    linear = contracts._CONTRACTS["linear"]
    contracts.register(dataclasses.replace(linear, op="another_op"))
    after = ck.contract("cpu")
    assert set(after.ops) - set(before.ops) == {"another_op"}
    assert differing(before, after) == ["op another_op"]
    assert "not stated here, another_op/cpu/" in str(before.differences(after)[0])


def test_a_changed_constant_of_a_plan_is_named(monkeypatch):
    before = ck.contract("cpu", ["linear", "silu"])
    monkeypatch.setattr(config, "CPU", dataclasses.replace(config.CPU, columns=128))
    after = ck.contract("cpu", ["silu", "linear"])
    assert differing(before, after) == ["op linear"]
    line = str(before.differences(after)[0])
    assert before.ops["linear"] in line and after.ops["linear"] in line
    ck.compare_contracts(after, ck.contract("cpu", {"linear", "silu"}))


def test_ops_that_ran_on_another_device_are_not_of_this_one(monkeypatch):
    runs = [
        dispatch.Run(op, "gemm", "triton", device, "bfloat16", "", "")
        for op, device in (("linear", "cuda:0"), ("matmul", "cuda:1"))
    ]
    monkeypatch.setattr(dispatch, "ran", lambda: runs)
    monkeypatch.setattr(contracts, "contract_id", lambda op, device, dtype: f"{op} {device}")
    first, second = {"linear": "linear cuda:0"}, {"matmul": "matmul cuda:1"}
    assert process_contract.ids_that_ran("cuda:0") == first
    assert process_contract.ids_that_ran("cuda:1") == second
    assert process_contract.ids_that_ran("cuda") == first | second
    assert process_contract.ids_that_ran("cpu") == {}


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(ck.Contract) if f.name != "engine"]
)
def test_every_field_is_in_the_id_and_is_compared(name):
    ours = ck.contract("cpu", ["linear"])
    value = getattr(ours, name)
    value = value | {"another": "entry"} if isinstance(value, dict) else "another"
    theirs = dataclasses.replace(ours, **{name: value})
    assert ours.id != theirs.id
    (difference,) = ours.differences(theirs)
    assert name in difference.name or "another" in difference.name


def test_threads_explain_other_ids_of_a_cpu():
    threads = torch.get_num_threads()
    before = ck.contract("cpu", ["linear"])
    try:
        torch.set_num_threads(threads + 1)
        names = differing(before, ck.contract("cpu", ["linear"]))
    finally:
        torch.set_num_threads(threads)
    assert names == ["toolchain cpu threads", "op linear"]


def test_the_formulas_of_a_model():
    model = Mlp().bfloat16()
    plain = ck.contract(model=model)
    assert plain.formulas["rms_norm"] == "RMSNorm of torch" and not plain.orders
    ck.patch(model, strict=True)
    patched = ck.contract(model=model)
    assert patched.formulas == {
        "activation": "ck.silu",
        "embedding": "ck.embedding",
        "linear": "ck.linear",
        "rms_norm": "ck.rms_norm, eps 1e-05, offset 0.0",
        "Mlp": "Mlp of tests",
    }
    assert patched.orders == {"linear": "chain"} and patched.dtype == "bfloat16"
    assert {n.partition(" of ")[2] for n in differing(plain, patched) if " of " in n} == {
        "activation", "embedding", "linear", "rms_norm"
    }  # fmt: skip

    ck.patch(model, order="tree", logits="linear")
    assert differing(patched, ck.contract(model=model)) == ["logits_dtype", "order of linear"]
    model.norm.eps = 1e-6
    assert "formula of rms_norm" in differing(patched, ck.contract(model=model))
    # One layer of several that is not replaced is seen.
    ck.patch(model)
    model.norm.eps = 1e-5
    twice = torch.nn.Sequential(model, torch.nn.Linear(64, 64).bfloat16())
    assert ck.contract(model=twice).formulas["linear"] == (
        "Linear of torch in layer 1 and ck.linear in layer 0"
    )


def test_weights_are_compared_by_version_and_bytes():
    ours = ck.contract("cpu", ["linear"], weights=manifest(3))
    ck.compare_contracts(ours, ck.contract("cpu", ["linear"], weights=manifest(3)))
    for theirs in (manifest(2), manifest(3, "cd"), 3, None):
        assert differing(ours, ck.contract("cpu", ["linear"], weights=theirs)) == ["weights"]


BAD = {
    "no op": (lambda: ck.contract("cpu", []), ArgumentValueError, "ops: expected at least one"),
    "unknown op": (lambda: ck.contract("cpu", ["liner"]), ArgumentValueError, "ops: .*'liner'"),
    "one op": (lambda: ck.contract("cpu", "linear"), ArgumentTypeError, "ops: .*'linear'"),
    "device": (lambda: ck.contract("nowhere"), ArgumentValueError, "device: .*'nowhere'"),
    "dtype": (lambda: ck.contract("cpu", dtype="bf16"), ArgumentTypeError, "dtype: .*'bf16'"),
    "model": (lambda: ck.contract(model=dict), ArgumentTypeError, "model: .*type"),
    "version": (lambda: ck.contract("cpu", weights=-1), ArgumentValueError, "weights: .*-1"),
    "weights": (lambda: ck.contract("cpu", weights="v3"), ArgumentTypeError, "weights: .*str"),
    "side": (lambda: ck.compare_contracts([], {}), ArgumentTypeError, "ours: .*list"),
    "format": (lambda: ck.compare_contracts({}, {}), ContractError, "ours: .*format None"),
}


@pytest.mark.parametrize(("call", "error", "words"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- a file -------------------------------------------------------------------------------------


def test_a_file_and_a_dict_are_the_contract(tmp_path):
    ours = ck.contract("cpu", weights=manifest(1))
    path = ours.save(tmp_path / "engine.json")
    read = ck.Contract.load(path)
    assert read == ours and read.id == ours.id
    travelled = json.loads(json.dumps(ours.to_dict()))
    ck.compare_contracts(travelled, read)
    assert os.listdir(tmp_path) == ["engine.json"]


CHANGED = {
    "no field 'ops'": lambda v: v.pop("ops"),
    "format 1, this reads 2": lambda v: v.update(format=1),
    "the unknown field 'extra'": lambda v: v.update(extra="1"),
    "texts by name": lambda v: v.update(ops=["linear"]),
    "'arch'.*a text": lambda v: v.update(arch=None),
}
FILES = {
    r"engine\.json: expected a JSON file": lambda text: text[:-20],
    r"engine\.json: changed after it was written": lambda t: t.replace("linear/cpu", "linear/gpu"),
    "a JSON object": lambda text: "[]",
}


@pytest.mark.parametrize("words", [*CHANGED, *FILES])
def test_a_file_that_was_cut_or_changed_is_refused(tmp_path, words):
    path = ck.contract("cpu", ["linear"]).save(tmp_path / "engine.json")
    text = path.read_text()
    values = json.loads(text)
    if words in CHANGED:
        CHANGED[words](values)
    path.write_text(json.dumps(values) if words in CHANGED else FILES[words](text))
    with pytest.raises(ContractError, match=words):
        ck.Contract.load(path)
    with pytest.raises(FileNotFoundError):
        ck.Contract.load(tmp_path / "nothing.json")


def test_a_killed_writer_leaves_a_whole_file(tmp_path, monkeypatch):
    """One that dies before the new name is given, and one that dies while it writes."""
    path = ck.contract("cpu", ["linear"], weights=1).save(tmp_path / "engine.json")

    class Killed(BaseException):
        pass

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, name, mock.Mock(side_effect=Killed))
            ck.contract("cpu", ["linear"], weights=2).save(path)
        assert ck.Contract.load(path).weights == "version 1"


# ---- an engine's workers ------------------------------------------------------------------------


def engine_model() -> torch.nn.Module:
    """Modules of an engine that name their parts, as a plug-in writes them."""
    model = Mlp().bfloat16()
    model.up.cute_kernels_part = exchange.linear_part()
    model.norm.cute_kernels_part = exchange.norm_part("rms_norm", 1e-5)
    model.act.cute_kernels_part = exchange.activation_part("silu")
    model.table.cute_kernels_part = (exchange.embedding_part(),)
    return model


@pytest.mark.parametrize("method", ["cute_kernels_contract", exchange.worker_contract])
def test_an_engine_publishes_its_contract(method):
    trainer = Mlp().bfloat16()
    ck.patch(trainer, strict=True)
    ours = ck.contract(model=trainer)
    workers = [Worker(engine_model()) for _ in range(2)]
    exchange.require_engine(ours, [w.rpc(method) for w in workers])

    gated = exchange.activation_part("silu_mul")
    workers[1].model_runner.model.act.cute_kernels_part = gated
    with pytest.raises(ContractError, match="worker 1: ") as error:
        exchange.require_engine(ours, [w.rpc(method) for w in workers])
    assert "  formula of activation: ck.silu here, ck.silu_mul there" in str(error.value)

    del workers[1].model_runner.model.norm.cute_kernels_part  # the engine's own norm
    with pytest.raises(
        ContractError, match=r"formula of rms_norm: .* here, RMSNorm of torch there"
    ):
        exchange.require_engine(ours, [w.rpc(method) for w in workers])


def test_engines_that_say_nothing_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"worker: .*got object"):
        exchange.worker_contract(object())
    with pytest.raises(ArgumentValueError, match=r"workers: .*none"):
        exchange.require_engine(ck.contract("cpu", ["linear"]), [])
    with pytest.raises(ArgumentTypeError, match=r"model: .*parameters"):
        exchange.engine_contract(torch.nn.Identity())


def test_many_differences_are_counted():
    differences = [process_contract.Difference(f"op {i}", "a", None) for i in range(15)]
    lines = process_contract.report(differences).splitlines()
    assert len(lines) == 14 and lines[1] == "  op 0: a here, not stated there"
    assert lines[-1] == "  and 3 more"
