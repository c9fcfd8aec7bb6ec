"""The store of certificates: whole, and believed for no longer than its digests hold."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from cute_kernels import about
from tests import certified, import_graph

CATALOGUE = about.catalogue()
ORDERED = [entry.kernel for entry in CATALOGUE if entry.kind is not None]


def test_every_certificate_of_the_catalogue_is_stored_and_no_other():
    def key(name, constexpr):
        return json.dumps([name, constexpr], sort_keys=True)

    kept = [key(item["name"], item["constexpr"]) for item in certified.records()]
    assert sorted(kept) == sorted(key(k.name, dict(k.constexpr)) for k in ORDERED)


def of_this_tree() -> list[dict]:
    """What `make certificates` would store, but for the hashes."""
    return [
        {
            "name": kernel.name,
            "constexpr": dict(kernel.constexpr),
            "ok": True,
            "sources": certified.sources_of(kernel.name),
        }
        for kernel in ORDERED
    ]


@pytest.fixture
def plant(tmp_path):
    """Writes a store and says which kernels' tests run for every commit, if none is a sample."""

    def planted(records) -> set[str]:
        path = tmp_path / "certificates.json"
        path.write_text(json.dumps(records))
        return compiled_often(path)

    return planted


def compiled_often(path) -> set[str]:
    cases = list(certified.cases(CATALOGUE, lambda entry: False, path))
    assert len(cases) == len(CATALOGUE)
    often = {p.values[0].name for p in cases if not p.marks}
    # Of a kernel all of them, or none.
    assert sum(not p.marks for p in cases) == sum(e.kernel.name in often for e in CATALOGUE)
    return often


NAMES = {kernel.name for kernel in ORDERED}


def test_no_store_means_everything_and_a_whole_one_nothing(tmp_path, plant):
    assert plant(of_this_tree()) == set() and not certified.proved_system("no_such_system")
    assert compiled_often(tmp_path / "none.json") == NAMES
    assert plant([]) == NAMES


@pytest.mark.mutants
@pytest.mark.parametrize(
    "change",
    [
        {"sources": "0" * 64},
        {"ok": False},
        pytest.param({"sources": None}, marks=pytest.mark.nightly),
        pytest.param("no digest", marks=pytest.mark.nightly),
        pytest.param("no record", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_stale_store_means_everything_of_that_kernel(plant, change):
    """One record of 30 is enough."""
    records = of_this_tree()
    wrong = next(r for r in records if r["name"] == "sparse_attn_fwd_sm90")
    if change == "no record":
        records = [r for r in records if r["name"] != wrong["name"]]
    elif change == "no digest":
        del wrong["sources"]
    else:
        wrong.update(change)
    assert plant(records) == {wrong["name"]}


class Item:
    """What `left_to_the_night` asks of a test."""

    def __init__(self, nodeid: str, **marks):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name):
        return self.marks.get(name)


def simulations(count: int, system: str, **marks) -> list[Item]:
    """Parameters of one test that simulates a system's kernels."""
    mark = pytest.mark.simulates(system).mark
    return [Item(f"test_values_{system}[{i}]", simulates=mark, **marks) for i in range(count)]


def test_one_simulation_of_each_test_of_a_proved_system_runs_often():
    first, other = simulations(17, "a"), simulations(9, "b")
    plain, nightly = Item("test_shapes[0]"), simulations(4, "a", nightly=pytest.mark.nightly.mark)
    items = [*nightly, *first, plain, *other]
    left = certified.left_to_the_night(items, known=lambda name: True)
    assert [i for i in items if i not in left] == [*nightly, first[0], plain, other[0]]
    assert certified.left_to_the_night(items, known=lambda name: name == "a") == first[1:]


@pytest.mark.parametrize("known", [True, False])
def test_a_module_chooses_what_runs_often_while_its_system_is_proved(known):
    mark = pytest.mark.simulates("a", often="test_b").mark
    names = ["test_a[0]", "test_b[0]", "test_b[1]", "test_c"]
    items = [Item(f"test_file.py::{name}", simulates=mark) for name in names]
    left = certified.left_to_the_night(items, known=lambda name: known)
    assert [i.nodeid for i in items if i not in left] == [
        f"test_file.py::{name}" for name in (["test_b[0]"] if known else names)
    ]


MODULES = [
    path
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))
    if re.search(r"often=[A-Z]|certified\.marks\(.*,", path.read_text())
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_runs_often_is_there(path):
    """A name without a test would leave a whole module to the nightly run."""
    tree = ast.parse(path.read_text())
    assigned = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [k.value for call in calls for k in call.keywords if k.arg == "often"]
    named += [c.args[1] for c in calls if ast.unparse(c.func) == "certified.marks" and c.args[1:]]
    assert named
    for value in named:
        chosen = ast.literal_eval(assigned.get(ast.unparse(value), value)).split()
        assert chosen and set(chosen) <= functions


LAUNCHERS = {
    "gemm": {"gemm.launch", "gemm.tiles"},
    "logp": {"logp.launch"},
    "mhc": {"mhc.launch"},
    "moe": {"moe.launch"},
    "norm": {"norm.launch"},
    "sparse_attn": {
        "sparse_attn.launch",
        "sparse_attn.paged.launch",
        "sparse_attn.kv_ranges.launch",
    },
}


@pytest.mark.parametrize("system", LAUNCHERS)
def test_a_changed_launcher_runs_every_simulation(system, monkeypatch, tmp_path):
    """The digest of a system's launchers holds each of them, and what all launchers share."""
    assert {*LAUNCHERS[system], "runtime.operands"} <= certified.launchers(system)
    assert not any(".triton." in name or "kernel_" in name for name in certified.launchers(system))
    monkeypatch.setattr(certified, "LAUNCHERS", tmp_path / "launchers.json")
    monkeypatch.setattr(certified, "proved", lambda name: True)
    monkeypatch.setattr("ptxsim.tests.proved.holds", lambda: True)
    assert not certified.proved_system(system)
    assert certified.record(system, lambda arguments: 0, certified.LAUNCHERS) == 0
    assert certified.proved_system(system)
    for name in LAUNCHERS[system]:
        changed = tmp_path / "changed.py"
        changed.write_bytes(import_graph.modules()[name].read_bytes() + b"\npass\n")
        paths = import_graph.modules() | {name: changed}
        with monkeypatch.context() as patch:
            patch.setattr(import_graph, "modules", lambda paths=paths: paths)
            assert not certified.proved_system(system), name


def test_a_failed_run_stores_no_digest_and_leaves_the_others(tmp_path):
    store = tmp_path / "launchers.json"
    for system in ("norm", "moe"):
        certified.record(system, lambda arguments: 0, store)
    before = certified.launched(store)

    def fails(arguments):
        assert "norm" not in certified.launched(store)  # so that all of its tests run
        return 1

    assert certified.record("norm", fails, store) == 1
    assert certified.launched(store) == {"moe": before["moe"]}


def test_one_mutant_of_each_test_runs_often():
    mark = pytest.mark.mutants.mark
    items = [Item(f"test_killed[{i}]", mutants=mark) for i in range(10)]
    left = certified.left_to_the_night(items, known=lambda name: False)
    assert left == items[1:]
