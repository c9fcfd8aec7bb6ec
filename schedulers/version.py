"""The version of what ``kinds`` and ``select`` make of a mask: orders of adding, which are bits.

It is part of contract ids; a test holds a set of schedules to it (tests/golden/schedules.json).
"""

VERSION = 3
