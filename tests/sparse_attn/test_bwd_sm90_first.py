"""The SM90 backward's first writers and launches: dQ without zeros, rows before keys, dependents.

The visit of rank 0 stores its tile of dQ where others add theirs, with the bytes that it had when
all were added to zeros; tiles without a visit are zeros that the last kernel makes.
"""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import config, launch
from ptxsim import skips
from ptxsim.modes import ANY_CTA
from tests import contract
from tests.kernels.edited import changed

simulated = skips.import_module("tests.sparse_attn.simulated")
simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
module = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")
certificate = skips.import_module("verify.certificate")
sass = skips.import_module("verify.sass")
EACH_COMMIT = (
    "test_what_is_stored_is_what_a_bulk_add_to_zero_makes test_mutants_are_killed "
    "test_tiles_without_a_visit_that_are_read_are_noticed"
)
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

turnstile = module.turnstile
OPTIONS = ("pdl", "rows_first", "first_stores")
#: Of tiles of 64 rows: dP is asked for behind S, before dQ of the visit before is handed over.
MORE = (*OPTIONS, "dp_first")
OFF = dict.fromkeys(MORE, False)
NIGHT = pytest.mark.nightly


def backward(case, schedule, **options):
    """Gradients with these options of the configuration."""
    settings = {name: options.pop(name) for name in MORE if name in options}
    true = config.configure

    def configure(*args, **kwargs):
        return dataclasses.replace(true(*args, **kwargs), **settings)

    with mock.patch.object(config, "configure", configure):
        return simulated_bwd.backward(case, schedule, **options)


def holes() -> BlockMask:
    """The second query block and the third key block of four see nothing and are seen by none."""
    allowed = torch.ones(1, 1, 400, 400, dtype=torch.bool).tril()
    allowed[..., 128:256, :] = allowed[..., 256:384] = False
    return BlockMask.from_dense(allowed)


@functools.cache
def problem(head_dim: int, name: str):
    """(case, schedule) of a mask with empty rows and columns, or of one with groups."""
    mask, heads = (holes(), 1) if name == "holes" else (BlockMask.causal(330, 330), 2)
    case = simulated_bwd.case(mask, head_dim=head_dim, heads=heads, kv_heads=1)
    return case, kinds.spt(case.lowered.mask, heads=case.kv_heads)


def subnormal(head_dim: int):
    """One block of keys so small that all of dQ is below 2^-126."""
    case = simulated_bwd.case(BlockMask.full(130, 100), head_dim=head_dim)
    return case._replace(k=case.k * 2.0**-130), kinds.left_to_right(case.lowered.mask, heads=1)


def same(a, b) -> bool:
    """Whether dq, dk and dv have the same bytes; the workspace of tiles without a visit may not."""
    return all(map(contract.same_bytes, a[:3], b[:3]))


@pytest.mark.parametrize(
    ("head_dim", "name", "options"),
    [
        (128, "holes", MORE),
        pytest.param(64, "causal", OPTIONS, marks=NIGHT),
        pytest.param(96, "holes", MORE, marks=NIGHT),
        *(pytest.param(d, "holes", (o,), marks=NIGHT) for d in (64, 128) for o in OPTIONS),
        *(pytest.param(d, "causal", ("pdl", "rows_first"), marks=NIGHT) for d in (192, 256)),
    ],
)
def test_options_change_no_byte(head_dim, name, options):
    case, schedule = problem(head_dim, name)
    want = backward(case, schedule, **OFF)
    for settings in ({}, ANY_CTA | {"seed": 2, "resident_ctas": 2}):
        results = backward(case, schedule, **OFF | dict.fromkeys(options, True), **settings)
        assert same(results, want)


@pytest.mark.parametrize("head_dim", [128, pytest.param(64, marks=NIGHT)])
def test_what_is_stored_is_what_a_bulk_add_to_zero_makes(monkeypatch, head_dim):
    """+0 of a subnormal number, which bulk adds of fp32 flush; stored as it is, it would be kept.

    The simulator's bulk adds flush nothing, so the kernel without stores is no reference here.
    """
    case, schedule = subnormal(head_dim)
    assert not simulated_bwd.backward(case, schedule).dq.view(torch.int16).any()

    def kernel(chosen):
        with monkeypatch.context() as patch:
            patch.setattr(turnstile, "add_zero", lambda tensor: None)
            return module.build(chosen, compile=ptxsim.compile)

    assert simulated_bwd.backward(case, schedule, backward=kernel).dq.view(torch.int16).any()


