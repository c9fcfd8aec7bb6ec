"""Fixtures of the cache, and of what runs plans and kernels in C."""

import pytest

from cute_kernels.compile import cache, toolchain
from tests.compile import reporting


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The cache folder of one test, not yet there; nothing is in memory."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CACHE", "AOT_DIR"):
        monkeypatch.delenv(f"CUTE_KERNELS_{name}", raising=False)
    # Someone may be editing the package while its tests run.
    monkeypatch.setattr(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT)
    cache.clear()
    yield tmp_path / "cache"
    cache.clear()


@pytest.fixture
def calls():
    """The functions of compile/calls.c."""
    return reporting.calls_in_c()


@pytest.fixture
def report():
    """A kernel that writes down its arguments."""
    return reporting.reporter()
