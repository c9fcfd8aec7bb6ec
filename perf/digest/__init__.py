"""`python -m perf digest`: SHA-256 digests of fixed inputs, which name the bytes of a card."""
