"""What a compiled entry says to wrong calls: the same, however it was loaded."""

import pytest
import torch


def complaints(function):
    """What the compiled entry says to three wrong calls."""
    a = torch.randn(4)
    calls = [(), (a, a), (a, a, a)]
    messages = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(*call)
        messages.append((type(caught.value).__name__, str(caught.value)))
    return messages
