"""Mutants of both SM90 kernels: a wait of their code is left out, by its place in the text."""

from __future__ import annotations

from tests.kernels.ring_defects import ring_class


def no_wait_for(*numbers: int):
    """One of the kernel's waits for loads, or some together."""

    def mutant(monkeypatch, module):
        true_wait, recorded = ring_class(module).consumer_wait, []

        def consumer_wait(self, state):
            recorded.append(state)
            if len(recorded) not in numbers:
                true_wait(self, state)

        monkeypatch.setattr(ring_class(module), "consumer_wait", consumer_wait)

    mutant.__name__ = "no_wait_for_load_" + "_".join(map(str, numbers))
    return mutant


def no_wait_for_products(number: int):
    """One of the kernel's waits for WGMMAs."""

    def mutant(monkeypatch, module):
        true_wait, recorded = module.warpgroup.wait_group, []

        def wait_group(n):
            recorded.append(n)
            if len(recorded) != number:
                true_wait(n)

        monkeypatch.setattr(module.warpgroup, "wait_group", wait_group)

    mutant.__name__ = f"no_wait_for_products_{number}"
    return mutant
