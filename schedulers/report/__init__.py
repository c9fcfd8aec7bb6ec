"""Schedules for readers: rows and pictures."""
