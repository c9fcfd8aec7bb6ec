"""Launches of the gated delta rule."""

from .delta_cases import Case
from .launches import ALLOWED, Forward, backward, forward

SCALE = Case.options
__all__ = "ALLOWED", "SCALE", "Forward", "backward", "forward"
