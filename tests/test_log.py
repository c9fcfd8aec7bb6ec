"""CUTE_KERNELS_LOG and the record of what ran: each thing once, and nothing in a second call."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

import pytest
import torch

import cute_kernels as ck
from cute_kernels import log
from cute_kernels.compile import aot, cache, toolchain
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.runtime import dispatch, operands
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch, masks
from cute_kernels.sparse_attn.api import block_sparse_attention
from cute_kernels.sparse_attn.tensors import Grads, Saved
from tests.compile import toy

BF16 = torch.bfloat16


@pytest.fixture
def lines(monkeypatch, caplog):
    """What the logger says, as a function that hands over what is new; LOG is on."""
    monkeypatch.setenv("CUTE_KERNELS_LOG", "1")
    level = log.LOGGER.level
    log._copies.clear()
    log._open.cache_clear()
    caplog.set_level(logging.INFO)

    def new() -> list[str]:
        messages = [r.getMessage() for r in caplog.records if r.name.startswith("cute_kernels")]
        caplog.clear()
        return messages

    yield new
    log._open.cache_clear()
    log._copies.clear()
    log.LOGGER.setLevel(level)


def rows(dtype=torch.float32, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 16))).to(dtype)


# What ran.


def test_each_combination_is_said_once_with_its_contract_id(lines, monkeypatch):
    for _ in range(3):
        ck.linear(rows(), rows())
    assert lines() == [
        f"linear (gemm): cpu on cpu, float32, {ck.contract_id('linear', 'cpu', torch.float32)}"
    ]
    ck.linear(rows(BF16), rows(BF16))
    ck.matmul(rows(BF16), rows(BF16, 16, 3))
    assert lines() == [f"linear (gemm): cpu on cpu, bfloat16, {ck.contract_id('linear')}"]
    before = dispatch.ran()
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cpu")  # the same by another way
    ck.linear(rows(), rows())
    ck.linear(torch.empty(0, 16), torch.randn(4, 16))  # nothing is launched
    ck.linear(torch.empty(3, 16, device="meta"), torch.empty(4, 16, device="meta"))
    with pytest.raises(ck.errors.DtypeError):
        ck.linear(rows(torch.float64), rows(torch.float64))
    monkeypatch.setenv("CUTE_KERNELS_LOG", "0")
    ck.linear(rows(torch.float16), rows(torch.float16))
    log.copied("gemm", "a", rows(), "anything")
    assert lines() == [] and not log._copies and dispatch.ran()[: len(before)] == before
    assert len(dispatch.ran()) == len(before) + 1


def test_the_record_is_of_what_ran_and_in_its_order():
    assert ck.info()["ran"] == []
    x, weight, bias = (rows(BF16, *shape).requires_grad_() for shape in ((5, 16), (4, 16), (4,)))
    ck.linear(x, weight, bias).sum().backward()
    q = rows(BF16, 1, 8, 2, 64).requires_grad_()
    block_sparse_attention(q, q, q, causal=True).sum().backward()
    ran = ck.info()["ran"]
    assert json.loads(json.dumps(ran)) == ran
    attention = "block_sparse_attention"
    assert [(run["op"], run["kernel"]) for run in ran] == [
        ("linear", "gemm"),
        ("linear", "column_sum"),
        (attention, attention),
        (attention, f"{attention}_backward"),
    ]
    for run in ran:
        assert (run["backend"], run["device"], run["dtype"]) == ("cpu", "cpu", "bfloat16")
        assert run["contract_id"] == ck.contract_id(run["op"])
        assert datetime.fromisoformat(run["first"]).utcoffset().total_seconds() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda: ck.linear(rows(), rows()),
        lambda: dispatch.launcher("gemm", torch.device("cpu"), torch.float32),
    ],
    ids=["plan", "launcher"],
)
def test_another_number_of_threads_is_another_record(lines, use):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            use()
            assert dispatch.ran()[-1 if threads == 2 else 0].contract_id == ck.contract_id(
                "linear", "cpu", torch.float32
            )
    finally:
        torch.set_num_threads(before)
    assert len(lines()) == len({run.contract_id for run in dispatch.ran()}) == 2


def test_a_second_call_asks_nothing_of_the_record_or_the_log():
    """What it costs when off: no function of these modules runs in a call like an earlier one."""
    x, weight = rows(), rows()
    ck.linear(x, weight)
    called = []

    def watch(frame, event, _):
        if event == "call":
            called.append((frame.f_globals["__name__"], frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        ck.linear(x, weight)
    finally:
        sys.setprofile(None)
    assert ("cute_kernels.runtime.dispatch", "launcher") in called
    names = {"cute_kernels.log", "cute_kernels.contracts", "cute_kernels.arch", "logging"}
    assert not [call for call in called if call[0] in names]


def test_lines_go_to_standard_error_unless_the_program_has_handlers():
    script = """
        import logging, torch, cute_kernels as ck
        x = torch.randn(3, 16)
        ck.linear(x, x)
        logging.basicConfig(format="ours %(name)s %(message)s")
        ck.linear(x.half(), x.half())
    """
    process = toy.python(script, CUTE_KERNELS_LOG="1")
    assert process.returncode == 0, process.stderr
    first, second = process.stderr.splitlines()
    assert first.startswith("cute_kernels: linear (gemm): cpu on cpu, float32, linear/cpu/")
    assert second.startswith("ours cute_kernels linear (gemm): cpu on cpu, float16, linear/cpu/")


# What is copied: the launchers, on CPU tensors, without their kernels.


def odd(*shape: int, dtype=BF16) -> torch.Tensor:
    """Every stride but the last is odd."""
    return torch.randn(*shape[:-1], shape[-1] | 1).to(dtype)[..., : shape[-1]]


@pytest.fixture
def no_kernels(monkeypatch):
    for module, names in (
        (gemm_launch, ("gemm_kernel", "skinny_kernel", "_column_sum_kernel")),
        (launch, ("kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *key: lambda *arguments: None)


def copied(found: list[str]) -> list[tuple[str, str]]:
    """(kernel, argument) of the lines about copies."""
    return [
        (line.split(": ")[0], line.split(" ")[2].rstrip(":")) for line in found if "copies" in line
    ]


def test_each_copy_of_a_product_is_named_once_with_what_was_wrong(lines, no_kernels):
    a, b = odd(8, 16), odd(6, 16)
    gemm_launch.gemm(a, b, torch.randn(12).to(BF16)[::2], None)
    out = lines()
    assert copied(out) == [("gemm", name) for name in ("bias", "a", "b", "out")]
    assert out[1] == (
        f"gemm: copies a: bfloat16 [8, 16], strides (17, 1), {a.data_ptr() % 16} bytes past a "
        f"multiple of 16; wanted: {operands._MATRIX}"
    )
    gemm_launch.gemm(odd(24, 16), odd(6, 16), None, None)
    assert lines() == []
    accumulator = odd(8, 6, dtype=torch.float32)
    gemm_launch.gemm(rows(BF16, 8, 16), rows(BF16, 6, 16), None, accumulator)
    gemm_launch.column_sum(odd(8, 6))
    assert copied(lines()) == [("gemm", "accumulator"), ("gemm", "rows")]
    log._copies.clear()
    a, b = rows(BF16, 8, 16), rows(BF16, 16, 8).mT
    gemm_launch.gemm(a, b, rows(BF16, 8), None)
    gemm_launch.gemm(a, b, None, rows(torch.float32, 8, 8))
    gemm_launch.column_sum(a)
    ck.linear(rows(torch.float32, 2, 5, 16), rows())
    assert copied(lines()) == []
    ck.linear(rows(torch.float32, 5, 2, 16).transpose(0, 1), rows())
    assert copied(lines()) == [("gemm", "rows")]


def test_each_copy_of_attention_is_named(lines, no_kernels, monkeypatch):
    monkeypatch.setattr(launch, "most_ctas", lambda device: 1)
    mask = masks.lower(BlockMask.causal(20, 20))
    schedule = ck.schedulers.spt(mask.mask, heads=2)
    order = masks.order_of(mask, schedule)
    q, k, v, dout, out = (odd(1, 20, 2, 64) for _ in range(5))
    lse = torch.randn(1, 20, 2).transpose(1, 2)
    launch.forward(q, k, v, mask, 0.125, 0.0)
    assert [name for _, name in copied(lines())] == ["q", "k", "v"]
    launch.backward(Grads(dout, lse), Saved(q, k, v, out, lse), mask, order, 0.125, 0.0, True)
    assert [name for _, name in copied(lines())] == ["dout", "out", "dlse", "lse"]
    whole = rows(BF16, 1, 20, 2, 64)
    launch.forward(whole, whole, whole, mask, 0.125, 0.0)
    assert lines() == []


# What is compiled.


@toy.needs_linker
def test_where_each_kernel_came_from_is_said(lines, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "source_digest", lambda: toolchain.SOURCE_AT_IMPORT)
    cache.clear()
    try:
        for _ in range(2):
            cache.get(toy.kernel(7), "sm_90a")
        cache.clear()
        cache.get(toy.kernel(7), "sm_90a")
        (library,) = (tmp_path / "cache").glob("toy-*.so")
        first, second = lines()
        assert first.startswith(f"toy (value=7) for sm_90a: compiled into {library}, ")
        assert second.startswith(f"toy (value=7) for sm_90a: loaded from {library}, ")
        assert all(float(line.split(", ")[-1].removesuffix(" s")) >= 0 for line in (first, second))
        aot.export([toy.kernel(8)], "sm_90a", tmp_path / "aot")
        aot.load(tmp_path / "aot")
        cache.get(toy.kernel(8), "sm_90a")
        start = "kernels loaded that were compiled ahead of time"
        assert lines() == [f"{start}: 1, from {tmp_path / 'aot'}"]
    finally:
        cache.clear()
