"""Fixtures of cached plans."""

import pytest

from tests.runtime.pretended_sm90 import pretended


@pytest.fixture
def on_sm90(monkeypatch):
    """CPU tensors count as those of an SM90 GPU."""
    with pretended(monkeypatch):
        yield
