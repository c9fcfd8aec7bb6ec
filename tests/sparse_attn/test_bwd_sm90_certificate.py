"""Certificate B on the ordered backward, A on the kernels around it, and mutants that fail."""

from __future__ import annotations

import itertools

import pytest

from tests.ptxsim import available

certificate = available.import_module("cute_kernels.compile.certificate")
kernel = available.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")

from cute_kernels.compile.certificate_report import Expect  # noqa: E402
from cute_kernels.sparse_attn import kernel_bwd_post_sm90, kernel_bwd_pre_sm90  # noqa: E402

cute, turnstile, Int32 = kernel.cute, kernel.turnstile, kernel.cutlass.Int32

#: 168 registers is all that 384 threads can start with; the roles then trade theirs.
MAX_REGISTERS = 168
MAX_SHARED = {64: 232448, 128: 231424}
MMA = {64: "64x64x16", 128: ("64x64x16", "64x128x16")}


def certify(config: kernel.BackwardConfig, kind: str = "B"):
    expect = Expect(MMA[config.head_dim], MAX_REGISTERS, MAX_SHARED[config.head_dim])
    return certificate.certify(
        lambda: kernel.build(config),
        name="sparse_attn_bwd_sm90",
        constexpr=dict(config.items()),
        kind=kind,
        expect=expect,
    )


CONFIGS = list(itertools.product(("bf16", "fp16"), (64, 128), kernel.FORMS))


@pytest.mark.parametrize(("dtype", "head_dim", "form"), CONFIGS)
def test_ordered(dtype, head_dim, form):
    found = certify(kernel.configure(dtype, head_dim, form, ordered=True))
    assert found.ok, found.findings
    assert found.spills == 0 and found.stack == 0


@pytest.mark.parametrize("form", kernel.FORMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_softcap(head_dim, form):
    found = certify(kernel.configure("bf16", head_dim, form, ordered=True, softcap=True))
    assert found.ok, found.findings
    assert found.spills == 0 and found.stack == 0


@pytest.mark.parametrize("form", kernel.FORMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_unordered_is_not_certified_and_breaks_no_other_rule(head_dim, form):
    found = certify(kernel.configure("bf16", head_dim, form, ordered=False))
    assert {f.rule for f in found.findings} >= {"R1", "R2"}
    assert {f.rule for f in found.findings} <= {"R1", "R2", "A1"}, found.findings
    assert found.spills == 0 and found.stack == 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_before_and_after(dtype, head_dim):
    tile_m = kernel.configure(dtype, head_dim, "none", True).tile_m
    pre, post = kernel_bwd_pre_sm90.build, kernel_bwd_post_sm90.build
    for name, build in (
        ("pre", lambda: pre(dtype, head_dim, tile_m)),
        ("pre with dlse", lambda: pre(dtype, head_dim, tile_m, dlse=True)),
        ("post", lambda: post(dtype, head_dim, tile_m)),
    ):
        found = certificate.certify(
            build, name=name, constexpr={}, kind="A", expect=Expect(None, 96, 0)
        )
        assert found.ok, (name, found.findings)
        assert found.spills == 0 and found.stack == 0


def read_wait(patch):
    wait = cute.arch.cp_async_bulk_wait_group
    patch.setattr(turnstile, "land", lambda: wait(0, read=True))


def no_wait(patch):
    patch.setattr(turnstile, "land", lambda: None)


def signal(semaphore, scope="gpu", sem="release"):
    cute.arch.red(semaphore, Int32(1), op="add", dtype="s32", sem=sem, scope=scope)


def release_before_the_wait(patch):
    def finish_turn(semaphore):
        signal(semaphore)
        turnstile.land()

    patch.setattr(turnstile, "finish_turn", finish_turn)


def no_release(patch):
    patch.setattr(turnstile, "finish_turn", lambda semaphore: turnstile.land())


def release_in_the_cta(patch):
    def finish_turn(semaphore):
        turnstile.land()
        signal(semaphore, scope="cta")

    patch.setattr(turnstile, "finish_turn", finish_turn)


def relaxed_release(patch):
    def finish_turn(semaphore):
        turnstile.land()
        signal(semaphore, sem="relaxed")

    patch.setattr(turnstile, "finish_turn", finish_turn)


def no_spin(patch):
    patch.setattr(turnstile, "wait_turn", lambda semaphore, rank: None)


def one_look(patch):
    """Loads with acquire, and goes on whatever it saw."""

    def wait_turn(semaphore, rank):
        cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")

    patch.setattr(turnstile, "wait_turn", wait_turn)


def relaxed_spin(patch):
    @cute.jit
    def wait_turn(semaphore, rank):
        seen = cute.arch.load(semaphore, Int32, sem="relaxed", scope="gpu")
        while seen != rank:
            seen = cute.arch.load(semaphore, Int32, sem="relaxed", scope="gpu")

    patch.setattr(turnstile, "wait_turn", wait_turn)


def added_after_its_turn(patch):
    true_finish, held = turnstile.finish_turn, []
    true_add = turnstile.add

    def finish_turn(semaphore):
        true_finish(semaphore)
        true_add(*held)

    patch.setattr(turnstile, "add", lambda *args: held.extend(args[:3]))
    patch.setattr(turnstile, "finish_turn", finish_turn)


def too_few_registers(patch):
    patch.setattr(kernel, "CONSUMER_REGISTERS", 168)


MUTANTS = {
    read_wait: "R2",
    no_wait: "R2",
    release_before_the_wait: "R2",
    no_release: "R2",
    release_in_the_cta: "R2",
    relaxed_release: "R2",
    no_spin: "R1",
    one_look: "R1",
    relaxed_spin: "R1",
    added_after_its_turn: "R1",
    too_few_registers: "R5",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants_fail(monkeypatch, mutant):
    with monkeypatch.context() as patch:
        mutant(patch)
        found = certify(kernel.configure("bf16", 128, "band", ordered=True))
    assert MUTANTS[mutant] in {f.rule for f in found.findings}, found.findings
