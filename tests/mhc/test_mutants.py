"""Mistakes that were made elsewhere, planted one by one: each is killed by a check that is named.

The checks are those of the other files of this folder, on one case each; all pass without a mutant.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc import Options, cpu, expand_combine, nodes, projection, sinkhorn
from cute_kernels.mhc.tensors import Expand
from tests import contract
from tests.contract import same_bytes
from tests.mhc import cases, formulas, packed, runs
from tests.mhc.cases import FP32, Case
from tests.oracles import mhc as reference


class Killed(AssertionError):
    """A check has found something."""


def require(same: bool, what: str) -> None:
    if not same:
        raise Killed(what)


# ---- checks --------------------------------------------------------------------------------------

OPTIONS = Options(eps=0.3, pre_eps=0.05, iterations=3, precision="bf16x3")
CASE = Case(3, 13, 40, 4, "cn", (FP32, FP32), True, True, 3.0, OPTIONS)


def _within(*functions: str) -> None:
    x = cases.inputs_of(CASE)
    for name in functions:
        shares = cases.shares(*runs.FUNCTIONS[name](CASE, x))
        over = {key: share for key, share in shares.items() if share > 1}
        require(not over, f"{name}: {over}")


def values_of_projection() -> None:
    """Compare a projection with the bounds of float64."""
    _within("project")


def values_of_gates() -> None:
    """Compare scale with the bounds of float64."""
    _within("gate")


def values_of_sinkhorn() -> None:
    """Compare sinkhorn with the bounds of float64."""
    _within("sinkhorn")


def values_of_streams() -> None:
    """Compare aggregate and expand_combine with the bounds of float64."""
    _within("collapse", "expand")


def values_of_sites() -> None:
    """Compare every fusion with the bounds of float64."""
    _within("mix", "both", "shifted", "whole")


def values_of_heads() -> None:
    """Compare a head with the bounds of float64: gradients, and main_grads of zeros."""
    _within("head", "head, main_grads")


def h_of_phi() -> None:
    """RMS of H's error (test_cpu.test_h_is_within_1e_5)."""
    case = CASE._replace(m=40, c=1280)
    x = cases.inputs_of(case)
    h, _ = projection(x.x, x.phi, norm_weight=x.norm_weight)
    want = reference.projection(cases.rows(x.x), cases.mapping_of(case, x), case.streams)[0].value
    share = formulas.rms(h[:, :24].double() - want) / formulas.rms(want)
    require(share <= 1e-5, f"H: {share}")


def orientation() -> None:
    """Columns sum to 1 and streams are convex mixes (test_cpu.test_output_streams_are_...)."""
    p = sinkhorn(3 * cases.normal(48, 4, 4, seed=1), iterations=2)
    require((p.sum(1) - 1).abs().max() < 1e-5, "columns")
    # Of a matrix whose rows sum to 1 too little, equal streams would not stay equal.
    same = cases.normal(48, 16, 1, seed=2).expand(-1, -1, 4)
    y = expand_combine(torch.zeros(48, 16), None, torch.zeros(48, 4), same, p, 4)
    require((y - same).abs().max() < 1e-4, "mixes")


def rows_of_projection() -> None:
    """The battery (test_battery.test_rows), with several chunks of channels."""
    contract.check_rows(packed.row_op("projection", packed.case_of(FP32, c=97)), 40, 11)


def rows_of_sinkhorn() -> None:
    """The battery, of sinkhorn."""
    contract.check_rows(packed.row_op("sinkhorn", packed.case_of(FP32)), 40, 11)


def _splits(name: str) -> None:
    case = packed.case_of(FP32, 2, "cn", 3)._replace(m=2 * 1024 + 300)
    contract.check_splits(packed.sum_op(name, case), 11)


def splits_of_projection() -> None:
    """phi and norm_weight into main_grads (test_battery.test_splits)."""
    _splits("projection")


def splits_of_gates() -> None:
    """alpha and beta into main_grads."""
    _splits("mix_and_aggregate")


def splits_of_bias() -> None:
    """bias into a main_grad."""
    _splits("expand_combine")


