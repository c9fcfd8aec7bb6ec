"""Targets and bits of mHC on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import Target, field_of, page_of, ratio_to
from . import cases

TITLE = "mHC"
BENCHES = ("mhc",)
SPEED = (
    Speed(
        "mHC site, both passes", "mhc", ("site fwd", "site bwd"), "te", "TransformerEngine, atomics"
    ),
)
_CN = cases.of_sizes()
#: One number of tokens in the layout that no rival has.
_NC = cases.cases(cases.OPS, [(8192, c) for c in cases.CHANNELS], "nc")
#: Layout -> (product, label) of its cases.
_KEYS = {
    name: [(case.product, case.label) for case in of_layout]
    for name, of_layout in (("cn", _CN), ("nc", _NC))
}
CASES = [*_KEYS["cn"], *_KEYS["nc"]]


def _target(product: str, at_least: float, of_copy: bool = False, layout: str = "cn") -> Target:
    """TransformerEngine's time over ours, or the copy's bandwidth, at every size."""
    cases_of = [case for case in _KEYS[layout] if case[0] == product]
    if of_copy:
        name = product if layout == "cn" else f"{product}, {layout}"
        text = f"{name}: at least {at_least:.0%} of the copy's bandwidth"
        return Target(text, cases_of, at_least, field_of("floor_fraction"), share=True)
    text = f"{product}: at least {at_least:.2f}x TransformerEngine with atomics"
    return Target(text, cases_of, at_least, ratio_to("te"))


TARGETS = (
    _target("projection fwd", 1.15),
    _target("projection bwd", 2.5),
    _target("projection_norm bwd", 1.4),
    _target("scale_sinkhorn fwd", 2.0),
    _target("scale_sinkhorn bwd", 2.0),
    _target("aggregate fwd", 1.0),
    _target("aggregate bwd", 1.0),
    _target("expand fwd", 1.0),
    _target("expand bwd", 1.05),
    _target("site fwd", 1.15),
    _target("site bwd", 2.5),
    _target("aggregate fwd", 0.94, True),
    _target("expand fwd", 0.93, True),
    _target("expand bwd", 0.90, True),
    _target("projection fwd", 0.88, True),
    _target("projection fwd", 0.88, True, "nc"),
    _target("projection bwd", 0.80, True),
)
bits_kept, target_rows = page_of(
    "mhc", CASES, TARGETS, ("`python -m perf bench mhc`", "docs/notes/mhc_sm90.md")
)
