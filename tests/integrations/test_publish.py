"""Published weights: the bytes come back, damage is refused by name, a kill leaves no half."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ManifestError, ShapeError
from cute_kernels.integrations import publish
from cute_kernels.integrations.publish import Layout, publish_weights, read_weights, versions
from tests import ranks
from tests.contract import same_bytes


def some(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(100, generator=generator)
    special = torch.tensor([-0.0, float("nan"), float("inf"), 5e-324])
    return {
        "embed": torch.randn(7, 3, generator=generator).bfloat16(),
        "special": special.double(),
        "of a buffer": buffer[10:40].view(5, 6),
        "columns": buffer[40:70].view(5, 6).mT,
        "count": torch.tensor(3),
        "none": torch.empty(0, 4),
    }


# ---- what comes back ----------------------------------------------------------------------------


def test_the_bytes_come_back(tmp_path):
    given = some()
    given["head"] = given["embed"]
    ids = {"linear": ck.contract_id("linear", "cpu")}
    metadata = {"step": 20, "run": {"name": "a"}}
    layout = Layout(zero_stage=3, world_size=2, rank=0)
    written = publish_weights(tmp_path / "out", given, metadata, contract_ids=ids, layout=layout)
    tensors, manifest = read_weights(tmp_path / "out", contract_ids=ids)
    assert tensors.keys() == given.keys()
    assert all(same_bytes(tensors[name], t) for name, t in given.items())
    assert tensors["head"] is tensors["embed"]
    assert manifest == written
    assert (manifest.kind, manifest.version, manifest.tensor_count) == ("safetensors", 0, 7)
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (3, 2, 0)
    assert (manifest.contract_ids, manifest.metadata) == (ids, metadata)
    assert manifest.tied == {"head": "embed"}


def test_views_of_one_storage_are_not_tied(tmp_path):
    """They begin at one address, and hold other elements."""
    w = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    others = {"transpose": w.T, "corner": w[:5, :5], "shape": w.view(3, 12)}
    others |= {"dtype": w.view(torch.int32), "stride": w.flatten()[::2][:6]}
    given = {"weight": w, "same": w[:]} | others
    publish_weights(tmp_path, given)
    tensors, manifest = read_weights(tmp_path)
    assert manifest.tied == {"same": "weight"}
    assert all(same_bytes(tensors[name], t) for name, t in given.items())


def test_a_module(tmp_path):
    """A process of its own is rank 0 of 1 without ZeRO; transformers can load the file."""
    module = torch.nn.Linear(3, 2)
    manifest = publish_weights(tmp_path, module)
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (0, 1, 0)
    tensors = read_weights(tmp_path).tensors
    assert all(same_bytes(tensors[name], t) for name, t in module.state_dict().items())
    with safetensors.safe_open(tmp_path / "v00000000" / publish.WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_resolved_fields_win_over_the_callers(tmp_path):
    claims = {"zero_stage": 0, "world_size": 8, "rank": 5, "version": 99, "kind": "x", "step": 1}
    claims |= {"tensor_count": 1, "contract_ids": {}, "files": {}, "sha256": "0", "format": 9}
    claims |= {"tensors": {}, "tied": {}, "metadata": {"mine": 1}}
    written = publish_weights(tmp_path, some(), claims, version=4, layout=Layout(3, 2, 0))
    manifest = read_weights(tmp_path).manifest
    assert manifest == written
    assert (manifest.zero_stage, manifest.world_size, manifest.rank) == (3, 2, 0)
    assert (manifest.version, manifest.kind, manifest.tensor_count) == (4, "safetensors", 6)
    assert manifest.metadata == {"step": 1}
    body = json.loads((tmp_path / "v00000004" / publish.MANIFEST).read_text())
    assert (body["zero_stage"], body["version"], body["step"]) == (3, 4, 1)


# ---- versions -----------------------------------------------------------------------------------


def test_versions_only_rise(tmp_path):
    publish_weights(tmp_path, some(), version=5)
    for number in (5, 4, 0):
        with pytest.raises(ManifestError, match=f"version {number} does not rise above 5"):
            publish_weights(tmp_path, some(1), version=number)
    assert versions(tmp_path) == [5]
    assert same_bytes(read_weights(tmp_path).tensors["embed"], some()["embed"])
    assert publish_weights(tmp_path, some(1)).version == 6
    assert publish_weights(tmp_path, some(2), version=90).version == 90
    assert same_bytes(read_weights(tmp_path).tensors["embed"], some(2)["embed"])


def test_old_versions_are_removed_and_old_ones_can_be_read(tmp_path):
    for number in range(4):
        publish_weights(tmp_path, some(number), keep=2)
    assert versions(tmp_path) == [2, 3]
    assert same_bytes(read_weights(tmp_path, version=2).tensors["embed"], some(2)["embed"])
    publish_weights(tmp_path, some(4), keep=0)
    assert versions(tmp_path) == [2, 3, 4]
    assert publish_weights(tmp_path, some(), keep=1).version == 5
    assert versions(tmp_path) == [5]


def test_two_writers_and_a_reader_at_once(tmp_path):
    """Each version is whole, no number is given twice, and none is seen to fall."""
    publish_weights(tmp_path, {"w": torch.zeros(1000)})
    done = threading.Event()

    def write(value: float) -> list[int]:
        w = torch.full((1000,), value)
        return [publish_weights(tmp_path, {"w": w}).version for _ in range(10)]

    def read() -> list[int]:
        seen = []
        while not done.is_set():
            tensors, manifest = read_weights(tmp_path)
            assert len(set(tensors["w"].tolist())) == 1
            seen.append(manifest.version)
        return seen

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(read)
        try:
            numbers = [n for written in threads.map(write, (1.0, 2.0)) for n in written]
        finally:
            done.set()
    seen = reader.result()
    assert sorted(numbers) == list(range(1, 21))
    assert seen == sorted(seen) and seen


# ---- damage -------------------------------------------------------------------------------------


def rewritten(path, **changes) -> None:
    """A manifest that is whole, and says something else."""
    manifest = publish.Manifest.parse(path.read_text())
    path.write_text(publish.Manifest(**{**vars(manifest), **changes}).text())


def named_bytes(weights, manifest, content: bytes) -> None:
    """Another file, which the manifest names with its size and digest."""
    weights.write_bytes(content)
    rewritten(manifest, files={publish.WEIGHTS: publish._facts(weights)})


def republished(weights, manifest, **changed) -> None:
    """Another file, whole, which the manifest names."""
    from safetensors.torch import save

    tensors = {name: t for name, t in (A | changed).items() if t is not None}
    named_bytes(weights, manifest, save(tensors, metadata={"format": "pt"}))


def lacking(path, name: str) -> None:
    body = json.loads(path.read_text())
    del body[name], body["sha256"]
    path.write_text(json.dumps(body | {"sha256": publish._digest(body)}))


def renumbered(manifest, older) -> None:
    shutil.copy(older, manifest)
    rewritten(manifest, version=1)


NO_FILE = {"../x": {"size": 1, "sha256": ""}}
A = {"a": torch.arange(4.0), "b": torch.ones(2)}
#: (change of the weights, the manifest, the manifest of the version before; error message).
DAMAGES = [
    (lambda w, m, o: os.truncate(w, 100), r"safetensors is cut short: 100 bytes of \d+"),
    (lambda w, m, o: w.write_bytes(w.read_bytes() + b"x"), "is too long"),
    (lambda w, m, o: w.unlink(), "safetensors is missing"),
    (lambda w, m, o: m.unlink(), "manifest.json is missing"),
    (lambda w, m, o: os.truncate(m, 200), "manifest.json is cut short or no JSON"),
    (lambda w, m, o: m.write_text("[1]"), "holds no JSON object"),
    (lambda w, m, o: m.write_text(m.read_text().replace('"rank": 0', '"rank": 1')), "was changed"),
    (lambda w, m, o: m.write_text('{"version": 1}'), "lacks the field 'sha256'"),
    (lambda w, m, o: lacking(m, "tied"), "lacks the field 'tied'"),
    (lambda w, m, o: shutil.copy(o, m), "is stale: it is that of version 0"),
    (lambda w, m, o: renumbered(m, o), "has other bytes than were published"),
    (lambda w, m, o: rewritten(m, files=NO_FILE), r"the manifest says safetensors: \.\./x"),
    (lambda w, m, o: rewritten(m, kind="pickle"), "says pickle"),
    (lambda w, m, o: republished(w, m, b=None), "tensor b is listed and missing"),
    (lambda w, m, o: republished(w, m, c=torch.ones(1)), "tensor c is there and not listed"),
    (lambda w, m, o: republished(w, m, b=torch.ones(2, 1)), "tensor b is .*2, 1.*listed as"),
    (lambda w, m, o: republished(w, m, b=A["b"].half()), "b is .*float16.*listed as .*float32"),
    (lambda w, m, o: rewritten(m, tied={"c": "d"}), "tensor c is tied to one that is missing"),
    (lambda w, m, o: rewritten(m, tensor_count=3), "3 tensors are listed, 2 are there"),
    (lambda w, m, o: named_bytes(w, m, b"\xff" * 64), "is no safetensors file"),
]


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_damage_is_refused_by_name(tmp_path, harm, said):
    publish_weights(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(2)})
    publish_weights(tmp_path, A)
    weights, manifest = (tmp_path / "v00000001" / n for n in (publish.WEIGHTS, publish.MANIFEST))
    read_weights(tmp_path)
    harm(weights, manifest, tmp_path / "v00000000" / publish.MANIFEST)
    with pytest.raises(ManifestError, match=said):
        read_weights(tmp_path)
    # What was there before can still be read, and the next publication is above both.
    assert read_weights(tmp_path, version=0).manifest.version == 0
    assert publish_weights(tmp_path, A).version == 2
    assert same_bytes(read_weights(tmp_path).tensors["a"], A["a"])


def test_every_byte_of_both_files_is_covered(tmp_path):
    publish_weights(tmp_path, {"a": torch.ones(2)})
    for path in sorted((tmp_path / "v00000000").iterdir()):
        content = path.read_bytes()
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(ManifestError):
                read_weights(tmp_path)
        path.write_bytes(content)
    read_weights(tmp_path)


def test_wrong_versions_and_contracts(tmp_path):
    with pytest.raises(ManifestError, match="no weights are published"):
        read_weights(tmp_path / "nowhere")
    publish_weights(tmp_path, A, version=3, contract_ids={"linear": "linear/cpu/x/1"})
    for options, said in (
        ({"version": 2}, "version 2 is not there; there are: 3"),
        ({"contract_ids": {"linear": "y"}}, "linear has the contract y here and linear/cpu/x/1"),
        ({"contract_ids": {"moe": "y"}}, "moe has the contract y here and None"),
    ):
        with pytest.raises(ManifestError, match=said):
            read_weights(tmp_path, **options)
    read_weights(tmp_path, contract_ids={"linear": "linear/cpu/x/1"})


# ---- the door -----------------------------------------------------------------------------------


class Partition(torch.nn.Parameter):
    """A parameter outside of a gather of ZeRO-3."""

    ds_numel = 12


@pytest.mark.parametrize(
    ("tensors", "options", "error", "said"),
    [
        ([torch.ones(1)], {}, ArgumentTypeError, "tensors: expected a mapping"),
        ({"a": 1.0}, {}, ArgumentTypeError, "'a': float"),
        ({1: torch.ones(1)}, {}, ArgumentTypeError, "1: Tensor"),
        ({"a": Partition(torch.empty(0))}, {}, ShapeError, "partition of ZeRO-3"),
        ({"a": torch.ones(1, device="meta")}, {}, ArgumentTypeError, "with memory"),
        ({"a": torch.ones(1).to_sparse()}, {}, ArgumentTypeError, "dense tensor"),
        (A, {"metadata": [1]}, ArgumentTypeError, "metadata: expected a mapping"),
        (A, {"metadata": {1: 2}}, ArgumentTypeError, "strings as keys"),
        (A, {"metadata": {"a": torch.ones(1)}}, ArgumentTypeError, "what JSON can say"),
        (A, {"metadata": {"a": float("nan")}}, ArgumentTypeError, "what JSON can say"),
        (A, {"version": -1}, ArgumentValueError, "version: expected"),
        (A, {"version": "2"}, ArgumentValueError, "version: expected an integer .*, got '2'"),
        (A, {"version": True}, ArgumentValueError, "version: expected an integer .*, got True"),
        (A, {"keep": -1}, ArgumentValueError, "keep: expected"),
    ],
)
def test_bad_arguments_leave_nothing(tmp_path, tensors, options, error, said):
    with pytest.raises(error, match=said):
        publish_weights(tmp_path / "out", tensors, **options)
    assert not (tmp_path / "out").exists()


# ---- kills --------------------------------------------------------------------------------------


#: Calls of a writer that Python audits (PEP 578), and calls that it does not.
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree"}
UNTOLD = ("fsync", "close")


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), float(version)), "b": torch.full((64,), float(version))}


def killed_at(step: int, folder) -> bool:
    """Publish version 2 in a fork that kills itself before its step-th doing; whether it did."""
    child = os.fork()
    if child == 0:
        doings = itertools.count(1)

        def tick(*args) -> None:
            if next(doings) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        for name in UNTOLD:
            true = getattr(os, name)
            setattr(publish.os, name, lambda *args, true=true: (tick(), true(*args))[1])
        sys.addaudithook(lambda event, args: tick() if event in EVENTS else None)
        publish_weights(folder, tensors(2), version=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kill_at_every_step(folder) -> None:
    """A reader finds the old version or the new; the next writer leaves its own and the lock."""
    versions_read = []
    for step in itertools.count(1):
        mine = folder / str(step)
        publish_weights(mine, tensors(1), version=1)
        killed = killed_at(step, mine)
        read = read_weights(mine)
        number = read.manifest.version
        want = tensors(number)
        assert read.tensors.keys() == want.keys()
        assert all(torch.equal(read.tensors[name], t) for name, t in want.items())
        publish_weights(mine, tensors(3), version=3, keep=1)
        assert sorted(os.listdir(mine)) == [".lock", "v00000003"]
        versions_read.append(number)
        if not killed:
            break
    assert len(versions_read) > 11 and versions_read == sorted(versions_read)
    assert set(versions_read) == {1, 2} and versions_read[-1] == 2


def kill_inside_a_write(folder) -> None:
    """The file of tensors is written by safetensors, outside of Python: killed at half its size."""
    publish_weights(folder, A)
    child = os.fork()
    if child == 0:
        publish_weights(folder, {"w": torch.ones(1 << 24)})
        os._exit(0)
    ended, part = 0, None
    while not ended and not part:
        ended, _ = os.waitpid(child, os.WNOHANG)
        part = next((p for p in folder.glob(f".writing-*/*{publish.WEIGHTS}*")), None)
    assert part is not None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert versions(folder) == [0]
    assert same_bytes(read_weights(folder).tensors["a"], A["a"])
    assert publish_weights(folder, A).version == 1
    assert not list(folder.glob(".writing-*"))


one = ranks.pool(1)


@pytest.mark.parametrize("kill", [kill_at_every_step, kill_inside_a_write])
def test_a_kill_leaves_the_old_version_or_the_new(one, tmp_path, kill):
    """A process of its own forks the writer."""
    one.run(kill, tmp_path)
