"""Fixtures of what runs plans and kernels in C."""

import pytest

from tests.compile import reporting


@pytest.fixture
def calls():
    """The functions of compile/calls.c."""
    return reporting.calls_in_c()


@pytest.fixture
def report():
    """A kernel that writes down its arguments."""
    return reporting.reporter()
