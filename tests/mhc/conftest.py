"""One thread for the tests of mhc: their tensors are small, and workers share the processor."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """A team that waits for its slowest takes a hundred times as long on a busy machine."""
    team = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(team)
