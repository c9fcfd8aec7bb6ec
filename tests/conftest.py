"""What every test gets: settings and backends found afresh; and which are nightly."""

from __future__ import annotations

import pytest

from cute_kernels import dispatch, settings
from tests import certified


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves most simulations of kernels that are as they were certified to the nightly run."""
    for item in certified.left_to_the_night(items):
        item.add_marker(pytest.mark.nightly)


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
