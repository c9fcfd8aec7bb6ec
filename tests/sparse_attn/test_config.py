"""The plan names what bits depend on; "auto" is one schedule."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cute_kernels import arch, contracts
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.model import machines, selection
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import check
from cute_kernels.sparse_attn import config, launch, masks, op

#: Forms of a forward: of masks, and of key ranges.
FORMS = (*masks.FORMS, "spans")
H200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
H100_PCIE = dataclasses.replace(H200, units=114)


def test_auto_on_a_gpu_is_what_select_finds_for_the_kv_heads(monkeypatch):
    requested = []
    true = selection.select

    def select(*args, **options):
        requested.append(options)
        return true(*args, **options)

    monkeypatch.setattr(selection, "select", select)
    mask = BlockMask.causal(1024, 1024)
    out = config.auto(mask, 4, 128, "cuda", 2)
    assert requested == [{"heads": 4, "machine": "cute_sm90_d128", "group": 2}]
    assert check(out, mask).any_residency and out.heads == 4
    assert config.auto(mask, 4, 128, "cuda", 2).hash == out.hash
    config.auto(mask, 4, 64, "cuda")
    assert requested[-1]["machine"] == "cute_sm90_d64"
    # A CPU has a cheap kind.
    asked = len(requested)
    assert config.auto(mask, 4, 128, "cpu").hash == kinds.spt(mask, heads=4).hash
    assert len(requested) == asked


def test_the_plan_follows_the_machine_that_auto_reckons_with(monkeypatch):
    """Refitted costs can give another order and so give another id; the SM count gives neither."""
    before = config.contract_facts(arch.CUTE_SM90, H200)
    assert config.contract_facts(arch.CUTE_SM90, H100_PCIE) == before
    machine = machines.resolve("cute_sm90_d64")
    changed = dataclasses.replace(machine, handoff_ns=machine.handoff_ns + 1)
    monkeypatch.setattr(
        config, "resolve", lambda name: changed if name == machine.name else machines.resolve(name)
    )
    assert config.contract_facts(arch.CUTE_SM90, H200) != before
    assert config.contract_facts(arch.CPU, H200) != before


@pytest.mark.parametrize("backend", [arch.CUTE_SM90, arch.TRITON, arch.CPU])
def test_the_plan_follows_the_version_of_the_schedules(monkeypatch, backend):
    before = config.contract_facts(backend, H200)
    monkeypatch.setattr(config, "VERSION", config.VERSION + 1)
    assert config.contract_facts(backend, H200) != before


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        (arch.CUTE_SM90, H200),
        (arch.TRITON, arch.Device("cuda:0", "hip", "gfx942", 304)),
        (arch.TRITON, arch.Device("cuda:0", "cuda", "sm_80", 108)),
        (arch.CPU, None),
    ],
)
def test_an_id_names_what_bits_depend_on(monkeypatch, backend, device):
    """Another Triton tile, or number of threads: another id."""
    where = "cpu" if device is None else "cuda:0"
    if device is not None:
        monkeypatch.setattr(arch, "_installed", lambda name: True)
        monkeypatch.setattr(arch, "describe", lambda _: device)
    name = contracts.contract_id(op.NAME, where)
    assert name.startswith(f"block_sparse_attention/{backend}/{device.arch if device else ''}")
    assert contracts.guarantees(op.NAME, where) == config.KEPT[backend]
    plan = config.TRITON[64]
    other = dataclasses.replace(plan, dq=dataclasses.replace(plan.dq, block_n=32))
    monkeypatch.setitem(config.TRITON, 64, other)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        changed = contracts.contract_id(op.NAME, where) != name
    assert changed == (backend != arch.CUTE_SM90)


@pytest.mark.parametrize("dim", config.HEAD_DIMS)
def test_a_dq_tile_divides_a_block(dim):
    assert 128 % config.configure("bf16", dim, "none", True).tile_m == 0


@pytest.mark.parametrize("dim", config.HEAD_DIMS)
def test_rank_0_stores_where_it_pays(dim):
    """With tiles of 64 rows up to 32 key blocks; never where two threads add a tile."""
    stores = [
        config.configure("bf16", dim, "band", True, key_blocks=n).first_stores
        for n in (0, 4.5, 32, 32.5, 64)
    ]
    assert stores == {64: [True] * 5, 96: [True] * 3 + [False] * 2}.get(
        96 if dim == 128 else dim, [False] * 5
    )
    assert not config.configure("bf16", dim, "band", False).first_stores


@pytest.mark.parametrize("dim", config.HEAD_DIMS)
def test_the_catalogue_has_every_choice(dim):
    """Backwards of any number of key blocks, forwards with sinks, both passes of varlen batches."""
    choices = []
    for form, ordered, key_blocks in itertools.product(
        launch.FORMS, (False, True), (0, 1.5, 32, 33, 1e9)
    ):
        main = config.configure("fp16", dim, form, ordered, key_blocks=key_blocks)
        choices += [main, *launch.configs_around(main, True)]
    for dtype, softcap, sinks in itertools.product(("bf16", "fp16"), *2 * [(False, True)]):
        of_forms = [config.configure_forward(dtype, dim, form, softcap, sinks) for form in FORMS]
        of_batch = dtype, dim, config.VARLEN_FORM
        assert len({launch.entry(one).identity for one in of_forms}) == len(FORMS)
        choices += [*of_forms, config.configure_forward(*of_batch, softcap, sinks, True)]
        choices.append(config.configure(*of_batch, True, softcap, packed=True))
    kernels = [entry.kernel for entry in launch.catalogue()]
    assert {launch.entry(one).identity for one in choices} <= {one.identity for one in kernels}
    tables = [dict(one.constexpr) for one in kernels if "varlen_tables" in one.name]
    assert {one["offsets"] for one in tables} == set(config.OFFSETS)


def test_entries_hold_all_that_their_build_reads():
    """Another value, another key."""
    first = config.configure("bf16", 128, "band", True)
    for name, value in dataclasses.asdict(first).items():
        step = {str: lambda v: v + "x", bool: lambda v: not v, int: lambda v: v + 1}
        other = step[type(value)](value)
        changed = dataclasses.replace(first, **{name: other})
        assert launch.entry(changed) != launch.entry(first), name
