"""Plans and contract ids: a function of what they should depend on, and of nothing else."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch, contracts
from cute_kernels.gemm import config, launch, tiles
from cute_kernels.schedulers.tiles import leaves

NUMBERS_OF_ROWS = {"m", "M", "rows", "tokens", "shape", "numel", "size", "multi_processor_count"}


def readers_of_m(source: str) -> set[str]:
    """The functions of a source that take, or name, a number of rows or a module that may."""
    out = set()
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        names = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
        if names & {*NUMBERS_OF_ROWS, "tiles"}:
            out.add(function.name)
    return out


@pytest.mark.parametrize("module", [config, leaves], ids=lambda module: module.__name__)
def test_the_order_cannot_read_m(module):
    """No function of what decides bits sees a number of rows, or the file that does."""
    source = inspect.getsource(module)
    name = {config: "contract_facts", leaves: "length"}[module]
    assert readers_of_m(source) - {"size"} == set()
    by_m = source.replace(f"def {name}(", f"def {name}(rows, ")
    asks = source.replace(f"def {name}(k):", f"def {name}(k):\n    tiles.choose(k)").replace(
        "def contract_facts(backend: str,", "def contract_facts(tiles,"
    )
    assert by_m != source != asks
    assert readers_of_m(by_m) - {"size"} == readers_of_m(asks) - {"size"} == {name}


def test_the_leaves_are_a_function_of_k():
    """Whole groups of 16, at most eight of them, and eighths where K is a multiple of 128."""
    for k in (*range(1, 3000), 4096, 11008, 14336, 2**31 - 1):
        length, count = leaves.length(k), leaves.count(k)
        assert length % 16 == 0 and 1 <= count <= leaves.LEAVES
        assert (count - 1) * length < k <= count * length
        assert sum(leaves.size(leaf, k) for leaf in range(leaves.LEAVES)) == k
        if k % 128 == 0:
            assert length * leaves.LEAVES == k


def test_the_catalogue_is_complete_and_distinct():
    out = [*launch.configs(), *launch.skinny_configs()]
    assert len(out) == len(set(out))
    dtypes = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
    for one in launch.configs():
        tile = tiles.Dense(one.tile_n)
        majors = one.a_major, one.b_major
        assert one == launch.dense_config(dtypes[one.dtype], *majors, one.epilogue, tile, one.order)
    for one in launch.skinny_configs():
        tile = tiles.Skinny(*(getattr(one, name) for name in tiles.Skinny._fields))
        assert one == launch.skinny_config(
            dtypes[one.dtype], one.w_major, one.bias, tile, one.order
        )


@pytest.fixture
def sm90(monkeypatch):
    """A machine whose cuda:0 is an H200, as far as facts go."""
    h200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
    describe = arch.describe
    monkeypatch.setattr(
        arch, "describe", lambda d: h200 if torch.device(d).type == "cuda" else describe(d)
    )


def ids():
    out = {}
    for op in ("linear", "matmul", "skinny_linear"):
        for device, dtype in (
            ("cpu", torch.bfloat16),
            ("cuda:0", torch.bfloat16),
            ("cuda:0", torch.float32),
        ):
            out[op, device, dtype] = ck.contract_id(op, device, dtype)
    return out


def test_ids_name_op_backend_and_arch(sm90):
    out = ids()
    assert out["linear", "cuda:0", torch.bfloat16].startswith("linear/cute_sm90/sm_90a/")
    assert out["linear", "cuda:0", torch.float32].startswith("linear/triton/sm_90a/")
    assert out["matmul", "cpu", torch.bfloat16].startswith("matmul/cpu/")
    assert len(set(out.values())) == len(out)


CONSTANTS = [
    *(("TRITON", "TRITON", f.name) for f in dataclasses.fields(config.TRITON)),
    *(("TRITON", "TRITON_FP32", f.name) for f in dataclasses.fields(config.TRITON)),
    *(("CPU", "CPU", f.name) for f in dataclasses.fields(config.CpuPlan)),
    *(("SM90", "COLUMN_SUM", f.name) for f in dataclasses.fields(config.ColumnSumPlan)),
]


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, "another")
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize(("backend", "plan", "name"), CONSTANTS)
def test_every_constant_is_in_the_id(sm90, monkeypatch, backend, plan, name):
    before = ids()
    value = getattr(config, plan)
    new = dataclasses.replace(value, **{name: changed(getattr(value, name))})
    monkeypatch.setattr(config, plan, new)
    after = ids()
    touched = {key for key in before if before[key] != after[key]}
    device, dtype = {
        "SM90": ("cuda:0", torch.bfloat16),
        "TRITON": ("cuda:0", torch.float32),
        "CPU": ("cpu", torch.bfloat16),
    }[backend]
    assert ("linear", device, dtype) in touched
    other = "cpu" if device != "cpu" else "cuda:0"
    assert ("linear", other, torch.bfloat16) not in touched


def test_no_tile_is_in_the_id(sm90, monkeypatch):
    """Which one a call takes follows M, and no bit follows it."""
    before = ids()
    monkeypatch.setattr(tiles, "DENSE_COST", {64: 1.0})
    monkeypatch.setattr(tiles, "SKINNY_COST", {(64, 16, 1): (1.0, 1.0)})
    assert ids() == before


@pytest.mark.parametrize("name", ["ORDERS", "K_GROUP", "LEAVES"])
def test_the_order_is_in_every_id(sm90, monkeypatch, name):
    before = ids()
    monkeypatch.setattr(config, name, changed(getattr(config, name)))
    after = ids()
    assert all(before[key] != after[key] for key in before)


@pytest.mark.parametrize(
    ("backend", "distribution", "key"),
    [
        (arch.CUTE_SM90, "nvidia-cutlass-dsl-libs-cu13", ("linear", "cuda:0", torch.bfloat16)),
        (arch.TRITON, "triton", ("linear", "cuda:0", torch.float32)),
        (arch.CPU, "torch", ("linear", "cpu", torch.bfloat16)),
    ],
)
def test_the_toolchain_is_in_the_id(sm90, monkeypatch, backend, distribution, key):
    before, version = ids(), arch.version
    monkeypatch.setattr(
        arch, "version", lambda name: "9.9" if name == distribution else version(name)
    )
    after = ids()
    assert {k for k in before if before[k] != after[k]} == {k for k in before if _on(k, key)}


def _on(key, like) -> bool:
    return key[1:] == like[1:]


def test_nothing_else_is_in_the_id(sm90, monkeypatch):
    before = ids()
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "7")
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    torch.use_deterministic_algorithms(True)
    try:
        assert ids() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_thread_count_is_in_the_cpu_id():
    before = torch.get_num_threads()
    out = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out.add(ck.contract_id("linear", "cpu"))
    finally:
        torch.set_num_threads(before)
    assert len(out) == 2


def test_guarantees(sm90):
    on_gpu = ck.guarantees("linear", "cuda:0")
    assert on_gpu == {"run_to_run", "batch_invariant", "split_invariant", "schedule_invariant"}
    assert ck.guarantees("linear", "cpu") == on_gpu - {"schedule_invariant"}
    assert on_gpu <= set(contracts.MEANING)
