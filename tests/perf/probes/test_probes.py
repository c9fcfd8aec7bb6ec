"""The probes end to end on the simulator, each with a mutant that its answer must show."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

import ptxsim
from perf.probes import (
    exp2,
    golden,
    inputs,
    instruction,
    model,
    promotion,
    smoke,
    sync_kernel,
    tally,
    truncation,
    width,
    zeros,
)
from perf.probes.wgmma_kernel import Chain
from ptxsim.skips import requires_sim
from tests import triton_harness
from tests.perf.core.clocks import HostClock
from tests.perf.probes.simulated import build, differing

pytestmark = [
    pytest.mark.sim,
    requires_sim,
    pytest.mark.filterwarnings("ignore:This static loop"),
]


@pytest.fixture(autouse=True)
def hopper():
    """The simulator multiplies with the truncating adder."""
    with ptxsim.options(wgmma_math="hopper"):
        yield


def other_math(only: Chain):
    """A build in which one chain multiplies with another adder."""

    def chosen(chain: Chain, *, with_c: bool = False):
        call = build(chain, with_c=with_c)

        def run(*args, **kwargs):
            with ptxsim.options(wgmma_math="exact" if chain == only else "hopper"):
                call(*args, **kwargs)

        return run

    return chosen


SMALL_WIDTH = {
    "device": "cpu",
    "size": (72, 72, 64),
    "widths": (24,),
    "tiles": (Chain(64, warpgroups=2),),
}


def mma_sync() -> dict:
    return {"mma.sync": sync_kernel.build(with_c=True, compiler=ptxsim.compile)}


SMALL_INSTRUCTION = {
    "device": "cpu",
    "size": (64, 64, 64),
    "chains": (Chain(64, registers=True),),
    "others": mma_sync,
}


REGISTERS = instruction.name(Chain(64))
#: Probe, its small size, the chain of a mutant, (case, whether the mutant differs) of each row.
COMPARISONS = [
    (width, SMALL_WIDTH, Chain(24), [
        (f"{chain}, swap={swap}", chain == Chain(24))
        for chain in (Chain(24), Chain(64, warpgroups=2)) for swap in (False, True)
    ]),
    (instruction, SMALL_INSTRUCTION, Chain(64, registers=True), [
        (REGISTERS, True), ("mma.sync", False),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("probe", "small", "mutant", "cases"), COMPARISONS)
def test_a_comparison_answers_and_sees_one_instruction_with_other_bits(probe, small, mutant, cases):
    *rows, answer = probe.run(build, **small)
    assert [row["case"] for row in rows] == [case for case, _ in cases]
    of_a_kind, kinds = math.prod(small["size"][:2]), len(inputs.ORDINARY | inputs.EXTREME)
    assert all(row["outputs"] == of_a_kind * kinds for row in rows)
    assert answer["verdict"] == answer["extreme"]["verdict"] == "yes"
    assert answer["outputs"] == of_a_kind * len(inputs.ORDINARY) * len(rows)
    *rows, answer = probe.run(other_math(mutant), **small)
    assert answer["verdict"] == "no" and answer["first"]["got"] != answer["first"]["want"]
    assert [(row["case"], row["differ"] > 0) for row in rows] == cases


SMALL_EXP2 = {"device": "cpu", "parts": 4, "part": 512}


def shifted(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(torch.exp2(x + 0.25))


def test_triton_multiplies_and_exponentiates_in_the_simulator():
    triton_kernel = pytest.importorskip("perf.probes.triton_kernel")
    written = {"chain_kernel": ("d_ptr",), "exp2_kernel": ("y_ptr",)}
    launch, options = SimpleNamespace(kernels=triton_kernel), {"wgmma_math": 2}
    of_cute = sync_kernel.build_exp2(ptxsim.compile)
    a, b, c = inputs.make("normal", 64, 64, 64, device="cpu")
    want, got = (tally.poisoned(64, 64, "cpu") for _ in range(2))
    build(Chain(64), with_c=True)(a, b, want, c)
    with triton_harness.simulated(launch, written, options):
        for m, n, k in ((16, 64, 16), (64, 64, 64)):
            triton_kernel.chain(a, b, got, c, block_m=m, block_n=n, block_k=k)
            assert differing(got, want) == 0
        *rows, answer = exp2.run(None, **SMALL_EXP2, kernels=lambda: (of_cute, triton_kernel.exp2))
    assert [row["outputs"] for row in rows] == [2048, 2048] and answer["verdict"] == "yes"
    *_, answer = exp2.run(None, **SMALL_EXP2, kernels=lambda: (of_cute, shifted))
    assert answer["verdict"] == "no"


SMALL_ZEROS = {"device": "cpu", "size": (64, 64, 32), "chains": (Chain(64, block_k=16),)}


def test_zeros_finds_what_the_model_does_to_minus_zero():
    *rows, answer = zeros.run(build, **SMALL_ZEROS)
    assert len(rows) == len(zeros.FILLERS) * (len(zeros.PLACES) + 1)
    assert answer["verdict"] == "yes, except the sign of zero"
    changed = [row for row in rows if row["differ"]]
    assert all(row["differ"] == row["zero_sign"] for row in changed)
    assert {row["first"]["where"] for row in changed} == {"C = -0", "subnormal"}
    assert sum("C = -0" in row["case"] for row in changed) == len(zeros.FILLERS)


def test_zeros_sees_a_zero_group_that_is_not_neutral():
    """A mutant whose group of zeros lends its exponent to the alignment."""

    def coarse(chain: Chain, *, with_c: bool = False):
        def run(a, b, d, c):
            silent = (a == 0).all(0).unflatten(0, (-1, 16)).all(1)
            acc = c
            for g, empty in enumerate(silent.tolist()):
                part = slice(16 * g, 16 * g + 16)
                acc = truncation.chain(a[:, part], b[:, part], acc)
                if empty:
                    acc = (acc.view(torch.int32) & ~1).view(torch.float32)
            d.copy_(acc)

        return run

    *_, answer = zeros.run(coarse, **SMALL_ZEROS)
    assert answer["verdict"] == "no"


SMALL_MODEL = (
    (Chain(64), False, (64, 72, 64)),
    (Chain(64), True, (64, 72, 64)),
    (Chain(64, promote_every=4), True, (64, 72, 192)),
)


def test_model_answers_and_writes_golden_vectors(tmp_path):
    path = tmp_path / "golden" / "wgmma_sm90.npz"
    about = {"gpu": "the simulator"}
    *rows, answer = model.run(build, device="cpu", cases=SMALL_MODEL, golden_path=path, about=about)
    kinds = sorted(inputs.ORDINARY | inputs.EXTREME)
    assert len(rows) == len(SMALL_MODEL) * len(kinds)
    assert answer["verdict"] == "yes" and answer["golden_kinds"] == kinds
    vectors, told = golden.read(path)
    assert told == about and sorted(vectors) == kinds
    assert all(kind.verdict == "yes" for kind in golden.verify(path).values())
    assert path.stat().st_size < 1 << 19


def test_golden_vectors_keep_every_bit_and_show_one_that_changed(tmp_path):
    path = tmp_path / "wgmma_x.npz"
    a, b, c = inputs.make("zeros", 64, 32, 64, device="cpu")
    d = truncation.chain(a, b, c)
    golden.write(path, {"zeros": (a, b, c, d)}, {})
    (a2, b2, c2, d2) = golden.read(path)[0]["zeros"]
    assert (a.view(torch.int16) == a2.view(torch.int16)).all()
    assert (b.view(torch.int16) == b2.view(torch.int16)).all()
    assert differing(c, c2) == differing(d, d2) == 0
    d.view(torch.int32)[5, 7] ^= 1
    golden.write(path, {"zeros": (a, b, c, d)}, {})
    out = golden.verify(path)["zeros"]
    assert (out.differ, out.first["row"], out.first["col"]) == (1, 5, 7)


def test_model_sees_another_adder_and_makes_no_golden_vectors_of_it(tmp_path):
    path = tmp_path / "wgmma_sm90.npz"
    *_, answer = model.run(
        other_math(Chain(64)), device="cpu", cases=SMALL_MODEL[:1], golden_path=path
    )
    assert answer["verdict"] == "no"
    assert "normal" not in answer.get("golden_kinds", [])


SMALL_PROMOTION = {
    "plan": promotion.Plan(tiles=((64, 1),), periods=(4,), k=512, size=(64, 72, 192), rounds=2),
    "device": "cpu",
    "units": 2,
    "clock": HostClock(),
}


def test_promotion_times_each_period_and_checks_the_bits():
    *rows, answer = promotion.run(build, **SMALL_PROMOTION)
    assert [row["case"] for row in rows] == [f"64x64, leaf of {p} groups" for p in (0, 4)]
    assert rows[0]["cost"] == 0.0
    assert rows[1]["cost"] == pytest.approx(rows[1]["median_us"] / rows[0]["median_us"] - 1)
    assert set(answer["costs"]) == {"4"}
    assert answer["verdict"] == "yes" and answer["dense"] == {"absent": "needs the card"}


@pytest.mark.nightly
def test_promotion_sees_leaves_of_another_length():
    def longer(chain: Chain, *, with_c: bool = False):
        if with_c and chain.promote_every == 4:
            chain = Chain(chain.n, promote_every=8)
        return build(chain, with_c=with_c)

    *_, answer = promotion.run(longer, **SMALL_PROMOTION)
    assert answer["verdict"] == "no"
    assert answer["first"]["where"] == "leaf of 4 groups"


def test_smoke_says_yes_and_a_broken_compile_says_why():
    *rows, answer = smoke.run(build, device="cpu")
    assert [row["ok"] for row in rows] == [True, True] and answer["verdict"] == "yes"

    def broken(chain, *, with_c=False):
        raise RuntimeError("no nvvm")

    *rows, answer = smoke.run(broken, device="cpu")
    assert [row["ok"] for row in rows] == [False, True]
    assert rows[0]["why"] == "RuntimeError: no nvvm" and answer["verdict"] == "no"


def test_the_tally_tells_a_sign_from_a_bit():
    out = tally.Tally()
    assert out.verdict == "nothing compared"
    plus = torch.tensor([[0.0, 1.0]])
    assert out.add(plus, torch.tensor([[-0.0, 1.0]])) == 1
    assert out.verdict == "yes, except the sign of zero"
    assert out.add(plus, torch.tensor([[0.0, 1.0 + 2**-23]]), "here") == 1
    assert (out.verdict, out.outputs, out.differ) == ("no", 4, 2)
    first = {"where": "", "row": 0, "col": 0, "got": "0x00000000", "want": "0x80000000"}
    assert out.first == first
