"""Probes: one script per fact about the card that decides a plan (`python -m perf probe NAME`).

Each probe yields record bodies; the last one of a probe is its answer (case "answer").  A probe
takes the function that compiles a `wgmma_kernel.Chain`, so tests run it on the simulator with few
outputs, and with a mutant that it must notice.
"""
