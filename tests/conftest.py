"""Fixtures of every test: settings and backends looked up anew; and which tests are nightly."""

from __future__ import annotations

import functools
import gc
import os
from unittest import mock

import pytest
import torch

from cute_kernels import settings
from cute_kernels.runtime import dispatch
from tests import certified, kernel_store, seconds
from verify import sources


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves most simulations of kernels that are as they were certified to the nightly run.

    Files that took longest come first: the last of a run are short, and no worker waits for one.
    """
    for item in certified.left_to_the_night(items):
        item.add_marker(pytest.mark.nightly)
    taken = seconds.recorded()
    items.sort(key=lambda item: -taken.get(item.nodeid.partition("::")[0], 0.0))


#: Kernels share most of their files: what one imports is read once for all their digests.
IMPORTED_ONCE = mock.patch.object(
    sources, "imported", functools.cache(lambda *file, read=sources.imported: tuple(read(*file)))
)


def pytest_configure(config):
    """Compiled kernels stay in pytest's cache."""
    if getattr(config, "cache", None) is not None:
        kernel_store.keep_in(config.cache.mkdir("kernels"))


def pytest_collection():
    """No garbage is looked for among modules and tests, which live as long as the process."""
    gc.disable()
    IMPORTED_ONCE.start()


def pytest_collection_finish():
    """Nor later: without this each ``gc.collect()`` of a test took most of a second."""
    IMPORTED_ONCE.stop()
    gc.freeze()
    gc.enable()


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


def process_settings() -> dict[str, object]:
    """Settings of torch and of the process on which later calls depend."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def no_setting_left_behind():
    """A mode that outlives its test sends every later call of an op by the dispatcher."""
    before = process_settings()
    yield
    assert process_settings() == before


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A working directory of the test's own, at 80 columns and without ``CUTE_KERNELS_*``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in [name for name in os.environ if name.startswith("CUTE_KERNEL")]:
        monkeypatch.delenv(name)
    return tmp_path
