"""Rotary types whose frequencies follow the lengths of sequences."""

from __future__ import annotations

#: Start of the reason why their modules are left.
FOLLOWS = "rope_type "
