"""Linear attention measured: cases, rivals, and its part of the status page."""
