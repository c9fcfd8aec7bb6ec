"""The one limit of tests that run processes: so far away that only what hangs meets it."""

#: Of a process, a collective or a barrier.  A loaded machine does not come near.
HANG_SECONDS = 3600
