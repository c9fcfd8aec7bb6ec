"""Errors of a compiled entry on wrong calls: the same, however it was loaded."""

import pytest
import torch


def complaints(function):
    """Errors of the compiled entry on three wrong calls."""
    a = torch.randn(4)
    calls = [(), (a, a), (a, a, a)]
    messages = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(*call)
        messages.append((type(caught.value).__name__, str(caught.value)))
    return messages
