"""Tests of perf tune: variants are parsed, compiled and compared here; times need a card."""

from __future__ import annotations

import pytest

from perf.gemm import tune
from perf.gemm.cases import Case
from ptxsim.skips import requires_sim
from tests.perf.core.clocks import HostClock

CASE = Case("fwd", "qkv", 200, 136, 520)


@pytest.mark.parametrize("text", ["tile_q=3", "tile_n", "tile_n=x", "dtype=1", "tile_n=192;"])
def test_unknown_fields_are_named(text):
    with pytest.raises(ValueError, match="variant: expected NAME=NUMBER"):
        tune.parse(text)


def test_the_list_parses():
    assert tune.parse(tune.VARIANTS[0]) == {} and all(map(tune.parse, tune.VARIANTS[1:]))
    assert tune.parse("cluster_m=1,cluster_n=2") == {"cluster_m": 1, "cluster_n": 2}


@pytest.fixture
def simulated(monkeypatch):
    """Variants are compiled for the simulator; CPU tensors stand for the card's."""
    import ptxsim
    from cute_kernels.gemm import kernel_sm90

    build = kernel_sm90.build
    monkeypatch.setattr(kernel_sm90, "build", lambda c: build(c, compile=ptxsim.compile))
    tune.kernel.cache_clear()
    with ptxsim.options(wgmma_math="hopper"):
        yield
    tune.kernel.cache_clear()


@pytest.mark.nightly
@requires_sim
@pytest.mark.sim
@pytest.mark.parametrize(
    ("product", "variants"),
    [
        ("fwd", list(tune.VARIANTS)),
        ("dx", ["", "tile_n=192"]),
        ("dw", ["", "tile_n=192"]),
    ],
)
def test_every_variant_has_the_shipped_bits(simulated, product, variants):
    """In the simulator's truncating adder; whether the card agrees is probe 1, not run."""
    case = Case(product, "qkv", 200, 136, 520)
    bodies = list(tune.gemm(case, variants, units=4, rounds=1, clock=HostClock(), device="cpu"))
    assert [b["system"] for b in bodies] == [*(f"ours[{v}]" for v in variants), "cublas"]
    assert all(b["status"] == "ok" and b["median_us"] > 0 for b in bodies)
    assert all(tune.line(body) for body in bodies)


@requires_sim
@pytest.mark.sim
def test_a_variant_with_other_bits_is_not_timed(simulated, monkeypatch):
    true_product = tune.product

    def product(text, which, units):
        run = true_product("", which, units)
        return run if not text else lambda t: run(t).flip(0)

    monkeypatch.setattr(tune, "product", product)
    bodies = list(
        tune.gemm(CASE, ["", "tile_n=192"], units=2, rounds=1, clock=HostClock(), device="cpu")
    )
    assert [b["status"] for b in bodies] == ["ok", "failed", "ok"]
    assert "median_us" not in bodies[1] and "other bits" in tune.line(bodies[1])
