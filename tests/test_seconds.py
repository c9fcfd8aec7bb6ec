"""Workers and the order of files: what `make test` starts, and that the longest come first."""

from types import SimpleNamespace

import pytest

from tests import conftest, seconds, workers

GB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "memory", "want"), [(2, 24, 2), (2, 4, 1), (64, 512, 16), (16, 24, 8), (1, 2, 1)]
)
def test_workers(cores, memory, want):
    assert workers.workers(cores, memory * GB) == want


def test_the_longest_files_come_first_and_stay_whole(tmp_path, monkeypatch):
    junit = tmp_path / "run.xml"
    times = {"tests.a.test_x": 0.7, "tests.test_y": 30.04, "tests.a.test_z": 0.6}
    cases = [
        f'<testcase classname="{name}" name="test_{i}" time="{time}"/>'
        for name, time in times.items()
        for i in range(2)
    ]
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = seconds.of_run(junit)
    assert found == {"tests/test_y.py": 60.1, "tests/a/test_x.py": 1.4, "tests/a/test_z.py": 1.2}
    monkeypatch.setattr(seconds, "recorded", lambda: found)
    monkeypatch.setattr(conftest.certified, "left_to_the_night", lambda items: [])
    nodes = [f"tests/{file}.py::test_{i}" for file in ("new", "a/test_z", "test_y") for i in (0, 1)]
    items = [SimpleNamespace(nodeid=node) for node in nodes]
    conftest.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [*nodes[4:], *nodes[2:4], *nodes[:2]]
