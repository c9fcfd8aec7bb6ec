"""Bugs planted in the CPU backend one by one, each killed by the checks named beside it.

The checks are those of the other files of this folder, on one case each; all pass without a bug.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from cute_kernels.mhc import Options, cpu, expand_combine, nodes, projection, sinkhorn
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.mhc import calls, cases, formulas, runs
from tests.mhc.cases import BF16, FP32, Case
from tests.oracles import mhc as reference

OPTIONS = Options(eps=0.3, pre_eps=0.05, iterations=3, precision="bf16x3")
CASE = Case(3, 13, 40, 4, "cn", (FP32, FP32), True, True, 3.0, OPTIONS)


class Killed(AssertionError):
    """A check has found something."""


def require(same: bool, what: object) -> None:
    if not same:
        raise Killed(what)


def _within(*functions: str) -> None:
    x = cases.inputs_of(CASE)
    for name in functions:
        shares = cases.shares(*runs.FUNCTIONS[name](CASE, x))
        over = {key: share for key, share in shares.items() if share > 1}
        require(not over, f"{name}: {over}")


def _above_theirs(name: str) -> None:
    case = Case(71, 48, 517, 4, "cn", (BF16, FP32), True, True, 3.0)
    over = formulas.above(name, case, cases.inputs_of(case))
    require(not over, over)


def _rows(name: str, c: int) -> None:
    contract.check_rows(calls.row_op(name, calls.case_of(FP32, c=c)), 40, 11)


def _splits(name: str) -> None:
    case = calls.case_of(FP32, 2, "cn", 3)._replace(m=2 * 1024 + 300)
    contract.check_splits(calls.sum_op(name, case), 11)


def _h_of_phi() -> None:
    case = CASE._replace(m=40, c=1280)
    x = cases.inputs_of(case)
    h, _ = projection(x.x, x.phi, norm_weight=x.norm_weight)
    want = reference.projection(cases.rows(x.x), cases.mapping_of(case, x), case.streams)[0].value
    require(formulas.rms(h[:, :24].double() - want) <= 1e-5 * formulas.rms(want), "H")


def _orientation() -> None:
    """Columns sum to 1, streams are convex mixes, and equal streams stay equal."""
    p = sinkhorn(3 * cases.normal(48, 4, 4, seed=1), iterations=2)
    require((p >= 0).all() and (p.sum(1) - 1).abs().max() < 1e-5, "columns")
    same = cases.normal(48, 16, 1, seed=2).expand(-1, -1, 4)
    y = expand_combine(torch.zeros(48, 16), None, torch.zeros(48, 4), same, p, 4)
    require((y - same).abs().max() < 1e-4, "mixes")


def _repeated() -> None:
    case = CASE._replace(m=300)
    x = cases.inputs_of(case)
    want = runs.run("mix_and_aggregate", case, x)
    for _ in range(10):
        for name, t in runs.run("mix_and_aggregate", case, x).items():
            require(same_bytes(t, want[name]), name)


def _drawn_alike() -> None:
    """A case is what its seed says, whatever was drawn before."""
    first = cases.inputs_of(CASE)
    torch.rand(3)
    for a, b in zip(cases.inputs_of(CASE), first, strict=True):
        require(same_bytes(a, b), "drawn")


CHECKS: dict[str, Callable[[], None]] = {
    "projection": functools.partial(_within, "projection"),
    "gates": functools.partial(_within, "scale"),
    "sinkhorn": functools.partial(_within, "sinkhorn"),
    "streams": functools.partial(_within, "aggregate", "expand_combine"),
    "sites": functools.partial(_within, "mix_and_aggregate", "post_pre", "shifted", "connect"),
    "heads": functools.partial(_within, "head", "head, main_grads"),
    "H": _h_of_phi,
    "orientation": _orientation,
    "rows of projection": functools.partial(_rows, "projection", 97),
    "rows of sinkhorn": functools.partial(_rows, "sinkhorn", 11),
    "splits of projection": functools.partial(_splits, "projection"),
    "splits of gates": functools.partial(_splits, "mix_and_aggregate"),
    "splits of bias": functools.partial(_splits, "expand_combine"),
    "splits of head": functools.partial(_splits, "head"),
    "repeated": _repeated,
    "drawn alike": _drawn_alike,
    **{f"above theirs: {name}": functools.partial(_above_theirs, name) for name in formulas.TE},
}
SPLITS = [name for name in CHECKS if name.startswith("splits")]


def _chunks_of(size: str) -> list[tuple[str, str]]:
    """Chunks of tokens of another size, a formula of their number m."""
    of_h, of_f = size.replace("m", "len(h)"), size.replace("m", "len(d_f)")
    return [
        ("range(0, len(h), TOKENS)", f"range(0, len(h), {of_h})"),
        ("slice(chunk, chunk + TOKENS)", f"slice(chunk, chunk + {of_h})"),
        (
            "[slice(first, first + TOKENS) for first in range(0, m, TOKENS)]",
            f"[slice(first, first + {size}) for first in range(0, m, {size})]",
        ),
        ("d_f.split(TOKENS)", f"d_f.split({of_f})"),
    ]


LOOP = "for _ in range(form.iterations - 1):"
NORMALISED = "            y = y / (_line_sum(y, dim) + eps)\n            yield y, dim, None"
CONVERGED = "if dim == 1 and ((y.sum(2) - 1).abs() < 1e-2).all():\n                return"
PSI = "return mapping.phi if mapping.norm_weight is None else mapping.phi * mapping.norm_weight"
SQUARES = "squares[i] = _sum(part * part)"
TENSORS = "z.reshape(-1, n, n), form)"
TF32 = "from tests.mhc.formulas import tf32\n    "
CHAIN = "from tests.mhc.formulas import chain\n            "
#: Bug -> (module, edits, the checks that kill it, each of which must).
MUTANTS = {
    "dalpha in arrival order": (cpu,
        [("parts = []\n        for", "parts, order = [], torch.randperm(len(h))\n        for"),
        ("slice(chunk, chunk + TOKENS)", "order[chunk : chunk + TOKENS]")],
        ["repeated", "splits of gates"]),
    "chunks by number of tokens": (cpu, _chunks_of("-(-m // 3)"), SPLITS),
    "no chunks of tokens": (cpu, _chunks_of("2**30"), SPLITS),
    "parts before main_grad": (cpu, [("in parts.values.view(-1, parts.group, into.numel())",
        "in parts.values[None].sum(1)[None]"),
        ("for d_psi in parts.values:", "for d_psi in parts.values.sum(0)[None]:")], SPLITS),
    "head summed apart": (nodes, [("if into is None:\n        return like",
        "if into is None or rows > len(like):\n        return like"),
        ("total[: len(like)]", "total[: len(like)] + (0 if into is None else into)")],
        ["splits of head"]),
    "head not written back": (nodes,
        [("if total is not into:", "if total is not into and total.dim() != 2:")], ["heads"]),
    "channels by number of tokens": (cpu,
        [("step = chunk_channels(streams.n, mapping.precision)", "step = 32 if m < 16 else 64")],
        ["rows of projection"]),
    "rows and columns swapped": (cpu, [(f"*_, last = _normalisations({TENSORS}",
        "*_, last = _normalisations(z.reshape(-1, n, n).mT, form)"),
        ("return last[0].reshape", "return last[0].mT.reshape"),
        (f"steps = list(_normalisations({TENSORS})",
        "steps = list(_normalisations(z.reshape(-1, n, n).mT, form))"),
        ("d_p.reshape(-1, n, n)", "d_p.reshape(-1, n, n).mT"),
        ("return gradient.reshape", "return gradient.mT.reshape")],
        ["sinkhorn", "sites", "orientation"]),
    "an extra iteration": (cpu, [(LOOP, "for _ in range(form.iterations):")],
        ["sinkhorn", "sites"]),
    "an iteration fewer": (cpu, [(LOOP, "for _ in range(form.iterations - 2):")],
        ["sinkhorn", "sites", "above theirs: sinkhorn"]),
    "a last pass of rows": (cpu,
        [(NORMALISED, f"{NORMALISED}\n    yield y / y.sum(2, keepdim=True), 2, None")],
        ["sinkhorn", "sites", "orientation"]),
    "until all have converged": (cpu,
        [(LOOP, "for _ in range(63):"), (NORMALISED, f"{NORMALISED}\n            {CONVERGED}")],
        ["sinkhorn", "rows of sinkhorn"]),
    "the largest logit of all": (cpu,
        [("    d = z - z.amax(2", "    z = z - z.max()\n    d = z - z.amax(2")],
        ["rows of sinkhorn"]),
    "H_res transposed": (cpu,
        [("expand.res[:, i * n + j, None]", "expand.res[:, j * n + i, None]")],
        ["streams", "sites", "orientation"]),
    "H_res transposed in dx": (cpu,
        [("upstream.res[:, i * n : i * n + n]", "upstream.res[:, i::n]")], ["streams", "sites"]),
    "epsilon outside the root": (cpu,
        [("torch.sqrt((ms + gates.eps).double())", "(torch.sqrt(ms.double()) + gates.eps)")],
        ["gates", "sites"]),
    "beta before the division": (cpu, [("/ r + gates.beta", "/ r + gates.beta / r")],
        ["gates", "sites"]),
    "pre_eps in the derivative": (cpu,
        [("d_pre * _slope(z_pre)", "d_pre * (_slope(z_pre) + gates.pre_eps)")], ["gates"]),
    "no gradient of the norm": (cpu,
        [("grad = grad + rows * (d_ms * (2.0 / k))[:, None]", "grad = grad + 0.0")],
        ["projection", "sites"]),
    "dpost without bias": (cpu,
        [("_channel_sum(dy[:, j] * f)", "_channel_sum(dy[:, j] * expand.f.float())")],
        ["streams", "sites"]),
    "phi in TF32": (cpu, [(PSI, f"{TF32}{PSI.replace('return ', 'return tf32(')})")], ["H"]),
    "partial sums in bf16": (cpu,
        [("projected.sums[0].clone()", "projected.sums[0].bfloat16().float()"),
        ("h += projected.sums[i]", "h += projected.sums[i].bfloat16().float()")],
        ["projection", "H"]),
    "squares in one chain": (cpu, [(SQUARES, f"{CHAIN}squares[i] = chain((part * part).mT)")],
        ["above theirs: projection"]),
    "streams rounded twice": (cpu, [("total = f * expand.post[:, j, None]",
        "total = (f * expand.post[:, j, None]).to(x.dtype).float()")],
        ["above theirs: expand_combine"]),
    "sums over channels in bf16": (cpu, [("total + chunk_sum\n    return total",
        "total + chunk_sum\n    return total.bfloat16().float()")],
        ["above theirs: aggregate", "above theirs: expand_combine"]),
    "a sigmoid by a tanh of bf16": (cpu,
        [("1.0 / (1.0 + _exp(-z))", "0.5 * (0.5 * z).tanh().bfloat16().float() + 0.5")],
        ["above theirs: scale", "above theirs: mix_and_aggregate"]),
    "one generator for all": (cases,
        [("torch.Generator(torch.get_default_device()).manual_seed(seed)",
        "torch.default_generator")], ["drawn alike"]),
}  # fmt: skip
PAIRS = [(mutant, check) for mutant, (*_, killers) in MUTANTS.items() for check in killers]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_passes_without_a_mutant(check):
    CHECKS[check]()


@pytest.mark.parametrize(("mutant", "check"), PAIRS)
def test_a_mutant_is_killed(mutant, check):
    module, edits, _ = MUTANTS[mutant]
    with planted(module, *edits), pytest.raises((Killed, contract.ContractViolation)):
        CHECKS[check]()


def test_every_check_kills_something():
    assert {check for _, check in PAIRS} == set(CHECKS)
