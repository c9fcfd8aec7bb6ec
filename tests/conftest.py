"""What every test gets: settings read afresh, and a kernel cache of its own."""

from __future__ import annotations

import pytest

from cute_kernels import settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch):
    """A test may set CUTE_KERNELS_* through monkeypatch: each use is read anew, and undone."""
    monkeypatch.setattr(settings, "get", settings.get.__wrapped__)
