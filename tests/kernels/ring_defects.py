"""Defects of the ring that every SM90 kernel loads through, and the settings that find them.

Each replaces one helper while a kernel is compiled; ``module`` is the kernel's.
"""

from __future__ import annotations

from ptxsim.modes import ANY_CTA, EARLY, LATE

#: The three settings of ptxsim/README.md that find most missing waits.
SETTINGS = [
    LATE,
    *(EARLY | {"seed": seed} for seed in (1, 2)),
    ANY_CTA | {"seed": 3},
]
LIMITS = {"max_steps": 20_000_000}


def pipeline():
    """Module of the rings that every kernel loads through."""
    from cute_kernels.dsl import pipeline

    return pipeline


def ring_class(module):
    """The DSL's ring, whose methods the mutants replace."""
    return pipeline().pipeline.PipelineTmaAsync


def no_wait_for_empty_stages(monkeypatch, module):
    def acquire(self, state):
        self.sync_object_full.arrive(state.index, self.producer_mask)

    monkeypatch.setattr(ring_class(module), "producer_acquire", acquire)


def no_release(monkeypatch, module):
    monkeypatch.setattr(ring_class(module), "consumer_release", lambda self, state: None)


def wrong_phase(monkeypatch, module):
    monkeypatch.setattr(pipeline(), "consumer_state", pipeline().producer_state)


def half_the_bytes(monkeypatch, module):
    true_ring = pipeline().tma_ring
    monkeypatch.setattr(
        pipeline(), "tma_ring", lambda b, s, size, *rest: true_ring(b, s, size // 2, *rest)
    )


def released_before_read(monkeypatch, module):
    """Sums are read, and stages given back, while WGMMAs are in flight."""
    warpgroup = module.cute.nvgpu.warpgroup
    true_wait = warpgroup.wait_group
    monkeypatch.setattr(warpgroup, "wait_group", lambda n: true_wait(n + 1))


def no_proxy_fence(monkeypatch, module):
    monkeypatch.setattr(module.cute.arch, "fence_proxy", lambda *a, **k: None)


#: Name -> defect.
DEFECTS = {
    defect.__name__: defect
    for defect in (
        half_the_bytes,
        no_proxy_fence,
        no_release,
        no_wait_for_empty_stages,
        released_before_read,
        wrong_phase,
    )
}
