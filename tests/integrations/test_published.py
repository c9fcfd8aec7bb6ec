"""Published weights at the engine: the version that is asked for, whole; stale ones are refused."""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ContractError,
    ManifestError,
    PatchError,
    ShapeError,
)
from cute_kernels.integrations import contract_exchange, published
from cute_kernels.integrations.publish import WEIGHTS, publish_weights
from cute_kernels.integrations.published import load_published, require_version, version_in_use
from tests.contract import same_bytes
from tests.integrations.vllm.stand_in import Worker


def layer(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(16, 8).bfloat16()


def holds(model: torch.nn.Module, source: torch.nn.Module) -> bool:
    return all(
        same_bytes(a, b)
        for a, b in zip(model.state_dict().values(), source.state_dict().values(), strict=True)
    )


@pytest.fixture
def engine(tmp_path) -> torch.nn.Linear:
    """A model that holds version 1 of ``layer(1)``."""
    publish_weights(tmp_path, layer(1), version=1)
    model = layer(2)
    load_published(tmp_path, 1, model=model)
    return model


def test_a_model_holds_what_was_asked_for(tmp_path):
    trainer, engine = layer(1), layer(2)
    assert version_in_use(engine) is None
    published_as = publish_weights(tmp_path, trainer, version=4)
    place = engine.weight.data_ptr()
    read = load_published(tmp_path, 4, model=engine)
    assert holds(engine, trainer) and engine.weight.data_ptr() == place
    assert version_in_use(engine) == 4 and read.manifest == published_as
    require_version(engine, 4)
    newer = layer(3)
    publish_weights(tmp_path, newer)
    load_published(tmp_path, model=engine)
    assert holds(engine, newer) and version_in_use(engine) == 5


def test_a_stale_version_is_refused_by_name(tmp_path, engine):
    trainer, newer = layer(1), layer(3)
    publish_weights(tmp_path, newer, version=2)
    with pytest.raises(ManifestError, match="version 1 is stale: 2 is published"):
        load_published(tmp_path, 1, model=engine)
    with pytest.raises(ManifestError, match="stale: expected version 2, got version 1"):
        require_version(engine, 2)
    with pytest.raises(ManifestError, match="version 3 is not there; there are: 1, 2"):
        load_published(tmp_path, 3, model=engine)
    assert holds(engine, trainer) and version_in_use(engine) == 1
    load_published(tmp_path, 2, model=engine)
    elsewhere = tmp_path / "elsewhere"
    publish_weights(elsewhere, trainer, version=1)
    with pytest.raises(ManifestError, match="version 1 is stale: 2 is in use"):
        load_published(elsewhere, 1, model=engine)
    assert holds(engine, newer)
    load_published(tmp_path, 1, model=engine, allow_older=True)
    assert holds(engine, trainer) and version_in_use(engine) == 1


def test_an_update_that_fails_leaves_no_version(tmp_path, engine):
    publish_weights(tmp_path, torch.nn.Linear(16, 9).bfloat16(), version=2)
    with pytest.raises(ShapeError, match=r"weight: expected \[\d+, 16\], got \[9, 16\]"):
        load_published(tmp_path, 2, model=engine)
    assert version_in_use(engine) == 1  # it is unchanged
    with pytest.raises(ZeroDivisionError):  # in the middle
        load_published(tmp_path, 2, model=engine, update=lambda tensors: 1 / 0)
    assert version_in_use(engine) is None
    with pytest.raises(ManifestError, match="expected version 2, got none that was published"):
        require_version(engine, 2)


def _exchange_rows(model: torch.nn.Module) -> None:
    model.weight.data.copy_(model.weight.data.flip(0))


WRITES = {
    "in place, past the version counter": lambda model: model.weight.data[3, 7].add_(0.5),
    "rows exchanged": _exchange_rows,
    "the sign of a zero": lambda model: model.bias.data[2].neg_(),
    "load_state_dict": lambda model: model.load_state_dict(layer(3).state_dict()),
    "another parameter": lambda model: setattr(model, "weight", layer(3).weight),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_written_past_the_publisher_are_of_no_version(tmp_path, write):
    trainer, engine = layer(1), layer(2)
    with torch.no_grad():
        trainer.bias[2] = 0.0
    manifest = publish_weights(tmp_path, trainer, version=2)
    load_published(tmp_path, 2, model=engine)
    ours = ck.contract(model=trainer, weights=manifest)
    ck.compare_contracts(ours, ck.contract(model=engine, weights=published.manifest_in_use(engine)))
    state = {name: t.clone() for name, t in engine.state_dict().items()}
    write(engine)
    theirs = contract_exchange.worker_contract(Worker(engine))
    assert theirs["weights"] is None
    with pytest.raises(ContractError, match=r"weights: version 2, sha256 .*, not stated there"):
        ck.compare_contracts(ours, theirs)
    assert version_in_use(engine) is None
    with pytest.raises(ManifestError, match="expected version 2, got none that was published"):
        require_version(engine, 2)
    engine.load_state_dict(state)  # the statement does not come back without a load
    assert version_in_use(engine) is None
    load_published(tmp_path, 2, model=engine)
    require_version(engine, 2)


def test_digests_follow_the_order_of_their_chunks(monkeypatch):
    monkeypatch.setattr(published, "_CHUNK", 16)  # a row of the weight
    engine = layer(2)
    before = published.tensors_digest(engine)
    _exchange_rows(engine)
    assert published.tensors_digest(engine) != before


def test_weights_that_sleep_are_not_read(engine, monkeypatch):
    asleep = [SimpleNamespace(tag="kv_cache", is_asleep=True)]
    allocator = SimpleNamespace(pointer_to_data=dict(enumerate(asleep)))
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    assert version_in_use(engine) == 1
    allocator.pointer_to_data[1] = SimpleNamespace(tag="weights", is_asleep=True)
    monkeypatch.setattr(published, "tensors_digest", None)
    assert version_in_use(engine) is None
    monkeypatch.undo()
    assert version_in_use(engine) == 1


def test_damage_and_folders_for_engines_that_read_them(tmp_path, engine):
    folder = published.verified_folder(tmp_path, 1)
    assert sorted(os.listdir(folder)) == ["manifest.json", WEIGHTS]
    publish_weights(tmp_path, layer(5), version=2)
    file = tmp_path / "v00000002" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for read in (functools.partial(load_published, model=engine), published.verified_folder):
        with pytest.raises(ManifestError, match="other bytes than were published"):
            read(tmp_path, 2)
        with pytest.raises(ManifestError, match="version 1 is stale"):
            read(tmp_path, 1)
    assert holds(engine, layer(1)) and version_in_use(engine) == 1
    assert published.verified_folder(tmp_path, 1, allow_older=True) == folder


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"expected_version": "3"}, ArgumentTypeError, "expected_version: .*str"),
        ({"expected_version": -1}, ArgumentValueError, "expected_version: .*-1"),
        ({"model": "m"}, ArgumentTypeError, "model: .*str"),
        ({"update": 3}, ArgumentTypeError, "update: .*int"),
    ],
)
def test_bad_arguments(tmp_path, options, error, words):
    publish_weights(tmp_path, layer(1), version=1)
    with pytest.raises(error, match=words):
        load_published(tmp_path, **options)


