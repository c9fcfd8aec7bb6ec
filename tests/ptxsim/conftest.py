"""Fixtures of the simulator's tests."""

import pytest

from tests import ptxsim


@pytest.fixture
def no_fence_warnings():
    """Fails a test whose launches lack a proxy fence, or a wait for their bulk stores."""
    ptxsim.clear_launches()
    yield
    for launch in ptxsim.launches():
        if launch["report"]:  # refused launches have none
            assert launch["report"]["fence_warnings"]["count"] == 0, launch["entry"]
