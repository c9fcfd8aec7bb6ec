"""Measurements of mHC: cases, rivals, and its part of the status page."""
