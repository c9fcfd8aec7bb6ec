"""Schedules for readers: rows, pictures, quality, fitted constants."""
