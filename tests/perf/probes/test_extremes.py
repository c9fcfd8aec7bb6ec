"""Subnormal and overflowing operands: which other rules would explain what the card did?

The truncation model does not predict these outputs (the probe `model`; docs/numerics.md).  What the
card gave was not kept, but the share that differed from the model was.  A candidate rule must give
that share on other operands of the same kind.  Agreement is evidence for a rule, not its proof.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("cutlass")

from perf.core import record
from perf.probes import inputs, truncation
from perf.probes.wgmma_kernel import Chain
from tests.perf.probes.simulated import differing

RECORDED_AT = "d59b64c"  # when the model was as it is here
SIDE = 128
SMALLEST = 2.0**-126
#: (chain, starts from C, K): the probe's cases of short K.
CASES = {
    "from zero": (Chain(256), False, 128),
    "from C": (Chain(256), True, 128),
    "leaves": (Chain(128, promote_every=4), True, 512),
}
TOLERANCE = 0.01

power, toward_zero = truncation._power, truncation.toward_zero


def overflow_is_infinite(x: torch.Tensor) -> torch.Tensor:
    """The store of a step, where a sum of 2^128 or more becomes infinite."""
    return torch.where(x.abs() >= 2.0**128, x.sign() * torch.inf, toward_zero(x)).float()


def least_exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent that a step aligns to, where a subnormal number counts as one of 2^-126."""
    return torch.where(x == 0, power(x), power(x).clamp(min=SMALLEST))


def least_exponent_zeros_too(x: torch.Tensor) -> torch.Tensor:
    """A rule that the records refute: zeros count as 2^-126 as well."""
    return power(x).clamp(min=SMALLEST)


def recorded(case: str, kind: str) -> float:
    """The share of the card's outputs that differed from the model."""
    chain, with_c, k = CASES[case]
    name = f"{chain}, from {'C' if with_c else 'zero'}, {kind}"
    lines = (record.RESULTS / "probes.jsonl").read_text().splitlines()
    rows = [r for r in map(json.loads, lines) if r["probe"] == "model" and r["case"] == name]
    out = [r for r in rows if r["k"] == k and r["commit"] == RECORDED_AT]
    assert out, name
    return out[-1]["differ"] / out[-1]["outputs"]


def predicted(monkeypatch, case: str, kind: str, **rules) -> float:
    """The share of outputs that the rules change, on operands of a kind."""
    chain, with_c, k = CASES[case]
    a, b, c = inputs.make(kind, SIDE, SIDE, k, device="cpu", seed=1)
    c = c if with_c else None
    model = truncation.chain(a, b, c, promote_every=chain.promote_every)
    with monkeypatch.context() as patch:
        for name, rule in rules.items():
            patch.setattr(truncation, name, rule)
        other = truncation.chain(a, b, c, promote_every=chain.promote_every)
    return differing(other, model) / model.numel()


INFINITE = {"toward_zero": overflow_is_infinite}
LEAST = {"_power": least_exponent}


@pytest.mark.parametrize(
    ("case", "kind", "rules", "explains"),
    [
        ("from zero", "bit_patterns", INFINITE, True),
        ("from C", "overflow", INFINITE, True),
        ("leaves", "overflow", INFINITE, True),
        pytest.param("from zero", "overflow", INFINITE, True, marks=pytest.mark.nightly),
        pytest.param("from C", "bit_patterns", INFINITE, True, marks=pytest.mark.nightly),
        pytest.param("leaves", "bit_patterns", INFINITE, True, marks=pytest.mark.nightly),
        *((case, "subnormal", LEAST, True) for case in CASES),
        *((case, "subnormal", INFINITE, False) for case in CASES),
        ("from zero", "subnormal", {"_power": least_exponent_zeros_too}, False),
        ("leaves", "subnormal", {"_power": least_exponent_zeros_too}, False),
    ],
)
def test_a_rule_gives_the_recorded_share_or_another(monkeypatch, case, kind, rules, explains):
    rate = predicted(monkeypatch, case, kind, **rules)
    assert (abs(rate - recorded(case, kind)) < TOLERANCE) == explains


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "wide" else pytest.mark.nightly)
        for kind in sorted(inputs.ORDINARY)
    ],
)
def test_the_rules_change_nothing_that_the_card_confirmed(monkeypatch, kind):
    assert predicted(monkeypatch, "from C", kind, **LEAST, **INFINITE) == 0
