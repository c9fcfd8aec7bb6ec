"""`linear_logp` measured: cases, rivals, and its part of the status page."""