def splits_of_head() -> None:
    """Each weight of a head into its main_grad, begun where the last micro-batch left it."""
    _splits("head")


def repeated() -> None:
    """Gradients of weights, ten times (run_to_run)."""
    case = CASE._replace(m=300)
    x = cases.inputs_of(case)
    want = runs.mix(case, x)[0]
    for _ in range(10):
        for name, t in runs.mix(case, x)[0].items():
            require(same_bytes(t, want[name]), name)


def drawn_alike() -> None:
    """A case is what its seed says, whatever was drawn before."""
    first = cases.inputs_of(CASE)
    cases.inputs_of(CASE._replace(seed=4))
    torch.rand(3)
    for name, a, b in zip(first._fields, cases.inputs_of(CASE), first, strict=True):
        require(same_bytes(a, b), name)


# ---- mutants -------------------------------------------------------------------------------------


def dalpha_in_arrival_order(patch) -> None:
    """Tokens are added as they come: what an atomic add does."""

    def gate_backward(h, ms, gates, n, *upstream):
        d_h, d_ms, _ = true_gate_backward(h, ms, gates, n, *upstream)
        order = torch.randperm(len(h))
        moved = [g[order] for g in upstream]
        _, _, parts = true_gate_backward(h[order], ms[order], gates, n, *moved)
        return d_h, d_ms, parts

    patch.setattr(cpu, "gate_backward", gate_backward)


def _with_tokens(function, tokens):
    """A launcher whose chunks of tokens are as long as ``tokens`` says, of their number."""

    def run(*args):
        of = next(t for t in (*args, *args[2]) if isinstance(t, torch.Tensor))
        before, cpu.TOKENS = cpu.TOKENS, tokens(len(of))
        try:
            return function(*args)
        finally:
            cpu.TOKENS = before

    return run


def _patch_tokens(patch, tokens) -> None:
    for name in ("gate_backward", "project_backward", "reduce_channels"):
        patch.setattr(cpu, name, _with_tokens(getattr(cpu, name), tokens))


