"""Observation of a model: which ops run in which module, on a copy without weights."""
