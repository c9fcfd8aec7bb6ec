"""A tokenizer and a small Llama on the disk, once a run, for tests of TRL; one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks.threads import threaded  # noqa: F401


@pytest.fixture(scope="session")
def tokenizer():
    from tests.integrations import trl_step

    return trl_step.tokenizer()


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    from tests.integrations import trl_step

    return trl_step.checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one_thread():
    """Batches run in a thread of their own; a CPU's bits hold for one number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
