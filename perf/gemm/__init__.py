"""Products: their cases, rivals, checks, targets and pages."""