def chunks_by_number_of_tokens(patch) -> None:
    """A chunk of tokens is a third of them."""
    _patch_tokens(patch, lambda m: -(-m // 3))


def no_chunks_of_tokens(patch) -> None:
    """One sum over all tokens of a call."""
    _patch_tokens(patch, lambda m: 2**30)


def parts_before_main_grad(patch) -> None:
    """A call's chunks meet each other before they meet main_grad."""

    def add_parts(parts, into):
        into += parts.values.sum(0).view(into.shape)

    def weights(parts, mapping, into_phi, into_weight):
        true_weights(
            parts._replace(values=parts.values.sum(0)[None]), mapping, into_phi, into_weight
        )

    patch.setattr(cpu, "add_parts", add_parts)
    patch.setattr(cpu, "weights", weights)


def head_summed_apart(patch) -> None:
    """Sums of a head's phi begin at zero in the padded buffer; main_grad gets them in one piece."""

    def accumulator(of, into, rows=None):
        return true_accumulator(of, None if rows and rows > len(of) else into, rows)

    def returned(backward, name, total):
        into = backward.main_grads[name]
        if into is None or len(total) == len(into):
            return true_returned(backward, name, total)
        into += total[: len(into)]

    patch.setattr(nodes, "_accumulator", accumulator)
    patch.setattr(nodes, "_returned", returned)


def head_not_written_back(patch) -> None:
    """The padded buffer keeps what was added."""

    def returned(backward, name, total):
        into = backward.main_grads[name]
        if into is None or len(total) == len(into):
            return true_returned(backward, name, total)

    patch.setattr(nodes, "_returned", returned)


def channels_by_number_of_tokens(patch) -> None:
    """A chunk of channels is shorter when there are few tokens, to have work for all SMs."""

    def project(x, *others):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cpu, "chunk_channels", lambda n, p: 32 if len(x) < 16 else 64)
            return true_project(x, *others)

    patch.setattr(cpu, "project", project)


def rows_and_columns_swapped(patch) -> None:
    """Columns first, then rows, which then sum to 1."""

    def turned(z, n):
        return z.reshape(-1, n, n).mT.reshape(-1, n * n)

    def run(z, n, form):
        return turned(true_sinkhorn(turned(z, n), n, form), n)

    def back(z, d_p, n, form):
        return turned(true_sinkhorn_backward(turned(z, n), turned(d_p, n), n, form), n)

    patch.setattr(cpu, "sinkhorn", run)
    patch.setattr(cpu, "sinkhorn_backward", back)


def _with_iterations(patch, more: int) -> None:
    def normalisations(z, form):
        return true_normalisations(z, form._replace(iterations=form.iterations + more))

    patch.setattr(cpu, "_normalisations", normalisations)


def an_extra_iteration(patch) -> None:
    """T + 1."""
    _with_iterations(patch, 1)


def an_iteration_fewer(patch) -> None:
    """T - 1."""
    _with_iterations(patch, -1)


def a_last_pass_of_rows(patch) -> None:
    """Rows are normalised once more, as if that made both sums right."""

    def normalisations(z, form):
        for y, dim, before in true_normalisations(z, form):
            yield y, dim, before
        yield y / y.sum(2, keepdim=True), 2, None

    patch.setattr(cpu, "_normalisations", normalisations)


def until_all_have_converged(patch) -> None:
    """Iterations end when every matrix of the batch is doubly stochastic."""

    def normalisations(z, form):
        for y, dim, before in true_normalisations(z, form._replace(iterations=64)):
            yield y, dim, before
            if dim == 1 and ((y.sum(2) - 1).abs() < 1e-2).all():
                return

    patch.setattr(cpu, "_normalisations", normalisations)


def the_largest_logit_of_all(patch) -> None:
    """One maximum for the batch is taken from the logits first."""
    patch.setattr(cpu, "_normalisations", lambda z, form: true_normalisations(z - z.max(), form))


def h_res_transposed(patch) -> None:
    """The second index is contracted, forward."""

    def combine(x, streams, pre, expand):
        if expand is not None:
            res = expand.res.reshape(-1, streams.n, streams.n).mT.flatten(1)
            expand = expand._replace(res=res)
        return true_combine(x, streams, pre, expand)

    patch.setattr(cpu, "combine", combine)


def h_res_transposed_backward(patch) -> None:
    """The same, in dx alone."""

    def passed(dy, d_out, upstream, n):
        if upstream.res is not None:
            upstream = upstream._replace(res=upstream.res.reshape(-1, n, n).mT.flatten(1))
        return true_passed(dy, d_out, upstream, n)

    patch.setattr(cpu, "_passed", passed)


def epsilon_outside_the_root(patch) -> None:
    """r = √ms + ε."""

    def logits(h, ms, gates, n):
        r = torch.sqrt(ms) + gates.eps
        return true_logits(h, r * r, gates._replace(eps=0.0), n)

    patch.setattr(cpu, "_logits", logits)


def beta_before_the_division(patch) -> None:
    """z = (α H + β) / r."""

    def logits(h, ms, gates, n):
        r = torch.sqrt(ms + gates.eps)[:, None]
        return true_logits(h, ms, gates._replace(beta=gates.beta / r), n)

    patch.setattr(cpu, "_logits", logits)


def pre_eps_in_the_derivative(patch) -> None:
    """p (1 - p) of p + pre_eps."""

    def gate_backward(h, ms, gates, n, d_pre, d_post, d_res):
        p = cpu._sigmoid(cpu._split(cpu._logits(h, ms, gates, n), n)[0])
        q = p + gates.pre_eps
        d_pre = d_pre * (q * (1 - q)) / (p * (1 - p))
        return true_gate_backward(h, ms, gates, n, d_pre, d_post, d_res)

    patch.setattr(cpu, "gate_backward", gate_backward)


def no_gradient_of_the_norm(patch) -> None:
    """dx without (2 / K) dms x."""

    def project_backward(x, d_h, d_ms, *others):
        return true_project_backward(x, d_h, torch.zeros_like(d_ms), *others)

    patch.setattr(cpu, "project_backward", project_backward)


def dpost_without_bias(patch) -> None:
    """dpost of f alone; dbias is there."""

    def reduce_channels(x, streams, upstream, expand=None, want_dx=False):
        out = true_reduce(x, streams, upstream, expand, want_dx)
        if expand is None or expand.bias is None:
            return out
        bare = Expand(expand.f, None, expand.post)
        return out._replace(d_post=true_reduce(x, streams, upstream, bare, False).d_post)

    patch.setattr(cpu, "reduce_channels", reduce_channels)


def phi_in_tf32(patch) -> None:
    """What a TF32 product reads."""
    patch.setattr(cpu, "_psi", lambda mapping: formulas.tf32(true_psi(mapping)))


def bf16_partials(patch) -> None:
    """Chunks of H are handed on in bf16."""

    def add_chunks(projected, size, n):
        rounded = projected._replace(sums=projected.sums.bfloat16().float())
        return true_add_chunks(rounded, size, n)

    patch.setattr(cpu, "add_chunks", add_chunks)


def one_generator_for_all(patch) -> None:
    """torch's own, which whoever drew last has moved."""
    patch.setattr(cases, "generator", lambda seed: torch.default_generator)


true_gate_backward, true_project_backward = cpu.gate_backward, cpu.project_backward
true_sinkhorn, true_sinkhorn_backward = cpu.sinkhorn, cpu.sinkhorn_backward
true_normalisations, true_combine, true_passed = cpu._normalisations, cpu.combine, cpu._passed
true_logits, true_reduce, true_psi = cpu._logits, cpu.reduce_channels, cpu._psi
true_weights, true_project, true_add_chunks = cpu.weights, cpu.project, cpu.add_chunks
true_accumulator, true_returned = nodes._accumulator, nodes._returned

SPLITS = [splits_of_projection, splits_of_gates, splits_of_bias, splits_of_head]
#: mutant -> the checks that kill it, each of which must.
KILLERS = {
    dalpha_in_arrival_order: [repeated, splits_of_gates],
    chunks_by_number_of_tokens: SPLITS,
    no_chunks_of_tokens: SPLITS,
    parts_before_main_grad: SPLITS,
    head_summed_apart: [splits_of_head],
    head_not_written_back: [values_of_heads],
    channels_by_number_of_tokens: [rows_of_projection],
    rows_and_columns_swapped: [values_of_sinkhorn, values_of_sites, orientation],
    an_extra_iteration: [values_of_sinkhorn, values_of_sites],
    an_iteration_fewer: [values_of_sinkhorn, values_of_sites],
    a_last_pass_of_rows: [values_of_sinkhorn, values_of_sites, orientation],
    until_all_have_converged: [values_of_sinkhorn, rows_of_sinkhorn],
    the_largest_logit_of_all: [rows_of_sinkhorn],
    h_res_transposed: [values_of_streams, values_of_sites, orientation],
    h_res_transposed_backward: [values_of_streams, values_of_sites],
    epsilon_outside_the_root: [values_of_gates, values_of_sites],
    beta_before_the_division: [values_of_gates, values_of_sites],
    pre_eps_in_the_derivative: [values_of_gates],
    no_gradient_of_the_norm: [values_of_projection, values_of_sites],
    dpost_without_bias: [values_of_streams, values_of_sites],
    phi_in_tf32: [h_of_phi],
    bf16_partials: [values_of_projection, h_of_phi],
    one_generator_for_all: [drawn_alike],
}
CHECKS = [
    values_of_projection, values_of_gates, values_of_sinkhorn, values_of_streams, values_of_sites,
    values_of_heads, h_of_phi, orientation, rows_of_projection, rows_of_sinkhorn, *SPLITS,
    repeated, drawn_alike,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_a_check_passes_without_a_mutant(check):
    check()


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(mutant, check) for mutant, killers in KILLERS.items() for check in killers],
    ids=lambda f: f.__name__,
)
def test_a_mutant_is_killed(mutant, check, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((Killed, contract.ContractViolation)):
        check()


def test_every_check_kills_something():
    assert {check for killers in KILLERS.values() for check in killers} == set(CHECKS)
