"""What tests of texts rest on: a text that differs fails, and only who asks for it writes another
one; the runner of mutants by text stops where a mutant is none, which nobody takes for a kill."""

import pytest

from tests import snapshot
from tests.anchors import AnchorError, replaced

TEXTS = {"kernel": "a = 1\nb = 2\n", "launch": "b = 2\nc = 3\n"}


@pytest.mark.parametrize(("old", "new"), [("d", "e"), ("b = 2", "b = 3"), ("a = 1", "a = 1")])
def test_absent_repeated_and_equal_texts_are_errors(old, new):
    with pytest.raises(AnchorError) as caught:
        replaced(TEXTS, old, new)
    assert not isinstance(caught.value, AssertionError)
    assert replaced(TEXTS, "c = 3", "c = 4") == TEXTS | {"launch": "b = 2\nc = 4\n"}


def test_a_text_is_compared_whole(tmp_path, monkeypatch):
    monkeypatch.delenv("SNAPSHOTS", raising=False)
    with pytest.raises(AssertionError, match=r"no a\.txt"):
        snapshot.check("a.txt", "one\n", tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SNAPSHOTS", "write")
    snapshot.check("a.txt", "one  \ntwo", tmp_path)
    monkeypatch.delenv("SNAPSHOTS")
    snapshot.check("a.txt", "one\ntwo\n", tmp_path)
    for other in ("one\n", "one\ntwo\nthree\n", "one\n two\n", "", "one\n\ntwo\n"):
        with pytest.raises(AssertionError):
            snapshot.check("a.txt", other, tmp_path)
    assert (tmp_path / "a.txt").read_text() == "one\ntwo\n"
