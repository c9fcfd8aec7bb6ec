"""The runner of mutants by text stops where a mutant is none; nobody takes that for a kill."""

from __future__ import annotations

import pytest

from tests.anchors import AnchorError, replaced

TEXTS = {"kernel": "a = 1\nb = 2\n", "launch": "b = 2\nc = 3\n"}


@pytest.mark.parametrize(("old", "new"), [("d", "e"), ("b = 2", "b = 3"), ("a = 1", "a = 1")])
def test_absent_repeated_and_equal_texts_are_errors(old, new):
    with pytest.raises(AnchorError) as caught:
        replaced(TEXTS, old, new)
    assert not isinstance(caught.value, AssertionError)


def test_one_place_is_replaced():
    assert replaced(TEXTS, "c = 3", "c = 4") == TEXTS | {"launch": "b = 2\nc = 4\n"}
    assert TEXTS["launch"] == "b = 2\nc = 3\n"
