"""The version of what ``kinds`` and ``select`` make of a mask.

A schedule is an order of adding, and orders are bits: a threshold of the selection that changes,
or a kind that walks another way, gives other gradients.  So the number is part of contract ids, and
a test holds a set of schedules to it (tests/golden/schedules.json).
"""

VERSION = 3
