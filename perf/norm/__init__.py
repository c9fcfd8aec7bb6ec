"""Norms measured: cases, rivals, and their part of the status page."""
