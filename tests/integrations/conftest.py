"""A tokenizer and a small Llama on the disk, once a run, for tests of TRL."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from tests.integrations import trl_step

    return trl_step.tokenizer()


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    from tests.integrations import trl_step

    return trl_step.checkpoint(tmp_path_factory.mktemp("llama"))
