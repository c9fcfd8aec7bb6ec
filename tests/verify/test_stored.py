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
    both = [Item(f"test_both[{i}]", simulates=pytest.mark.simulates("a", "b").mark) for i in (0, 1)]
    assert certified.left_to_the_night(both, known=lambda name: True) == both[1:]
    assert certified.left_to_the_night(both, known=lambda name: name == "a") == []


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


#: What the digest of a system's launchers holds, among others: SM90's, and Triton's.
LAUNCHERS = {
    "gemm": {"gemm.launch", "gemm.tiles"},
    "linear_attn": {"linear_attn.launch"},
    "logp": {"logp.launch"},
    "mhc": {"mhc.launch"},
    "moe": {"moe.launch"},
    "norm": {"norm.launch"},
    "sparse_attn": {
        "sparse_attn.launch",
        "sparse_attn.paged.launch",
        "sparse_attn.kv_ranges.launch",
    },
    "gemm.triton": {"gemm.triton.kernel", "gemm.config", "schedulers.tiles.leaves"},
    "logp.triton": {"logp.triton.kernel", "runtime.products"},
    "mhc.triton": {"mhc.triton.kernel", "mhc.triton.kernel_tokens", "runtime.triton_sums"},
    "moe.triton": {"moe.triton.kernel_routing", "moe.triton.routing", "runtime.triton_tiles"},
    "norm.triton": {"norm.triton.kernel", "norm.triton.plan"},
    "linear_attn.triton": {"linear_attn.triton.kernel", "runtime.triton_elementary"},
    "rowwise.triton": {"rowwise.triton.kernel", "rowwise.config"},
    "sparse_attn.triton": {"sparse_attn.triton.kernel_paged", "sparse_attn.triton.paged"},
}
#: Systems whose launchers copy no operands by `runtime.operands`.
WITHOUT_OPERANDS = ("linear_attn.triton", "mhc.triton", "sparse_attn.triton")
TRITON = sorted(system for system in LAUNCHERS if system.endswith(".triton"))


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Stores digests of a system's launchers, in an empty store."""
    monkeypatch.setattr(certified, "LAUNCHERS", tmp_path / "launchers.json")
    monkeypatch.setattr(certified, "proved", lambda name: True)
    monkeypatch.setattr("ptxsim.tests.proved.holds", lambda: True)

    def record(system: str) -> None:
        assert not certified.proved_system(system)
        assert certified.record(system, lambda arguments: 0, certified.LAUNCHERS) == 0
        assert certified.proved_system(system)

    return record


@pytest.mark.parametrize("system", LAUNCHERS)
def test_a_changed_launcher_runs_every_simulation(system, recorded, monkeypatch, tmp_path):
    """The digest of a system's launchers holds each of them, and what all launchers share."""
    found = certified.launchers(system)
    launch = {f"{system}.launch", "runtime.operands"} - {"mhc.triton.launch"}
    shared = launch if system not in WITHOUT_OPERANDS else set()
    assert LAUNCHERS[system] | shared <= found
    assert system in TRITON or not any(".triton." in n or "kernel_" in n for n in found)
    recorded(system)
    for name in LAUNCHERS[system] | {f"{system}.launch"}:
        changed = tmp_path / "changed.py"
        changed.write_bytes(import_graph.modules()[name].read_bytes() + b"\npass\n")
        paths = import_graph.modules() | {name: changed}
        with monkeypatch.context() as patch:
            patch.setattr(import_graph, "modules", lambda paths=paths: paths)
            assert not certified.proved_system(system), name


def test_what_runs_triton_kernels_is_in_their_digests(recorded, monkeypatch, tmp_path):
    """The files of the runner, the versions of Triton and numpy; no test and no comment."""
    recorded("norm.triton")
    files = sorted(certified.TESTS.glob("triton_*.py"))
    assert {"triton_runner.py", "triton_harness.py"} <= {path.name for path in files}
    for path in files:
        (tmp_path / path.name).write_text(path.read_text() + "\n# a comment\n")
    (tmp_path / "test_triton_norm.py").write_text("changed = 1\n")
    monkeypatch.setattr(certified, "TESTS", tmp_path)
    assert certified.proved_system("norm.triton")
    for path in files:
        with (tmp_path / path.name).open("a") as file:
            file.write("pass\n")
        assert not certified.proved_system("norm.triton"), path.name
        (tmp_path / path.name).unlink()
        assert not certified.proved_system("norm.triton"), path.name
        (tmp_path / path.name).write_text(path.read_text())
    version = certified._version
    for package in ("triton", "numpy"):
        others = {package: "0"}
        with monkeypatch.context() as patch:
            patch.setattr(certified, "_version", lambda name, o=others: o.get(name, version(name)))
            assert not certified.proved_system("norm.triton"), package
    monkeypatch.setattr("ptxsim.tests.proved.holds", lambda: False)
    assert not certified.proved_system("norm.triton")


MARK = re.compile(r'simulates\("(\w+\.triton)"')


def test_recording_runs_every_test_that_a_digest_leaves_to_the_night():
    """A test elsewhere would be left to the night by a digest that was stored without it."""
    tests = Path(__file__).parents[1]
    marked = {
        (m, path) for path in tests.glob("*/test_*.py") for m in MARK.findall(path.read_text())
    }
    chosen = {(s, Path(name)) for s in TRITON for name in certified.tests_of(s)[:-2]}
    assert marked <= chosen
    assert all(path.stem.endswith("_gpu") for _, path in chosen - marked)


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


def test_systems_without_the_digest_of_their_launchers_are_those_to_record(tmp_path):
    store = tmp_path / "launchers.json"
    assert set(certified.changed_systems(store)) == set(LAUNCHERS)
    certified.record("norm.triton", lambda arguments: 0, store)
    assert set(certified.changed_systems(store)) == LAUNCHERS.keys() - {"norm.triton"}


def test_one_mutant_of_each_test_runs_often():
    mark = pytest.mark.mutants.mark
    items = [Item(f"test_killed[{i}]", mutants=mark) for i in range(10)]
    left = certified.left_to_the_night(items, known=lambda name: False)
    assert left == items[1:]
