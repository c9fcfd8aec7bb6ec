"""The order of work: schedules, named kinds, ranks, and the proof that one progresses."""
