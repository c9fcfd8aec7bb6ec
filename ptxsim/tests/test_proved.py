"""When the simulator's own tests run: whenever anything that they depend on changed."""

import shutil

import pytest

from . import proved
from .conftest import pytest_collection_modifyitems


@pytest.fixture
def copy(tmp_path):
    """The simulator and its tests, to change."""
    folder = tmp_path / "ptxsim"
    shutil.copytree(proved.HERE.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return {"folder": folder}


def unseen(copy, digest=proved.digest):
    """The files of which a changed byte does not change the digest."""
    folder, before, wrong = copy["folder"], digest(**copy), []
    for path in [*folder.glob("csrc/*"), *folder.rglob("*.py")]:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b" ")
        if digest(**copy) == before:
            wrong.append(path.name)
        path.write_bytes(content)
    return wrong


def test_a_changed_byte_in_any_file_changes_the_digest(copy):
    assert proved.digest(**copy) == proved.digest()
    assert not unseen(copy)


def test_a_digest_of_names_or_of_c_alone_is_killed(copy):
    def names(folder):
        return sorted(path.name for path in folder.rglob("*"))

    def only_c(folder):
        return [path.read_bytes() for path in sorted(folder.glob("csrc/*"))]

    assert unseen(copy, names) and unseen(copy, only_c)


def test_another_compiler_changes_the_digest(monkeypatch):
    before, true = proved.digest(), proved.versions()
    assert all(true.values())
    for name in true:
        monkeypatch.setattr(proved, "versions", lambda name=name: true | {name: "another"})
        assert proved.digest() != before


def test_only_tests_that_passed_are_recorded(tmp_path, copy):
    kept = tmp_path / "proved.txt"
    assert not proved.holds(kept, **copy)
    seen = []

    def run(status):
        def runner(arguments):
            seen.append((kept.exists(), arguments))
            return status

        return runner

    assert proved.record(run(0), kept, **copy) == 0 and proved.holds(kept, **copy)
    assert proved.record(run(1), kept, **copy) == 1 and not proved.holds(kept, **copy)
    assert [there for there, _ in seen] == [False, False]  # so that none of them is left out
    proved.record(run(0), kept, **copy)
    (copy["folder"] / "csrc" / "new.cpp").write_text("")
    assert not proved.holds(kept, **copy)


def test_an_edit_while_they_run_is_not_recorded(tmp_path, copy):
    kept = tmp_path / "proved.txt"

    def edit(arguments):
        (copy["folder"] / "run.py").write_text("")
        return 0

    proved.record(edit, kept, **copy)
    assert kept.is_file() and not proved.holds(kept, **copy)


@pytest.mark.parametrize("known", [True, False])
def test_which_modules_are_left_to_the_nightly_run(monkeypatch, known):
    """Through the hook that pytest calls, with items of here and of elsewhere."""
    monkeypatch.setattr(proved, "holds", lambda: known)

    class Item:
        def __init__(self, path):
            self.path, self.marks = path, []

        def add_marker(self, mark):
            self.marks.append(mark.name)

    here = {name: Item(proved.HERE / f"{name}.py") for name in ("test_float", "test_modes")}
    other = Item(proved.ROOT / "tests" / "gemm" / "test_float.py")
    pytest_collection_modifyitems([*here.values(), other])
    assert here["test_float"].marks == ["nightly"] * known
    assert here["test_modes"].marks == other.marks == []


def test_smoke_names_modules_that_exist():
    assert all((proved.HERE / f"{name}.py").is_file() for name in proved.SMOKE)
    assert not any(proved.often(name, True) for name in ("test_integer", "test_build"))
