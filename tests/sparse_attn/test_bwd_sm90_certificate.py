"""Defects put into the ordered backward's turns on purpose: certificate B must name each one."""

from __future__ import annotations

import pytest

from ptxsim import skips

skips.import_module("verify.certificate")
kernel = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")

from cute_kernels.sparse_attn import config, launch  # noqa: E402
from tests import certified  # noqa: E402

cute, turnstile, Int32 = kernel.cute, kernel.turnstile, kernel.cutlass.Int32

CHOSEN = config.configure("bf16", 128, "band", ordered=True)
(EXPECT,) = (e for k, _, e in launch.catalogue() if k == launch.entry(CHOSEN))


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
        rank_read = cute.arch.load(semaphore, Int32, sem="relaxed", scope="gpu")
        while rank_read != rank:
            rank_read = cute.arch.load(semaphore, Int32, sem="relaxed", scope="gpu")

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


#: One of each rule, and the release that another CTA does not see.
OFTEN = (no_wait, no_release, release_in_the_cta, one_look, too_few_registers)


@pytest.mark.mutants
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=() if m in OFTEN else pytest.mark.nightly) for m in MUTANTS],
    ids=lambda m: m.__name__,
)
def test_mutants_fail(monkeypatch, mutant):
    with monkeypatch.context() as patch:
        mutant(patch)
        certificate = certified.certify(launch.entry(CHOSEN), "B", EXPECT)
    assert MUTANTS[mutant] in {f.rule for f in certificate.findings}, certificate.findings
