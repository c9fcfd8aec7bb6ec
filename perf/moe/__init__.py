"""Mixtures of experts: grouped products and routing, beside torch's grouped_mm and copies."""
