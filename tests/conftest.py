"""What every test gets: settings and backends found afresh, and a kernel cache of its own."""

from __future__ import annotations

import pytest

from cute_kernels import dispatch, settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch):
    """A test may set CUTE_KERNELS_* through monkeypatch: each use is read anew, and undone."""
    monkeypatch.setattr(settings, "get", settings.get.__wrapped__)


@pytest.fixture(autouse=True)
def fresh_backends():
    """A test may pretend to have another device: what one found is not for the next."""
    dispatch.forget()
    yield
    dispatch.forget()
