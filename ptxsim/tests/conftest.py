"""Fixtures of the simulator's tests, and which of them run for every commit."""

import pytest

import ptxsim

from . import proved


def pytest_collection_modifyitems(items):
    """What passed on these very sources is left to the nightly run: see proved.py."""
    known = proved.holds()
    for item in items:
        if item.path.parent == proved.HERE and not proved.often(item.path.stem, known):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def no_fence_warnings():
    """Fails a test whose launches lack a proxy fence, or a wait for their bulk stores."""
    ptxsim.clear_launches()
    yield
    for launch in ptxsim.launches():
        if launch["report"]:  # refused launches have none
            assert launch["report"]["fence_warnings"]["count"] == 0, launch["entry"]
