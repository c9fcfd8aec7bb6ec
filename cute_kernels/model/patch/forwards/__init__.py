"""The forwards that patched modules get, and what they are made of."""
