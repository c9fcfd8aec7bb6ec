"""tests/snapshot.py: a text that differs fails, and only who asks for it writes another one."""

import pytest

from tests import snapshot


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