# ---- an engine's worker -------------------------------------------------------------------------


def test_a_worker_loads_by_rpc_and_states_it_in_its_contract(tmp_path):
    trainer = layer(1)
    manifest = publish_weights(tmp_path, trainer, version=7)
    worker = Worker(layer(2))
    model = worker.model_runner.model
    model.cute_kernels_part = contract_exchange.linear_part()
    answer = worker.rpc("cute_kernels_load_published", str(tmp_path), "7")
    assert answer == {"version": 7, **manifest.files[WEIGHTS]} and holds(model, trainer)
    assert worker.cute_kernels_require_version("7") == 7

    ck.patch(trainer)
    ours = ck.contract(model=trainer, weights=manifest, logits_dtype=torch.float32)
    contract_exchange.require_engine(ours, [worker.cute_kernels_contract()])
    newer = publish_weights(tmp_path, layer(3), version=8)
    ours = ck.contract(model=trainer, weights=newer, logits_dtype=torch.float32)
    with pytest.raises(ContractError, match=r"worker 0: .*\n  weights: version 8, .*version 7"):
        contract_exchange.require_engine(ours, [worker.cute_kernels_contract()])
    with pytest.raises(ManifestError, match="version 7 is stale"):
        worker.cute_kernels_load_published(str(tmp_path), "7")


def test_parameters_that_no_tensor_filled_leave_no_version(tmp_path, engine):
    """The check that the plug-in gives a model runs after a load, and its error is the load's."""
    worker, model = Worker(engine), engine

    def check_filled():
        assert holds(model, layer(1))
        raise PatchError("model: expected a tensor for each parameter")

    model.cute_kernels_check_filled = check_filled
    with pytest.raises(PatchError, match="for each parameter"):
        worker.cute_kernels_load_published(str(tmp_path), 1)
    assert version_in_use(model) is None
