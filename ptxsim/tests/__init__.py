"""The simulator's own tests: PTX snippets, whole kernels, other libraries' kernels."""