@pytest.mark.parametrize("head_dim", [128, pytest.param(96, marks=NIGHT)])
def test_many_key_blocks_take_zeros_and_the_same_bytes(monkeypatch, head_dim):
    """The mask has 6 of 16 blocks: 1.5 key blocks a query block."""
    case, schedule = problem(head_dim, "holes")
    taken = []

    def kernel(chosen):
        taken.append(chosen.first_stores)
        return simulated.kernel(chosen)

    results = []
    for few in (1.5, 1.49):
        monkeypatch.setattr(config, "FEW_KEY_BLOCKS", few)
        results.append(backward(case, schedule, backward=kernel))
    assert taken == [True, False]
    assert same(*results)


# ---- mutants -------------------------------------------------------------------------------------


def first_adds(patch):
    """Rank 0 adds to what was there."""
    patch.setattr(turnstile, "store", turnstile.add)


def others_store(patch):
    """Every rank but 0 stores."""
    true, stored = turnstile.add, turnstile.store
    patch.setattr(turnstile, "add", stored)
    patch.setattr(turnstile, "store", true)


def first_is_not_committed(patch):
    """The wait before the turn's end does not cover the store."""
    true = module.cute.arch.cp_async_bulk_commit_group

    def store(destination, source, size):
        opcode = "cp.async.bulk.global.shared::cta.bulk_group"
        turnstile._bulk_copy(opcode, destination, source, size)

    assert true is module.cute.arch.cp_async_bulk_commit_group
    patch.setattr(turnstile, "store", store)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", [first_adds, others_store, first_is_not_committed])
def test_mutants_are_killed(monkeypatch, mutant):
    @functools.cache
    def kernel(chosen):
        with monkeypatch.context() as patch:
            mutant(patch)
            return module.build(chosen, compile=ptxsim.compile)

    case, schedule = problem(128, "holes")
    want = simulated_bwd.backward(case, schedule)
    late = {"async_mode": "late", "wgmma_mode": "late", "warp_order": "random", "seed": 3}
    try:
        results = [simulated_bwd.backward(case, schedule, backward=kernel, **late)]
    except ptxsim.PtxsimError:
        return
    assert not same(results[0], want)


@pytest.mark.mutants
def test_tiles_without_a_visit_that_are_read_are_noticed(tmp_path):
    """Their workspace starts as NaN."""
    line = "            holds = mSemaphore[batch, head, tile] != 0\n"
    post = changed(tmp_path, "sparse_attn.kernel_bwd_post_sm90", line, line[:-5] + ">= 0\n")
    case, schedule = problem(128, "holes")

    @functools.cache
    def kernel(chosen):
        return post.build(chosen, compile=ptxsim.compile)

    assert simulated_bwd.backward(case, schedule).dq.isfinite().all()
    assert simulated_bwd.backward(case, schedule, post=kernel).dq.isnan().any()


WAIT = "            cute.arch.griddepcontrol_wait()\n"


@pytest.mark.parametrize(
    "wait", [" " * 12 + "pass\n", pytest.param(WAIT[:-1] + "  # as it is\n", marks=NIGHT)]
)
@pytest.mark.parametrize("which", ["main", "post"])
def test_a_dependent_kernel_that_does_not_wait_is_refused(tmp_path, which, wait):
    """The simulator runs one kernel after the other; rule R3 of the certificates sees this."""
    main = config.configure("bf16", 64, "band", True)
    post = launch.configs_around(main, False)[1]
    chosen, name, check, entry = {
        "main": (main, "kernel_bwd_sm90", certificate.check_b, launch.entry(main)),
        "post": (post, "kernel_bwd_post_sm90", certificate.check_a, launch.entry(post)),
    }[which]
    (expect,) = (e.expect for e in launch.catalogue() if e.kernel == entry)
    edited = changed(tmp_path, f"sparse_attn.{name}", WAIT, wait)
    artefacts = sass.artefacts(lambda: edited.build(chosen))
    assert {f.rule for f in check(artefacts, expect)} == (set() if "wait" in wait else {"R3"})
